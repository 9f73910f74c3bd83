"""Helpers: runs that are collected from files written by tests, and the failures in these runs."""

from pathlib import Path
from typing import Any

from perfsuite import documents
from perfsuite.analysis.collect import collect
from perfsuite.case.case import Case
from perfsuite.results.rank_report import Failure, Flops
from perfsuite.results.run import Health, LaunchFile, Run
from perfsuite.results.run_dir import RunDir
from tests.samples import make_gpu_machine, make_machine, make_report, write_launch

FLOPS = Flops(formula="palm-1", per_token=2e9, parameters=3, matmul_parameters=2)
TIMEOUT = Failure(kind="timeout", message="killed after 900 s", at=9)
COMMAND_FAILED = Failure(kind="crash", message="the command ended with exit code 1", at=2)


def both(
    directory: Path, *, case: Case | None = None, peak_flops: float | None = None, **values: Any
) -> RunDir:
    """Write the files of a launch of two ranks that report the same values."""
    reports = [make_report(rank, **values) for rank in (0, 1)]
    return write_launch(directory, *reports, case=case, peak_flops=peak_flops)


def collected(run_dir: RunDir, *, failure: Failure | None = None) -> Run:
    run = collect(run_dir, make_machine(), started_at="now", duration_s=1.23456, failure=failure)
    assert Run.model_validate_json(run.model_dump_json()).case == run.case
    return run


def failure_of(run: Run) -> Failure:
    assert run.failure is not None
    assert run.figures.tokens_per_s is None or run.failure.kind == "loss"
    return run.failure


def crash(rank: int, at: float, message: str = "RuntimeError: bad", traceback: str | None = None) -> Failure:
    return Failure(kind="crash", message=message, rank=rank, traceback=traceback, at=at)


def on_gpu(run_dir: RunDir, health: Health | None = None, driver: str | None = None) -> Run:
    machine = make_gpu_machine().replace(driver=driver)
    documents.write(run_dir.launch(0), LaunchFile(node=0, health=health))
    return collect(run_dir, machine, started_at="now", duration_s=1.0, failure=None)
