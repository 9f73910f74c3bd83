from pathlib import Path
from typing import Any, get_args

import pytest

from perfsuite import DDP, Case, Topology
from perfsuite.case.fault import Structural
from perfsuite.case.hardware import Machine
from perfsuite.doctor.injected_counts import Base, bases, inject_structural
from perfsuite.doctor.rows import Row
from perfsuite.measure import Launching
from perfsuite.node.machine import detect
from perfsuite.results.counts import Counts, RankCounts
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from tests.samples import make_case, make_gpu_machine, make_run
from tests.worker.faults.test_structural_faults import counted

CASE = make_case(framework=DDP())


def reading(times: int) -> Run:
    return make_run(counts=(RankCounts(ranks=(0, 1), counts=Counts(host_reads={"forward": times})),))


def rows_of_fault(launches: tuple[Run, ...], field: str, case: Case = CASE) -> list[Row]:
    """Return the rows of one fault and of the case without it.

    The three `launches` are one for comparison, one with the fault, and one without the fault.
    """
    made: list[str | None] = []

    def launch_once(case: Case, machine: Machine, directory: Path, how: Launching) -> Run:
        made.append(how.inject)
        return launches[len(made) - 1]

    tried = Base(case=case, faults={"host-read": field})
    rows = list(inject_structural(detect(), tried=(tried,), launch=launch_once))
    assert made == [None, "host-read", None][: len(made)]
    return rows


SAME = "the counts are the same"
READ = "host reads in forward: 1 -> 2 a step"
MISFIT = make_run(failure=Failure(kind="mismatch", message="it fits others"))


@pytest.mark.parametrize(
    ("injected", "clean", "field", "statuses", "shown"),
    [
        (reading(2), reading(1), "host reads in forward", ["pass", "pass"], [READ, SAME]),
        (reading(1), reading(1), "host reads in forward", ["fail", "pass"], [SAME, SAME]),
        (reading(2), reading(1), "kernels in forward", ["fail", "pass"], [READ, SAME]),
        (MISFIT, reading(1), "kernels", ["fail", "pass"], ["it fits others", SAME]),
        (reading(2), reading(2), "host reads in forward", ["pass", "fail"], [READ, READ]),
    ],
    ids=["caught", "nothing found", "another field", "a failed launch", "found without a fault"],
)
def test_counts_catch_a_fault_and_no_clean_run(
    injected: Run, clean: Run, field: str, statuses: Any, shown: Any
) -> None:
    rows = rows_of_fault((reading(1), injected, clean), field)
    assert [row.check for row in rows] == ["inject host-read", "ddp without a fault"]
    assert ([row.status for row in rows], [row.found for row in rows]) == (statuses, shown)
    for row, advice in zip(rows, (f"expected {field}", "expected no finding"), strict=True):
        assert row.advice == (None if row.status == "pass" else advice)


def test_catches_nothing_without_a_launch() -> None:
    [row] = rows_of_fault((MISFIT,), "kernels")
    assert (row.check, row.status, row.found) == ("ddp", "fail", "it fits others")


def test_a_case_of_other_hardware_is_not_tried() -> None:
    [row] = rows_of_fault((), "kernels", CASE.replace(hardware="h100"))
    assert (row.check, row.status, row.found) == ("inject host-read", "unknown", "not tested here")


@pytest.mark.parametrize("machine", [detect(), make_gpu_machine()], ids=["here", "gpus"])
def test_every_structural_fault_is_tried_once(machine: Machine) -> None:
    tried = [kind for base in bases(machine) for kind in base.faults]
    assert sorted(tried) == sorted(get_args(Structural))


@pytest.mark.launch
@pytest.mark.nightly
def test_counted_steps_reveal_every_fault() -> None:
    """In place of launches, the case trains and is counted in this process."""

    def launch_once(case: Case, machine: Machine, directory: Path, how: Launching) -> Run:
        alone = case.replace(topology=Topology(processes_per_node=1))
        step = counted(alone, how.inject)  # type: ignore[arg-type]
        return make_run(case=case, counts=(RankCounts(ranks=(0, 1), counts=step),))

    rows = inject_structural(detect(), launch=launch_once)
    by_check = {row.check.removeprefix("inject "): row for row in rows}
    assert {row.status for row in by_check.values()} == {"pass"}, by_check
    assert by_check["checkpointing-lost"].found == "recompute: 79.7 MFLOP -> 0"
    assert by_check["optimizer-foreach"].found.startswith("kernels in optimizer: 351 -> 9 a step (")
    assert by_check["fsdp2 without a fault"].found == "the counts are the same"
    assert len(by_check) == len(get_args(Structural)) + 2


@pytest.mark.nightly
def test_a_fault_is_found_in_real_launches() -> None:
    first = bases(detect())[0]
    wanted = first._replace(faults={"small-buckets": first.faults["small-buckets"]})
    row = next(inject_structural(detect(), tried=(wanted,)))
    assert (row.status, row.found) == (
        "pass",
        "all_reduce of 2 ranks: 1 -> 4 calls a step, with the same bytes",
    )
