"""Measure cases again, and make the results their reviewed baselines."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from perfsuite import documents
from perfsuite.errors import CaseError, FileError
from perfsuite.inputs.files import read_bytes
from perfsuite.report.console import say
from perfsuite.results.store import BEFORE_AFTER
from perfsuite.session.jobs import CANNOT_TELL, refused, run

REFRESHED = Path(".perfsuite/refresh")  # the store of `refresh`
LAUNCHES = 10  # number of launches per refreshed case


def refreshed(
    hardware: str, reason: str, pytest_options: Sequence[str], out: Path, cases: Path, baselines: Path
) -> bool:
    """Measure the cases for this hardware and accept the results. Returns whether this succeeded.

    Raises `CaseError` if pytest would measure nothing, and `FileError` if no baseline changed.
    """
    # Override the settings of the repository, because they can say that a case fails if it has no baseline.
    measure = [f"--perf-min-launches={LAUNCHES}", "--perf-missing-baseline=record", "--perf-explain"]
    measure.append(f"--perf-report={out}")
    where = (f"--perf-store={REFRESHED}", f"--perf-baselines={baselines}")
    chosen = (str(cases), "-m", hardware, *measure, *where, *pytest_options)
    problem = refused(*chosen)
    if problem is not None:
        raise CaseError(problem)
    if run("perfsuite.cli", "doctor", f"--expect={hardware}") not in (0, CANNOT_TELL):
        return False
    shutil.rmtree(REFRESHED, ignore_errors=True)
    status = run("pytest", *chosen)
    if status not in (0, 1):  # 1: a case regressed, which is a reason for a new baseline
        return False
    before = _contents(baselines)
    accept = ("baseline", "accept", f"--store={REFRESHED}", f"--baselines={baselines}", f"--reason={reason}")
    command = [sys.executable, "-m", "perfsuite.cli", *accept]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    say(done.stdout)
    documents.write_text(out / BEFORE_AFTER, done.stdout)
    if done.returncode > 1:
        return False
    if _contents(baselines) == before:
        raise FileError(f"no baseline in {baselines} changed")
    return True


def _contents(baselines: Path) -> dict[Path, bytes]:
    return {file: read_bytes(file) for file in baselines.rglob("*.json")}
