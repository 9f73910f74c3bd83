"""`perfsuite refresh`: measures cases anew, and makes reviewed baselines of that."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from perfsuite import documents
from perfsuite.cli.cases import CASES, Cases, Hardware, PytestOptions, check_asked, say
from perfsuite.cli.github import BEFORE_AFTER
from perfsuite.cli.night import run
from perfsuite.errors import CaseError, FileError
from perfsuite.results.store import BASELINES

STORE = Path(".perfsuite/refresh")
LAUNCHES = 10  # of each case


def refresh(
    hardware: Hardware,
    reason: Annotated[str, typer.Option(help="why a baseline may become slower or larger")],
    pytest_options: PytestOptions = None,
    out: Annotated[Path, typer.Option(help="directory of the report")] = Path("out"),
    cases: Cases = CASES,
    baselines: Annotated[
        Path, typer.Option("--baselines", help="Directory of reviewed baselines.")
    ] = BASELINES,
) -> None:
    """Measure cases by ten launches each, and make these their reviewed baselines, to commit.

    Exit status 2 if nothing new was measured.
    """
    check_asked(hardware, cases)
    if not reason.strip():
        raise CaseError("--reason is empty: say why a baseline may change, as 'torch 2.14'")
    if run("perfsuite.cli", "doctor", f"--expect={hardware}") == 2:
        raise typer.Exit(2)
    shutil.rmtree(STORE, ignore_errors=True)
    measure = (f"--perf-min-launches={LAUNCHES}", "--perf-explain", f"--perf-report={out}")
    where = (f"--perf-store={STORE}", f"--perf-baselines={baselines}")
    status = run("pytest", str(cases), "-m", hardware, *measure, *where, *(pytest_options or ()))
    if status not in (0, 1):  # 1: a case is slower, which is why it gets a new baseline
        raise typer.Exit(2)
    before = _contents(baselines)
    accept = ["baseline", "accept", f"--store={STORE}", f"--baselines={baselines}", f"--reason={reason}"]
    command = [sys.executable, "-m", "perfsuite.cli", *accept]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    say(done.stdout)
    documents.write_text(out / BEFORE_AFTER, done.stdout)
    if done.returncode > 1:
        raise typer.Exit(2)
    if _contents(baselines) == before:
        raise FileError(f"no baseline in {baselines} differs from before")


def _contents(baselines: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in baselines.rglob("*.json")}
