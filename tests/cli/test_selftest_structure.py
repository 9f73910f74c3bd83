from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from perfsuite import DDP, Case
from perfsuite.case.fault import Structural
from perfsuite.case.hardware import Machine
from perfsuite.cli import selftest_structure
from perfsuite.cli.selftest_structure import Base, bases, inject_structural
from perfsuite.launch.machine import detect
from perfsuite.results.counts import Counts, RankCounts
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from tests.samples import make_case, make_gpu_machine, make_run

CASE = make_case(framework=DDP())


def base(case: Case = CASE, field: str = "host reads in forward") -> Base:
    return Base(case=case, faults={"host-read": field})


def told(monkeypatch: pytest.MonkeyPatch, tried: Base, runs: dict[str | None, Run]) -> tuple[str, list[str]]:
    """The answer and its lines, where a launch with a fault is one of `runs`, and None is one without."""
    said: list[str] = []

    def launch_once(case: Case, machine: Machine, directory: Path, *, inject: str | None) -> Run:
        return runs[inject]

    monkeypatch.setattr(selftest_structure, "launch_once", launch_once)
    monkeypatch.setattr(selftest_structure, "bases", lambda machine, directory: (tried,))
    return inject_structural(detect(), said.append), said


def reading(times: int, **changes: Any) -> Run:
    counts = RankCounts(ranks=(0, 1), counts=Counts(host_reads={"forward": times}))
    return make_run(counts=(counts,), **changes)


def test_a_fault_that_the_counts_name_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, said = told(monkeypatch, base(), {None: reading(1), "host-read": reading(2)})
    assert answer == "caught"
    assert said == [
        "ok  inject host-read: host reads in forward: 1 -> 2 a step",
        "ok  ddp without a fault: the counts are the same",
    ]


@pytest.mark.parametrize(
    ("injected", "field", "why"),
    [
        (reading(1), "host reads in forward", []),
        (reading(2), "kernels in forward", ["    host reads in forward: 1 -> 2 a step"]),
        (
            make_run(failure=Failure(kind="mismatch", message="it fits others")),
            "kernels",
            ["    it fits others"],
        ),
    ],
    ids=["nothing found", "another field", "a failed launch"],
)
def test_a_fault_that_they_do_not_name_is_missed(
    injected: Run, field: str, why: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, said = told(monkeypatch, base(field=field), {None: reading(1), "host-read": injected})
    assert answer == "missed"
    assert said[:-1] == [f"BAD inject host-read: expected {field}", *why]


def test_a_finding_without_a_fault_is_a_broken_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = iter([reading(1), reading(2)])

    class Runs(dict[Any, Run]):
        def __missing__(self, inject: None) -> Run:
            return next(launches)

    answer, said = told(monkeypatch, base(), Runs({"host-read": reading(2)}))
    assert answer == "missed"
    assert said[1] == "BAD ddp without a fault: expected no finding"


def test_without_a_launch_to_compare_with_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = make_run(failure=Failure(kind="crash", message="boom"))
    answer, said = told(monkeypatch, base(), {None: broken})
    assert (answer, said) == ("missed", [f"BAD {CASE.id}: boom"])


def test_what_cannot_run_here_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, said = told(monkeypatch, base(CASE.replace(hardware="h100")), {})
    assert answer == "untried"
    assert len(said) == 1
    assert said[0].startswith("... inject host-read: not tried here: ")


@pytest.mark.parametrize("machine", [detect(), make_gpu_machine()], ids=["here", "gpus"])
def test_every_structural_fault_is_tried_once(machine: Machine, tmp_path: Path) -> None:
    tried = [kind for each in bases(machine, tmp_path) for kind in each.faults]
    assert sorted(tried) == sorted(get_args(Structural))


@pytest.mark.launch
def test_a_fault_is_found_in_real_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    every = bases

    def first(machine: Machine, directory: Path) -> tuple[Base, ...]:
        replicated = every(machine, directory)[0]
        return (Base(case=replicated.case, faults={"checkpointing-lost-in-one-block": "FLOPs in recompute"}),)

    monkeypatch.setattr(selftest_structure, "bases", first)
    assert inject_structural(detect(), said.append) == "caught"
    assert said == [
        "ok  inject checkpointing-lost-in-one-block: recompute: 79.7 -> 59.8 MFLOP",
        "ok  ddp without a fault: the counts are the same",
    ]
