from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from perfsuite import DDP, Case, Fake
from perfsuite.case import torch_build
from perfsuite.case.fault import Structural
from perfsuite.case.hardware import Machine
from perfsuite.cli import selftest
from perfsuite.cli.checks import Row, Status
from perfsuite.cli.selftest import (
    EXPECTED,
    Base,
    Expectation,
    bases,
    inject_all,
    inject_structural,
    small_case,
)
from perfsuite.launch.lock import LOCK_FILE
from perfsuite.launch.requirements import unsupported
from perfsuite.measure import Launching
from perfsuite.node.machine import detect
from perfsuite.results.counts import Counts, RankCounts
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from tests.cli.commands import rows, run
from tests.samples import make_case, make_gpu_machine, make_run

FAKE: Case = small_case(detect()).replace(framework=Fake())


@pytest.mark.parametrize("why", ["no [such] thing", "torch 2.13.0+cpu is built without CUDA"])
def test_the_self_test_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why.startswith("torch"):
        monkeypatch.setattr(selftest, "detect", make_gpu_machine)
        monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.13.0+cpu", "cuda": None})
    else:
        monkeypatch.setattr(selftest, "unsupported", lambda case, machine: why)
    result = run("selftest", status=2)
    assert result.stdout == ""
    assert result.stderr.startswith(f"perfsuite selftest: the self-test cannot run here: {why}")


