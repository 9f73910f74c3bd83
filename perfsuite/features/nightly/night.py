"""`perfsuite night`: a whole night in one command, for any CI, for cron and for cluster jobs."""

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from perfsuite import documents, extensions
from perfsuite.cli.shared import Hardware, Out, PytestOptions, Shared, option, read, report_directory, shares
from perfsuite.dry.cases import by_expression
from perfsuite.errors import CaseError
from perfsuite.extensions import COMMANDS
from perfsuite.features.nightly.plan import show_plan
from perfsuite.inputs.files import read_text
from perfsuite.report.console import say
from perfsuite.report.summary import needs_words, reason
from perfsuite.results.session_file import Measurement, SessionFile
from perfsuite.results.store import Store
from perfsuite.session.by_command import check_asked
from perfsuite.session.jobs import refused, run
from perfsuite.session.outputs import write_report
from perfsuite.session.plan import shard as shard_of

NOTHING = "Nothing was measured: {}\n\n<!-- sessions before: {} -->\n"
"""A summary until there is a report: the reason, and the number of sessions of earlier nights."""
BEGUN = re.compile(r"<!-- sessions before: (\d+) -->")
CANNOT_TELL = 3  # exit status of doctor and selftest on a busy machine: the night goes on


def gate(out: Path) -> list[str]:
    """Return the options of pytest for a nightly run, with its files in `out`."""
    strict = ("--perf-missing-baseline=fail", "--perf-explain", "--perf-max-launches=6")
    return [*strict, "--perf-min-judged=90%", f"--perf-report={out}"]


@shares("cases", "store", "as_json")
def night(
    *,
    hardware: Hardware,
    pytest_options: PytestOptions = None,
    k: Annotated[
        str | None, typer.Option("-k", help="Select fewer cases with this expression of pytest.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Launch nothing: show what each case costs, and their order.")
    ] = False,
    budget: Annotated[str | None, option("budget")] = None,
    shard: Annotated[str | None, option("shard")] = None,
    selftest: Annotated[
        str, typer.Option(help="Framework of the self-test (default: ddp, or fake without transformers).")
    ] = "",
    out: Out = Path("out"),
    only_summary: Annotated[
        bool, typer.Option("--only-summary", help="Measure nothing: report a night that was cut short.")
    ] = False,
    shared: Shared,
) -> None:
    """Check the machine and the gate, measure every case of a hardware, and report.

    The summary is appended to the file that GITHUB_STEP_SUMMARY names, if it is set. The exit status is 1 if
    a case is worse, fails or lacks its baseline, if fewer than 90% were judged, or if the self-test missed a
    fault. It is 2 if nothing was measured.

    With --plan, the costs are those of the launches in the store. A case that was never measured is expected
    to cost what others on as many GPUs did (`~`).
    """
    check_asked(hardware, shared.cases)
    jobs = read("shard", shard)
    if plan:
        if pytest_options or only_summary:
            other = "--only-summary" if only_summary else "more options of pytest"
            raise CaseError(f"--plan with {other}: a plan launches nothing; leave one of them out")
        cases = by_expression(shared.cases, k or "", hardware)
        if jobs is not None:
            of_job = shard_of(cases, *jobs)
            cases = [case for case in cases if case.id in of_job]
        show_plan(cases, shared.store, budget, as_json=shared.as_json)
        return
    report_directory(out)
    if shared.as_json:
        raise CaseError("--json is for --plan, and a night writes results.json: leave it out, or add --plan")
    read("budget", budget)
    store = shared.store
    earlier_results = Store(store).results()
    summary = out / "summary.md"
    if only_summary and summary.is_file():
        begun = BEGUN.search(read_text(summary, errors="replace"))  # not there: the page has the report
        if begun is not None:
            later = earlier_results[int(begun[1]) :]
            if later:
                _summarise(summary, later)
        return
    for name in ("index.html", "results.json"):  # files of an earlier night
        (out / name).unlink(missing_ok=True)

    def note(why: str) -> None:
        from perfsuite.report import markdown  # imported here, as other commands do not need Jinja

        documents.write_text(summary, NOTHING.format(markdown.text(why), len(earlier_results)))

    note("see the log.")
    if only_summary:
        _summarise(summary, [])
        return
    # torch alone has no model for the self-test
    trains = selftest or ("fake" if find_spec("transformers") is None else "ddp")
    checks = (("doctor", "--quick", f"--expect={hardware}"), ("selftest", f"--framework={trains}"))
    options = [*gate(out), f"--perf-store={store}", *([f"--perf-shard={shard}"] if shard else [])]
    options += [f"--perf-budget={budget}"] if budget else []
    options += ["-k", k] if k else []
    measure = (str(shared.cases), "-m", hardware, *options, *(pytest_options or ()))
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
        if BEGUN.search(read_text(summary, errors="replace")) and Store(store).results() == earlier_results:
            why = f"pytest ended with {status} and wrote no report: does a file of the cases end Python?"
            note(why)
            say(f"perfsuite night: nothing was measured: {why}")
            raise typer.Exit(2)
    finally:
        _summarise(summary, [each for each in Store(store).results() if each not in earlier_results])
    keep = f"; to keep the results: perfsuite history push {out / 'results.json'}"
    say(f"report: {out / 'index.html'}{keep if 'history' in extensions.names(COMMANDS) else ''}")
    raise typer.Exit(status if status in (0, 1) else 2)


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
