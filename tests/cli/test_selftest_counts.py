from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from perfsuite import DDP, Case
from perfsuite.case.fault import Structural
from perfsuite.case.hardware import Machine
from perfsuite.cli import selftest_counts
from perfsuite.cli.checks import Row, worst
from perfsuite.cli.selftest_counts import Base, bases, inject_structural
from perfsuite.measure import Launching
from perfsuite.node.machine import detect
from perfsuite.results.counts import Counts, RankCounts
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from tests.samples import make_case, make_gpu_machine, make_run

CASE = make_case(framework=DDP())


def base(case: Case = CASE, field: str = "host reads in forward") -> Base:
    return Base(case=case, faults={"host-read": field})


def told(monkeypatch: pytest.MonkeyPatch, tried: Base, runs: dict[str | None, Run]) -> list[Row]:
    """The rows, where a launch with a fault is one of `runs`, and None is one without."""

    def launch_once(case: Case, machine: Machine, directory: Path, how: Launching) -> Run:
        return runs[how.inject]

    monkeypatch.setattr(selftest_counts, "launch_once", launch_once)
    monkeypatch.setattr(selftest_counts, "bases", lambda machine, directory: (tried,))
    return list(inject_structural(detect()))


def reading(times: int, **changes: Any) -> Run:
    counts = RankCounts(ranks=(0, 1), counts=Counts(host_reads={"forward": times}))
    return make_run(counts=(counts,), **changes)


def test_a_fault_that_the_counts_name_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = told(monkeypatch, base(), {None: reading(1), "host-read": reading(2)})
    assert [(row.check, row.status, row.found) for row in rows] == [
        ("inject host-read", "pass", "host reads in forward: 1 -> 2 a step"),
        ("ddp without a fault", "pass", "the counts are the same"),
    ]


@pytest.mark.parametrize(
    ("injected", "field", "found"),
    [
        (reading(1), "host reads in forward", "the counts are the same"),
        (reading(2), "kernels in forward", "host reads in forward: 1 -> 2 a step"),
        (make_run(failure=Failure(kind="mismatch", message="it fits others")), "kernels", "it fits others"),
    ],
    ids=["nothing found", "another field", "a failed launch"],
)
def test_a_fault_that_they_do_not_name_is_missed(
    injected: Run, field: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, _ = told(monkeypatch, base(field=field), {None: reading(1), "host-read": injected})
    assert (row.status, row.found, row.advice) == ("fail", found, f"expected {field}")


def test_a_finding_without_a_fault_is_a_broken_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = iter([reading(1), reading(2)])

    class Runs(dict[Any, Run]):
        def __missing__(self, inject: None) -> Run:
            return next(launches)

    rows = told(monkeypatch, base(), Runs({"host-read": reading(2)}))
    assert worst(rows) == "fail"
    assert (rows[1].check, rows[1].advice) == ("ddp without a fault", "expected no finding")


def test_without_a_launch_to_compare_with_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = make_run(failure=Failure(kind="crash", message="boom"))
    [row] = told(monkeypatch, base(), {None: broken})
    assert (row.check, row.status, row.found) == ("ddp", "fail", "boom")


def test_what_cannot_run_here_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    [row] = told(monkeypatch, base(CASE.replace(hardware="h100")), {})
    assert (row.check, row.status, row.found) == ("inject host-read", "unknown", "not tried here")


@pytest.mark.parametrize("machine", [detect(), make_gpu_machine()], ids=["here", "gpus"])
def test_every_structural_fault_is_tried_once(machine: Machine, tmp_path: Path) -> None:
    tried = [kind for each in bases(machine, tmp_path) for kind in each.faults]
    assert sorted(tried) == sorted(get_args(Structural))


@pytest.mark.launch
def test_a_fault_is_found_in_real_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    every = bases

    def first(machine: Machine, directory: Path) -> tuple[Base, ...]:
        replicated = every(machine, directory)[0]
        return (Base(case=replicated.case, faults={"checkpointing-lost-in-one-block": "FLOPs in recompute"}),)

    monkeypatch.setattr(selftest_counts, "bases", first)
    assert [(row.status, row.found) for row in inject_structural(detect())] == [
        ("pass", "recompute: 79.7 -> 59.8 MFLOP"),
        ("pass", "the counts are the same"),
    ]
