"""Helpers that make nights, steps, results and fake launches."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from perfsuite import documents
from perfsuite.case.case import Case, CaseList, CollectedTest
from perfsuite.case.hardware import Machine
from perfsuite.doctor.rows import Row, passed
from perfsuite.features.first_night.night import Night
from perfsuite.features.first_night.record import FirstNight, StepResult
from perfsuite.features.first_night.steps import Step
from perfsuite.results.outcome import Outcome, Verdict
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.results.session_file import Measurement
from tests import samples
from tests.samples import make_machine, make_run

DAY = "2026-01-02T03:04:05+00:00"
COLLECTS = """
import json, shutil, sys
from pathlib import Path
Path("words.json").write_text(json.dumps(sys.argv[1:]))
for word in sys.argv:
    if word.startswith("--perf-cases="):
        shutil.copy("collected.json", word.partition("=")[2])
"""
"""A replacement of pytest that records its arguments, and collects the tests in `collected.json`."""


def make_night(**changes: Any) -> Night:
    """Return a night in the current directory that simulates training on two cores."""
    usual: dict[str, Any] = {"machine": make_machine(), "size": "simulated", "out": Path("night")}
    return Night(**{**usual, "cases": Path("bench_cases"), **changes})


def make_record(*results: StepResult, **changes: Any) -> FirstNight:
    """Return the record of a night with these results."""
    usual: dict[str, Any] = {"perfsuite": "0.1.0", "started_at": DAY, "machine": make_machine()}
    return FirstNight(**{**usual, "size": "tiny", "results": results, **changes})


def make_result(step: str, *rows: Row, is_complete: bool = True) -> StepResult:
    """Return the result of a step that took a minute."""
    return StepResult(step=step, seconds=60, is_complete=is_complete, rows=rows)


def make_step(name: str, *rows: Row, error: BaseException | None = None, **changes: Any) -> Step:
    """Return a step that yields `rows`, and then raises `error` if it is given."""

    def run(night: Night) -> Iterator[Row]:
        yield from rows or (passed(f"check of {name}", "well"),)
        if error is not None:
            raise error

    minutes = dict.fromkeys(("full", "tiny", "simulated"), (1.0, 2.0))
    return Step(**{"name": name, "question": f"{name}?", "minutes": minutes, "run": run, **changes})


def measurement(case: Case, outcome: Outcome) -> Measurement:
    """Return the measurement of a case in one launch of ten seconds."""
    run = make_run(case=case, duration_s=10.0)
    return samples.make_result(run, verdict=Verdict(outcome=outcome, launches=1))


def collects(*tests: CollectedTest) -> None:
    """Make pytest collect these tests. `python -m pytest` runs the `pytest.py` of the current directory."""
    documents.write(Path("collected.json"), CaseList(cases=(), tests=tests))
    Path("pytest.py").write_text(COLLECTS)


def write_numa_nodes(root: Path, *nodes: Iterable[int]) -> None:
    """Write the files in /sys of NUMA nodes with these cores."""
    for number, cores in enumerate(nodes):
        file = root / f"sys/devices/system/node/node{number}/cpulist"
        documents.write_text(file, ",".join(map(str, sorted(cores))) + "\n")


def by_check(rows: Iterator[Row] | Sequence[Row]) -> dict[str, Row]:
    """Return rows by the name of their check. Each name must occur only once."""
    listed = [*rows]
    rows_by_check = {row.check: row for row in listed}
    assert len(rows_by_check) == len(listed)
    return rows_by_check


class Launches:
    """Replaces `launch_once`: records the arguments of each call, and returns a run.

    A launch with an injected fault reaches the fault, unless the fault is in `not_reached`.
    """

    def __init__(self, **of_run: Any) -> None:
        self.not_reached: Sequence[str] = ()
        self.of_run = of_run
        self.asked: list[tuple[Case, Machine, Path, Any]] = []

    def __call__(self, case: Case, machine: Machine, directory: Path, how: Any) -> Run:
        self.asked.append((case, machine, directory, how))
        answer = self.of_run.get(how.inject or how.arm.text, {})
        if how.inject is not None and how.inject not in self.not_reached:
            directory.mkdir(parents=True)
            RunDir(directory).injected.touch()
        return make_run(**{"case": case, "machine": machine, **answer})
