"""`perfsuite night` and `refresh`: whole jobs in one command, for any CI, for cron and for cluster jobs."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from perfsuite import documents
from perfsuite.cli import cases as shared
from perfsuite.cli.cases import say
from perfsuite.cli.report import LocalStore
from perfsuite.dry.cases import NO_TESTS_COLLECTED
from perfsuite.errors import CaseError, FileError, readable
from perfsuite.inputs.files import read_bytes, read_text
from perfsuite.node.processes import captured
from perfsuite.report.summary import needs_words, reason
from perfsuite.results.session_file import Measurement, SessionFile
from perfsuite.results.store import BASELINES, BEFORE_AFTER, CASES, STORE, Store
from perfsuite.session.outputs import write_report

NOTHING = "Nothing was measured: {}\n\n<!-- sessions before: {} -->\n"
"""A summary until there is a report: the reason, and the number of sessions of earlier nights."""
BEGUN = re.compile(r"<!-- sessions before: (\d+) -->")
MOST_SAID = 2000  # characters of pytest's message
CANNOT_TELL = 3  # exit status of doctor and selftest on a busy machine: the night goes on
REFRESHED = Path(".perfsuite/refresh")  # the store of `refresh`
LAUNCHES = 10  # launches of each case that is refreshed


def gate(out: Path) -> list[str]:
    """Return the options of pytest for a nightly run, with its files in `out`."""
    strict = ("--perf-missing-baseline=fail", "--perf-explain", "--perf-max-launches=6")
    return [*strict, "--perf-min-judged=90%", f"--perf-report={out}"]


def night(
    hardware: shared.Hardware,
    pytest_options: shared.PytestOptions = None,
    selftest: Annotated[
        str, typer.Option(help="what the self-test trains: ddp, fake, ... (default: ddp with transformers)")
    ] = "",
    out: Annotated[Path, typer.Option(help="directory of the report")] = Path("out"),
    shard: Annotated[str | None, shared.option("shard")] = None,
    cases: shared.Cases = CASES,
    store: LocalStore = STORE,
    only_summary: Annotated[
        bool, typer.Option("--only-summary", help="measure nothing: report a night that was cut short")
    ] = False,
) -> None:
    """Check the machine and the gate, measure every case of that hardware, and report.

    The summary is appended to the file that GITHUB_STEP_SUMMARY names, if it is set. Exit status 1 if a case
    is worse, fails or lacks its baseline, if fewer than 90 % were judged, or if the self-test missed a fault;
    2 if nothing was measured.
    """
    shared.check_asked(hardware, cases)
    shared.read("shard", shard)
    shared.read("report", str(out))
    known = Store(store).results()
    summary = out / "summary.md"
    if only_summary and summary.is_file():
        begun = BEGUN.search(read_text(summary, errors="replace"))  # not there: the page has the report
        if begun is not None:
            later = known[int(begun[1]) :]
            if later:
                _summarise(summary, later)
        return
    for name in ("index.html", "results.json"):  # files of an earlier night
        (out / name).unlink(missing_ok=True)

    def note(why: str) -> None:
        from perfsuite.report import markdown  # imported here, as other commands do not need Jinja

        documents.write_text(summary, NOTHING.format(markdown.text(why), len(known)))

    note("see the log.")
    if only_summary:
        _summarise(summary, [])
        return
    # torch alone has no model for the self-test
    trains = selftest or ("fake" if find_spec("transformers") is None else "ddp")
    checks = (("doctor", "--quick", f"--expect={hardware}"), ("selftest", f"--framework={trains}"))
    options = [*gate(out), f"--perf-store={store}", *([f"--perf-shard={shard}"] if shard else [])]
    measure = (str(cases), "-m", hardware, *options, *(pytest_options or ()))
    try:
        problem = refused(*measure)
        if problem is not None:
            note(problem)
            say(f"perfsuite night: nothing was measured: {problem}")
            raise typer.Exit(2)
        for command, bad in zip(checks, (2, 1), strict=True):
            status = run("perfsuite.cli", *command)
            if status not in (0, CANNOT_TELL):
                note(f"perfsuite {command[0]} ended with {status}: see the log.")
                say(f"perfsuite night: nothing was measured, as perfsuite {command[0]} ended with {status}")
                raise typer.Exit(bad)
        note("pytest wrote no report: see the log.")
        status = run("pytest", *measure)
        if BEGUN.search(read_text(summary, errors="replace")) and Store(store).results() == known:
            why = f"pytest ended with {status} and wrote no report: does a file of the cases end Python?"
            note(why)
            say(f"perfsuite night: nothing was measured: {why}")
            raise typer.Exit(2)
    finally:
        _summarise(summary, [each for each in Store(store).results() if each not in known])
    say(f"report: {out / 'index.html'}; to keep the results: perfsuite history push {out / 'results.json'}")
    raise typer.Exit(status if status in (0, 1) else 2)


def refresh(
    hardware: shared.Hardware,
    reason: Annotated[str, typer.Option(help="why a baseline may become slower or larger")],
    pytest_options: shared.PytestOptions = None,
    out: Annotated[Path, typer.Option(help="directory of the report")] = Path("out"),
    cases: shared.Cases = CASES,
    baselines: shared.Reviewed = BASELINES,
) -> None:
    """Measure cases by ten launches each, and make these their reviewed baselines, to commit.

    Exit status 2 if nothing new was measured.
    """
    shared.check_asked(hardware, cases)
    if not reason.strip():
        raise CaseError("--reason is empty: say why a baseline may change, as 'torch 2.14'")
    # According to a repository's settings, cases without a baseline may fail.
    measure = [f"--perf-min-launches={LAUNCHES}", "--perf-missing-baseline=record", "--perf-explain"]
    measure.append(f"--perf-report={out}")
    where = (f"--perf-store={REFRESHED}", f"--perf-baselines={baselines}")
    chosen = (str(cases), "-m", hardware, *measure, *where, *(pytest_options or ()))
    problem = refused(*chosen)
    if problem is not None:
        raise CaseError(problem)
    if run("perfsuite.cli", "doctor", f"--expect={hardware}") == 2:
        raise typer.Exit(2)
    shutil.rmtree(REFRESHED, ignore_errors=True)
    status = run("pytest", *chosen)
    if status not in (0, 1):  # 1: a case is slower, which is why it gets a new baseline
        raise typer.Exit(2)
    before = _contents(baselines)
    accept = ("baseline", "accept", f"--store={REFRESHED}", f"--baselines={baselines}", f"--reason={reason}")
    command = [sys.executable, "-m", "perfsuite.cli", *accept]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    say(done.stdout)
    documents.write_text(out / BEFORE_AFTER, done.stdout)
    if done.returncode > 1:
        raise typer.Exit(2)
    if _contents(baselines) == before:
        raise FileError(f"no baseline in {baselines} differs from before")


def _contents(baselines: Path) -> dict[Path, bytes]:
    return {file: read_bytes(file) for file in baselines.rglob("*.json")}


def run(module: str, *arguments: str) -> int:
    """Run a module of this environment in a separate process and return its exit status."""
    say(f"$ {module} {' '.join(arguments)}")
    return subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode


def refused(*arguments: str) -> str | None:
    """Return why pytest would measure nothing with these arguments, by collecting only; None if it would."""
    done = captured([sys.executable, "-m", "pytest", *arguments, "--collect-only", "--quiet"])
    if done.returncode == 0:
        return None
    if done.returncode == NO_TESTS_COLLECTED:
        return f"pytest selects no case: {shlex.join(arguments)}"
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    said = "\n".join(errors) or (done.stdout.strip() + "\n" + done.stderr.strip()).strip()
    return f"pytest cannot collect the cases: {readable(said)[-MOST_SAID:]}"


def _summarise(summary: Path, sessions: Sequence[Path]) -> None:
    """Show the newest of these sessions on the job's own page, and write its report if it is missing."""
    content = documents.read(sessions[-1], SessionFile) if sessions else None
    if content is not None and BEGUN.search(read_text(summary, errors="replace")):
        write_report(summary.parent, content)
    if content is not None and os.environ.get("GITHUB_ACTIONS") == "true":
        typer.echo("\n".join(github_annotations(content.results)))
    page = os.environ.get("GITHUB_STEP_SUMMARY")
    if page:
        with Path(page).open("a") as shown:
            shown.write(read_text(summary, errors="replace"))


def github_annotations(results: Sequence[Measurement]) -> list[str]:
    """Return annotations that GitHub Actions shows next to the files of cases.

    A worse case is an error, and others that need attention are warnings. Each takes one line, whatever its
    text.
    """
    lines = []
    for result in results:
        if needs_words(result) and result.excused is None:
            level = "error" if result.outcome in ("failed", "regressed") and not result.shadow else "warning"
            file = result.nodeid.partition("::")[0]
            title = f"{result.outcome}: {result.case_id}"
            where = f"file={_escaped(file, ':,')},title={_escaped(title, ':,')}"
            lines.append(f"::{level} {where}::{_escaped(reason(result) or result.outcome)}")
    return lines


def _escaped(text: str, more: str = "") -> str:
    """Escape text in a command of GitHub Actions, as its toolkit does."""
    for letter in f"%\r\n{more}":
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text
