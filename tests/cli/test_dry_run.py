"""Tests of what `perfsuite dry-run` prints and refuses. All dry runs except one are fake."""

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from perfsuite import FSDP, FSDP2, KnownIssue, Topology, documents
from perfsuite.results.rank_report import Failure
from perfsuite.results.session_file import SessionFile
from perfsuite.session import dry
from perfsuite.session.dry import ONE_RANK
from tests.cli import commands
from tests.processes import have_compiler
from tests.samples import make_case
from tests.session.making import DryRuns

CASE = make_case(framework=FSDP2(), hardware="h100")
OFFLOADS = CASE.replace(framework=FSDP(sharding_strategy="FULL_SHARD", cpu_offload=True))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the collected cases, on a machine where CUDA can be pretended."""
    have_compiler(tmp_path / "compiler", monkeypatch)
    commands.hold(monkeypatch, CASE, OFFLOADS)


@pytest.fixture
def dry_runs(monkeypatch: pytest.MonkeyPatch) -> DryRuns:
    runs = DryRuns()
    monkeypatch.setattr("perfsuite.cli.dry_run.dry_session", partial(dry.dry_session, dry_run=runs))
    return runs


command = partial(commands.run, "dry-run")


def test_first_dry_run_records_second_compares(dry_runs: DryRuns) -> None:
    printed = commands.flat(command(CASE.id).stdout)
    assert f"{CASE.id}: recorded in a dry run as if on NVIDIA H100 80GB HBM3" in printed
    assert Path(f".perfsuite/baselines/counts/dry-sm90/{CASE.id}.json").exists()
    (result,) = json.loads(command(CASE.id, "--json").stdout)["results"]
    assert (result["case_id"], result["verdict"]["outcome"]) == (CASE.id, "passed")
    assert result["runs"][0]["dry"] is True
    assert result["runs"][0]["counts"][0]["counts"]["flops"] == {"forward": 100}
    dry_runs.flops = 200
    assert f"{CASE.id}: regressed" in command(CASE.id, status=1).stdout
    assert dry_runs.ranks == [None] * 3


def test_a_dry_run_can_pretend_a_cpu(dry_runs: DryRuns) -> None:
    assert "as if on CPU" in command(CASE.id, "--device", "cpu").stdout
    assert Path(f".perfsuite/baselines/counts/dry-cpu/{CASE.id}.json").exists()


def test_one_rank_is_compared_and_never_recorded(dry_runs: DryRuns) -> None:
    printed = commands.flat(command(CASE.id, "--rank", "1").stdout)
    assert dry_runs.ranks == [(1,)]
    assert "step 4 of rank 1, counted:" in printed
    assert f"{CASE.id}: passed" in printed
    assert ONE_RANK in printed
    assert not Path(".perfsuite/baselines").exists()


def test_a_rank_without_a_baseline_is_not_judged(dry_runs: DryRuns) -> None:
    command(CASE.id)
    printed = commands.flat(command(CASE.id, "--rank", "1", status=3).stdout)
    assert f"{CASE.id}: inconclusive" in printed
    assert "rank 1 is not judged: not in the baseline" in printed


def test_skipping_every_case_is_no_success(dry_runs: DryRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.hold(monkeypatch, OFFLOADS)
    command("-k", "fsdp", status=3)
    assert dry_runs.ranks == []


def test_the_network_of_the_machines_can_be_given(dry_runs: DryRuns) -> None:
    command(CASE.id, "--interconnect", "8xib400")
    assert dry_runs.interconnects == ["8xib400"]
    error = commands.error_of("dry-run", CASE.id, "--interconnect", "fast")
    assert "--interconnect=fast: give the ports of a machine and their Gbit/s, such as 8xib400" in error


def test_failed_dry_run_ends_with_a_traceback(dry_runs: DryRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASE.replace(known_issue=KnownIssue(url="https://example.org/1", failure="crash"))
    commands.hold(monkeypatch, case)
    assert "known issue" not in command(case.id).stdout
    dry_runs.failure = Failure(kind="crash", message="RuntimeError: bad", rank=0, traceback="File ...\nbad")
    printed = command(case.id, status=1).stdout
    assert "crash: RuntimeError: bad" in printed
    assert "File ..." in printed
    assert "known issue" not in printed


def test_refused_case_does_not_affect_others(dry_runs: DryRuns) -> None:
    dry_runs.refused = OFFLOADS
    result = command(OFFLOADS.id, CASE.id, status=2)
    assert "a dry run cannot do this: offloading" in result.stderr
    assert f"{CASE.id}: recorded in a dry run" in result.stdout
    (file,) = Path(".perfsuite").glob("runs/*/results.json")
    session = documents.read(file, SessionFile)
    assert (session.status, session.dry) == ("complete", True)
    assert CASE.id in {measurement.case_id for measurement in session.results}
    result = command("-k", "fsdp", "--json")  # a case that cannot be run dry is skipped
    assert f"{OFFLOADS.id}: a dry run cannot do this: offloading" in result.stderr
    content = json.loads(result.stdout)
    assert [measurement["case_id"] for measurement in content["results"]] == [CASE.id]
    assert [skip["case_id"] for skip in content["skipped"]] == [OFFLOADS.id]


def test_several_cases_run_at_the_same_time(dry_runs: DryRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Mock(available=2**40))
    result = command(CASE.id, OFFLOADS.id)
    assert "perfsuite: 2 cases run dry, 2 at a time" in result.stderr
    printed = commands.flat(result.stdout)
    ends = [printed.index(f"{case.id}: recorded in a dry run") for case in (CASE, OFFLOADS)]
    assert ends == sorted(ends), "results are in the order of the cases"
    assert "at a time" not in command(CASE.id).stderr


NO_CASE = "no case is selected: give case ids, or select cases with -k"
NOT_BOTH = "give case ids or -k, not both"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"{OFFLOADS.id}", "a dry run cannot do this: offloading"),
        (f"{CASE.id} --rank 2", f"rank 2 does not exist: {CASE.id} has ranks 0 to 1"),
        ("nosuch", "is called 'nosuch'"),
        ("", NO_CASE),
        (f"{CASE.id} -k a", NOT_BOTH),
    ],
)
def test_refuses_an_impossible_dry_run(arguments: str, words: str) -> None:
    assert words in commands.error_of("dry-run", *arguments.split())


def test_a_pretended_gpu_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = shutil.which("git")
    assert git is not None
    (tmp_path / "only git").mkdir()
    (tmp_path / "only git" / "git").symlink_to(git)
    monkeypatch.setenv("PATH", str(tmp_path / "only git"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    error = commands.error_of("dry-run", CASE.id, "--device", "cuda")
    assert "--device cuda: there is no C++ compiler: install g++" in error


@pytest.mark.launch
@pytest.mark.nightly
def test_a_full_size_case_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case is Llama-3.2-1B on 64 GPUs that do not exist: 1.236e9 parameters, gradients sent in fp32."""
    topology = Topology(nodes=8, processes_per_node=8)
    case = CASE.replace(model="llama-3.2-1b", topology=topology, counted_steps=1)
    commands.hold(monkeypatch, case)
    printed = command(case.id, "--device", "cpu", "--rank", "63").stdout
    assert "step 4 of rank 63, counted:" in printed
    assert re.search(r"reduce_scatter .* float32 .* 4\.6\d* GiB\n", printed)
