"""Tests of the step that launches each framework once. Launches are fake, or simulated in this process."""

from pathlib import Path
from typing import Any

import pytest

from perfsuite.doctor.rows import Row
from perfsuite.errors import CaseError
from perfsuite.features.first_night.frameworks import framework_rows
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import REPLAYED, Failure
from tests.features.first_night.nights import by_check, make_night
from tests.samples import make_gpu_machine, make_run

FAILED = Verdict(outcome="failed", launches=1, failure="crash", reasons=("rank 3: NCCL error",))
SHARED = Verdict(outcome="unhealthy", launches=1, reasons=("GPU 1 is hot",))
RECORDED = Verdict(outcome="recorded", launches=1)


@pytest.mark.usefixtures("simulated")
def test_simulated_frameworks_are_launched() -> None:
    rows = by_check(framework_rows(make_night()))
    assert {row.status for row in rows.values()} == {"pass"}
    assert rows["fake"].found.endswith(" s in all")
    assert "tokens/s" in rows["fake"].found


@pytest.fixture
def fourteen_rows(torch_for_gpus: None) -> dict[str, Row]:
    """Return rows by framework. Of the launches, some fail, are disturbed, or are not counted."""
    hidden = {"hidden": (f"{REPLAYED} (2x)",)}
    late = {"notes": ("rank 2 died after its report was written", "another note")}
    endings: dict[str, tuple[Verdict, dict[str, Any]]] = {
        "ddp": (FAILED, {"failure": Failure(kind="crash", message="x")}),
        "fsdp": (SHARED, {}),
        "trainer": (RECORDED, hidden),
        "nanotron": (RECORDED, late),
    }

    def measure(case: Any, machine: Any, directory: Path, reference: Any, how: Any) -> Any:
        if case.framework.name == "accelerate":
            raise CaseError("accelerate refuses it")
        verdict, fields = endings.get(case.framework.name, (RECORDED, {}))
        if getattr(case.framework, "disable_cuda_graphs", True) is False:
            fields = hidden
        return [make_run(case=case, **fields)], verdict

    night = make_night(machine=make_gpu_machine(), size="full", measure=measure)
    return by_check(framework_rows(night))


def test_one_framework_never_stops_the_next(fourteen_rows: dict[str, Row]) -> None:
    assert len(fourteen_rows) == 14
    assert fourteen_rows["torchtitan, experts"].status == "pass"


def test_a_framework_that_crashed_fails(fourteen_rows: dict[str, Row]) -> None:
    row = fourteen_rows["DDP"]
    assert (row.status, row.found) == ("fail", "rank 3: NCCL error")


@pytest.mark.parametrize(
    ("name", "reason"), [("FSDP1", "GPU 1 is hot"), ("Trainer", "its operators are not seen (2x)")]
)
def test_a_framework_that_cannot_be_judged_is_unknown(
    fourteen_rows: dict[str, Row], name: str, reason: str
) -> None:
    assert fourteen_rows[name].status == "unknown"
    assert fourteen_rows[name].found.endswith(reason)


def test_replayed_steps_need_not_be_counted(fourteen_rows: dict[str, Row]) -> None:
    graphs = fourteen_rows["torchtitan, CUDA graphs"]
    assert (graphs.status, graphs.found.partition("; ")[2]) == ("pass", "replayed steps are not counted")


def test_a_rank_that_died_late_is_noted(fourteen_rows: dict[str, Row]) -> None:
    reason = "in all; rank 2 died after its report was written"
    assert fourteen_rows["nanotron"].found.endswith(reason)


def test_a_framework_that_refuses_is_not_run(fourteen_rows: dict[str, Row]) -> None:
    assert fourteen_rows["accelerate, tensor parallel"].found == "not run: accelerate refuses it"


@pytest.mark.usefixtures("torch_for_cpus")
def test_frameworks_that_cannot_run_here_are_unknown() -> None:
    rows = by_check(framework_rows(make_night(machine=make_gpu_machine(count=1), size="full")))
    assert {row.status for row in rows.values()} == {"unknown"}
    assert all(row.found.startswith("not run: ") for row in rows.values()), "torch here has no CUDA"
