"""`perfsuite night`: a nightly run in one command, for any CI, for cron and for cluster jobs."""

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from perfsuite import documents, extensions
from perfsuite.case.case import Case
from perfsuite.cli.shared import (
    Hardware,
    Out,
    PytestOptions,
    Shared,
    option,
    read,
    report_directory,
    shares,
    tolerance,
)
from perfsuite.dry.cases import by_expression
from perfsuite.errors import CaseError
from perfsuite.extensions import COMMANDS
from perfsuite.features.nightly.find import Finding, planned_to_find, show
from perfsuite.features.nightly.plan import show_plan
from perfsuite.inputs.files import read_text
from perfsuite.report.console import say
from perfsuite.report.summary import needs_words, reason
from perfsuite.results.session_file import Measurement, SessionFile
from perfsuite.results.store import BaselineStore, Store
from perfsuite.session.by_command import check_asked
from perfsuite.session.jobs import refused, run
from perfsuite.session.outputs import write_report
from perfsuite.session.plan import shard as shard_of

NOTHING = "Nothing was measured: {}\n\n<!-- sessions before: {} -->\n"
"""The summary until there is a report. It has a reason, and the number of sessions of earlier nights."""
BEGUN = re.compile(r"<!-- sessions before: (\d+) -->")
CANNOT_TELL = 3  # exit status of doctor and selftest on a busy machine: the nightly run continues


def gate(out: Path) -> list[str]:
    """Return pytest's options for a nightly run that writes its files to `out`."""
    strict = ("--perf-missing-baseline=fail", "--perf-explain", "--perf-max-launches=6")
    return [*strict, "--perf-min-judged=90%", f"--perf-report={out}"]


@shares("cases", "store", "baselines", "as_json")
def night(
    *,
    hardware: Hardware,
    pytest_options: PytestOptions = None,
    k: Annotated[
        str | None, typer.Option("-k", help="Measure only the cases that match this pytest -k expression.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only show the order of the cases and the cost of each.")
    ] = False,
    find: Annotated[
        float | None,
        typer.Option(
            parser=tolerance,
            metavar="SHARE",
            help="Launch as often as it takes to find this increase in the time per token, such as 2%. The "
            "cost is shown first.",
        ),
    ] = None,
    budget: Annotated[str | None, option("budget")] = None,
    shard: Annotated[str | None, option("shard")] = None,
    selftest: Annotated[
        str, typer.Option(help="Framework of the self-test (default: ddp, or fake without transformers).")
    ] = "",
    out: Out = Path("out"),
    only_summary: Annotated[
        bool, typer.Option("--only-summary", help="Measure nothing, and report a night that was interrupted.")
    ] = False,
    shared: Shared,
) -> None:
    """Check the machine and the gate, measure every case for the given hardware, and report.

    If GITHUB_STEP_SUMMARY names a file, the summary is appended to this file. The exit status is 1 if
    a case is worse, fails or has no baseline, if fewer than 90% of the cases were judged, or if the self-test
    missed a fault. It is 2 if nothing was measured.

    With --plan, costs are estimated from the launches in the store. The estimate for a case that was never
    measured comes from other cases with the same number of GPUs (`~`).

    With --find, the night launches as often as its plan needs, and uses the change as its tolerance if the
    plan reaches it in every case. The plan includes a reference if --perf-reference is given after `--`.
    """
    check_asked(hardware, shared.cases)
    jobs = read("shard", shard)
    if find is not None and budget is not None:
        raise CaseError(
            "--find cannot be combined with --budget: a plan needs all of its launches; remove one"
        )
    if plan:
        if pytest_options or only_summary:
            other = "--only-summary" if only_summary else "pytest options"
            raise CaseError(f"--plan cannot be combined with {other}: a plan launches nothing; remove one")
        cases = _chosen(shared.cases, k, hardware, jobs)
        if find is None:
            show_plan(cases, shared.store, budget, as_json=shared.as_json)
        else:
            show(_finding(cases, shared, find, has_reference=True), as_json=shared.as_json)
        return
    report_directory(out)
    if shared.as_json:
        raise CaseError("--json needs --plan (a night writes results.json): remove it, or add --plan")
    read("budget", budget)
    store = shared.store
    earlier_results = Store(store).results()
    summary = out / "summary.md"
    if only_summary and summary.is_file():
        begun = BEGUN.search(read_text(summary, errors="replace"))  # None: the summary is already written
        if begun is not None:
            later = earlier_results[int(begun[1]) :]
            if later:
                _summarise(summary, later)
        return
    for name in ("index.html", "results.json"):  # files of an earlier night
        (out / name).unlink(missing_ok=True)

    def note(why: str) -> None:
        from perfsuite.report import markdown  # imported here, because other commands do not need Jinja

        documents.write_text(summary, NOTHING.format(markdown.text(why), len(earlier_results)))

    note("see the log.")
    if only_summary:
        _summarise(summary, [])
        return
    # Without transformers, the self-test has no model.
    trains = selftest or ("fake" if find_spec("transformers") is None else "ddp")
    checks = (("doctor", "--quick", f"--expect={hardware}"), ("selftest", f"--framework={trains}"))
    options = [*gate(out), f"--perf-store={store}", f"--perf-baselines={shared.baselines}"]
    options += [f"--perf-shard={shard}"] if shard else []
    options += [f"--perf-budget={budget}"] if budget else []
    options += ["-k", k] if k else []
    if find is not None:
        has_reference = any(given.startswith("--perf-reference") for given in pytest_options or ())
        cases = _chosen(shared.cases, k, hardware, jobs)
        finding = _finding(cases, shared, find, has_reference=has_reference)
        show(finding, as_json=False)
        options += finding.pytest_options()
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
                say(f"perfsuite night: nothing was measured: perfsuite {command[0]} ended with {status}")
                raise typer.Exit(bad)
        note("pytest wrote no report: see the log.")
        status = run("pytest", *measure)
        if BEGUN.search(read_text(summary, errors="replace")) and Store(store).results() == earlier_results:
            why = f"pytest ended with {status} and wrote no report. Does a case file exit Python?"
            note(why)
            say(f"perfsuite night: nothing was measured: {why}")
            raise typer.Exit(2)
    finally:
        _summarise(summary, [result for result in Store(store).results() if result not in earlier_results])
    keep = f"; to keep the results: perfsuite history push {out / 'results.json'}"
    say(f"report: {out / 'index.html'}{keep if 'history' in extensions.names(COMMANDS) else ''}")
    raise typer.Exit(status if status in (0, 1) else 2)


def _chosen(directory: Path, k: str | None, hardware: str, jobs: tuple[int, int] | None) -> list[Case]:
    """Return the cases of a night, or of one of its jobs."""
    cases = by_expression(directory, k or "", hardware)
    if jobs is None:
        return cases
    of_job = shard_of(cases, *jobs)
    return [case for case in cases if case.id in of_job]


def _finding(cases: Sequence[Case], shared: Shared, find: float, *, has_reference: bool) -> Finding:
    store = Store(shared.store)
    baselines = BaselineStore(shared.baselines, store.baselines)
    return planned_to_find(cases, store, baselines, find, has_reference=has_reference)


def _summarise(summary: Path, sessions: Sequence[Path]) -> None:
    """Show the newest of these sessions on the page of the CI job. Write its report if there is none yet."""
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
    """Return annotations that GitHub Actions shows next to the case files.

    A worse or failed case is an error. Other cases that need attention are warnings. Each annotation is one
    line.
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
    """Escape text in a workflow command, in the same way as GitHub's toolkit."""
    for letter in f"%\r\n{more}":
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text
