"""Tests of this repository's reviewed baselines: each belongs to a case, and each possible case has one."""

from pathlib import Path

import pytest

from perfsuite import Case, documents
from perfsuite.dry.machine import pretended, why_not_dry
from perfsuite.frameworks.base import missing_package
from perfsuite.results.count_baseline import CountBaseline, target_of
from perfsuite.results.counts import METHOD, are_alike
from perfsuite.results.store import BaselineStore
from tests.bench_cases.test_published import CASES, case_of

COUNTS = BaselineStore(Path(__file__).parents[2] / "baselines").counts
FILES = COUNTS.files()
ON_A_CPU = [case for case in CASES.values() if "cpu" in case.hardware and case.known_issue is None]
# Compiled cases of torchtitan: a smaller batch, and tensor parallelism, with which 70B is registered.
UNREVIEWED = ("tensor_parallel_degree", "llama3_70b", "local_batch_size_1-compile")
FULL_SIZE = [case for case in CASES.values() if "cpu" not in case.hardware]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_baseline_is_accepted_for_its_case(file: Path) -> None:
    case = case_of(file.stem)
    baseline = documents.read(file, CountBaseline)
    assert baseline.accepted is not None
    assert baseline.case == case, "the case has changed: count it and accept it again"
    assert baseline.target == file.parent.name
    assert are_alike(baseline.method, METHOD), "its counts cannot be compared: accept them again"
    assert baseline.unsteady == ()
    assert {"torch", *baseline.case.framework.packages} <= baseline.versions.keys()


@pytest.mark.parametrize("case", ON_A_CPU, ids=lambda case: case.id)
def test_each_case_of_a_cpu_has_counts(case: Case) -> None:
    assert COUNTS.reviewed_file("cpu", case.id).exists()


@pytest.mark.parametrize("case", FULL_SIZE, ids=lambda case: case.id)
def test_each_case_that_can_be_run_dry_has_counts(case: Case) -> None:
    machine, instead = pretended(case, None)
    missing = missing_package(*case.framework.packages) or instead
    if missing is not None:
        pytest.skip(missing)
    is_unreviewed = case.compile and any(name in case.id for name in UNREVIEWED)
    if why_not_dry(case, machine) is None and not is_unreviewed:
        assert COUNTS.reviewed_file(target_of(machine, dry=True), case.id).exists()
