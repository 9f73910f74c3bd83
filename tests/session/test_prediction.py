from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from perfsuite.case.case import Case, Topology
from perfsuite.errors import DryRunError
from perfsuite.results.counts import Compiled, Counts, RankCounts
from perfsuite.results.dry_facts import DryFacts
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from perfsuite.session.prediction import predicted
from tests.analysis.step_time.test_forecast import step
from tests.samples import make_case, make_gpu_machine, make_run

H100 = "NVIDIA H100 80GB HBM3"
CASE = make_case(hardware="gpu", topology=Topology(processes_per_node=8))
COMPILED = Compiled(graphs=1, recompilations=0, kernels=1, extern_calls=1)


def counts(flops: int = 100, **changes: Any) -> tuple[RankCounts, ...]:
    return (RankCounts(ranks=(0,), counts=Counts(flops={"forward": flops}).replace(**changes)),)


def launch(**changes: Any) -> Run:
    return make_run(case=CASE, machine=make_gpu_machine(H100), counts=counts()).replace(**changes)


class Dry:
    """Replaces dry runs. Each returns `run`."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.run = make_run(dry=True, counts=counts(), dry_facts=DryFacts(expected=step(1)))

    def __call__(self, case: Case, directory: Path, **how: Any) -> Run:
        self.calls.append(how)
        return self.run


@pytest.fixture
def dry() -> Dry:
    return Dry()


def test_the_dry_run_simulates_the_machine_of_the_launch(dry: Dry, tmp_path: Path) -> None:
    machine = make_gpu_machine("NVIDIA A100-SXM4-80GB").replace(interconnect="8xib200")
    assert predicted(launch(machine=machine), tmp_path, dry_run=dry) == DryFacts(expected=step(1))
    assert dry.calls == [{"gpu": "NVIDIA A100-SXM4-80GB", "interconnect": "8xib200"}]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"machine": make_gpu_machine("NVIDIA A10G")}, "the times of kernels on NVIDIA A10G are unknown"),
        ({"counts": counts(compiled=COMPILED)}, "the model is compiled"),
        ({"case": CASE.replace(compile=True), "counts": ()}, "the model is compiled"),
        ({"counts": counts(ops={"aten._grouped_mm": 1})}, "experts get equally many tokens"),
    ],
)
def test_a_launch_that_cannot_be_predicted_needs_no_dry_run(
    dry: Dry, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    facts = predicted(launch(**changes), tmp_path, dry_run=dry)
    assert facts.expected is None
    assert why in str(facts.no_expected)
    assert dry.calls == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"failure": Failure(kind="not_dry", message="it reads values")},
            "the dry run failed: it reads values",
        ),
        ({"counts": counts(50)}, "the dry run does 50% of the FLOPs that the launch does"),
        ({"dry_facts": DryFacts(no_expected="cut short")}, "cut short"),
        ({"dry_facts": None}, "the dry run has no expected time of a step"),
    ],
)
def test_a_dry_run_that_shows_nothing_is_the_reason(
    dry: Dry, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    dry.run = dry.run.replace(**changes)
    assert predicted(launch(), tmp_path, dry_run=dry) == DryFacts(no_expected=why)


def test_a_refused_dry_run_is_the_reason(tmp_path: Path) -> None:
    refuse = Mock(side_effect=DryRunError("a dry run cannot do this"))
    facts = predicted(launch(), tmp_path, dry_run=refuse)
    assert facts == DryFacts(no_expected="a dry run cannot do this")