@pytest.mark.parametrize(
    ("answer", "code", "last"),
    [
        ("pass", 0, "every fault was caught, and a clean run was not"),
        ("fail", 1, "the gate does not catch what it must: do not trust its verdicts here"),
        ("unknown", 3, "part of the gate could not be tried"),
    ],
)
def test_the_self_test_ends_with_its_answer(
    answer: Status, code: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []

    def answered(case: Case, machine: Machine) -> Iterator[Row]:
        held.append(Path(os.environ[LOCK_FILE]).read_text() != "")
        yield Row(check="inject nan", status=answer, found="x")

    monkeypatch.setattr(selftest, "inject_all", answered)
    assert run("selftest", "--framework", "fake", status=code).stdout.splitlines()[-1].startswith(last)
    (row,) = rows(run("selftest", "--framework", "fake", "--json", status=code).stdout)
    assert row == {"check": "inject nan", "status": answer, "found": "x", "advice": None}
    assert held == [True, True], "no session measured beside it"


@pytest.mark.launch
def test_every_fault_is_caught_and_a_clean_run_is_not() -> None:
    rows = list(inject_all(FAKE, detect()))
    assert len(rows) == 1 + len(EXPECTED) + 1
    assert {row.status for row in rows} == {"pass"}


@pytest.mark.launch
@pytest.mark.parametrize(
    "blind",
    [
        Expectation(inject="slowdown=1%", outcomes=("regressed",)),
        Expectation(inject="nan", outcomes=("failed",), failure="crash"),
        Expectation(inject="slowdown=60%", outcomes=("regressed",), metric="peak_memory_bytes"),
    ],
)
def test_a_fault_that_is_not_caught_as_it_must_fails_the_self_test(blind: Expectation) -> None:
    _, missed, clean = inject_all(FAKE, detect(), expectations=(blind,))
    assert (missed.check, missed.status, clean.status) == (f"inject {blind.inject}", "fail", "pass")
    assert str(missed.advice).startswith(f"expected {blind.outcomes[0]}")


@pytest.mark.launch
def test_a_machine_that_stays_unhealthy_is_not_a_broken_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline is recorded in quiet; then others use the machine."""
    seen: list[Row] = []
    monkeypatch.setattr(selftest, "UNHEALTHY_LAUNCHES", 2)
    monkeypatch.setattr(
        "perfsuite.analysis.health.machine_problems", lambda health, machine: ["hot"] if seen else []
    )
    slow = Expectation(inject="slowdown=60%", outcomes=("regressed",))
    crash = Expectation(inject="crash", outcomes=("failed",), failure="crash")
    for row in inject_all(FAKE, detect(), expectations=(slow, crash)):
        seen.append(row)
    assert [row.status for row in seen] == ["pass", "unknown", "pass", "unknown"], "a crash is one anywhere"
    assert seen[1].found == "the machine was unhealthy in 2 launches, so nothing is known"


def test_it_runs_on_every_gpu_of_any_kind() -> None:
    machine = make_gpu_machine("NVIDIA Imaginary X1")
    case = small_case(machine)
    assert unsupported(case, machine) is None
    assert case.topology.world_size == 8
    assert case.timeout_s == 300, "a cold import from a network file system"


CASE = make_case(framework=DDP())


def told(
    monkeypatch: pytest.MonkeyPatch, before: Run, injected: Run, clean: Run, field: str, case: Case = CASE
) -> list[Row]:
    """The rows of one fault and of the case without it, by the launches that are made in this order."""
    launches, made = iter([before, injected, clean]), list[str | None]()

    def launch_once(case: Case, machine: Machine, directory: Path, how: Launching) -> Run:
        made.append(how.inject)
        return next(launches)

    tried = Base(case=case, faults={"host-read": field})
    monkeypatch.setattr(selftest, "launch_once", launch_once)
    monkeypatch.setattr(selftest, "bases", lambda machine: (tried,))
    rows = list(inject_structural(detect()))
    assert made == [None, "host-read", None][: len(made)]
    return rows


def reading(times: int) -> Run:
    return make_run(counts=(RankCounts(ranks=(0, 1), counts=Counts(host_reads={"forward": times})),))


SAME, READ = "the counts are the same", "host reads in forward: 1 -> 2 a step"
MISFIT = make_run(failure=Failure(kind="mismatch", message="it fits others"))


@pytest.mark.parametrize(
    ("injected", "clean", "field", "statuses", "found"),
    [
        (reading(2), reading(1), "host reads in forward", ["pass", "pass"], [READ, SAME]),
        (reading(1), reading(1), "host reads in forward", ["fail", "pass"], [SAME, SAME]),
        (reading(2), reading(1), "kernels in forward", ["fail", "pass"], [READ, SAME]),
        (MISFIT, reading(1), "kernels", ["fail", "pass"], ["it fits others", SAME]),
        (reading(2), reading(2), "host reads in forward", ["pass", "fail"], [READ, READ]),
    ],
    ids=["caught", "nothing found", "another field", "a failed launch", "found without a fault"],
)
def test_a_fault_is_caught_if_the_counts_name_it_and_nothing_without_it(
    monkeypatch: pytest.MonkeyPatch,
    injected: Run,
    clean: Run,
    field: str,
    statuses: list[Status],
    found: list[str],
) -> None:
    rows = told(monkeypatch, reading(1), injected, clean, field)
    assert [row.check for row in rows] == ["inject host-read", "ddp without a fault"]
    assert ([row.status for row in rows], [row.found for row in rows]) == (statuses, found)
    advice = [f"expected {field}", "expected no finding"]
    assert [row.advice for row in rows if row.status == "fail"] == [
        text for text, status in zip(advice, statuses, strict=True) if status == "fail"
    ]


def test_without_a_launch_to_compare_with_or_its_hardware_nothing_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [row] = told(monkeypatch, MISFIT, MISFIT, MISFIT, "kernels")
    assert (row.check, row.status, row.found) == ("ddp", "fail", "it fits others")
    [row] = told(monkeypatch, MISFIT, MISFIT, MISFIT, "kernels", CASE.replace(hardware="h100"))
    assert (row.check, row.status, row.found) == ("inject host-read", "unknown", "not tried here")


@pytest.mark.parametrize("machine", [detect(), make_gpu_machine()], ids=["here", "gpus"])
def test_every_structural_fault_is_tried_once(machine: Machine) -> None:
    tried = [kind for each in bases(machine) for kind in each.faults]
    assert sorted(tried) == sorted(get_args(Structural))


@pytest.mark.launch
def test_a_fault_is_found_in_real_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    every = bases

    def first(machine: Machine) -> tuple[Base, ...]:
        replicated = every(machine)[0]
        kinds: tuple[Structural, ...] = ("checkpointing-lost", "small-buckets", "optimizer-foreach")
        return (Base(case=replicated.case, faults={kind: replicated.faults[kind] for kind in kinds}),)

    monkeypatch.setattr(selftest, "bases", first)
    assert [(row.status, row.found) for row in inject_structural(detect())] == [
        ("pass", "recompute: 79.7 MFLOP -> 0"),
        ("pass", "all_reduce of 2 ranks: 1 -> 4 calls a step, the same bytes"),
        ("pass", "host reads in optimizer: 39 -> 78 a step"),
        ("pass", "the counts are the same"),
    ]
