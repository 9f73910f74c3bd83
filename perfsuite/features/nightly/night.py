"""`perfsuite night`: a nightly run in one command, for any CI, for cron and for cluster jobs."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from perfsuite import documents, extensions
from perfsuite.case.case import Case
from perfsuite.cli.shared import Hardware, Out, PytestOptions, option, read, report_directory, tolerance
from perfsuite.cli.shared_options import Shared, shares
from perfsuite.dry.cases import by_expression
from perfsuite.errors import CaseError, PerfsuiteError
from perfsuite.extensions import COMMANDS
from perfsuite.features.nightly.find import FindPlan, planned_to_find, show
from perfsuite.features.nightly.page import Page
from perfsuite.features.nightly.plan import show_plan
from perfsuite.report.console import say
from perfsuite.results.session_file import SessionFile
from perfsuite.results.store import NIGHT, BaselineStore, Store
from perfsuite.session.by_command import check_asked
from perfsuite.session.jobs import CANNOT_TELL, refused, run
from perfsuite.session.plan import shard as shard_of


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
    """Check the machine, run the self-test, measure every case for the given hardware, and report.

    If GITHUB_STEP_SUMMARY names a file, the summary is appended to this file. The exit status is 1 if
    a case is worse, fails or has no baseline, if fewer than 90% of the cases were judged, or if the self-test
    missed a fault. If nothing was measured, and the reason is none of these, the exit status is 2.

    With --plan, costs are estimated from the launches in the store. The estimate for a case that was never
    measured comes from other cases with the same number of GPUs, and is marked with `~`.

    With --find, the night launches as often as its plan needs. If the plan can find the given increase in
    every case, and the increase is smaller than the night's tolerance, the increase becomes the tolerance.
    The plan includes a reference if --perf-reference is given after `--`.
    """

    def asked() -> Night:
        """Return what the options ask for. Raises `CaseError` if they are wrong."""
        check_asked(hardware, shared.cases)
        read("budget", budget)
        part = read("shard", shard)
        if find is not None and budget is not None:
            raise CaseError(
                "--find cannot be combined with --budget, because a plan needs all of its launches: remove "
                "--find or --budget"
            )
        if shared.as_json and not plan:
            raise CaseError("--json needs --plan (a night writes results.json): remove --json, or add --plan")
        return Night(hardware=hardware, k=k, shard=part, find=find, budget=budget, shared=shared)

    if plan:
        tonight = asked()
        if pytest_options or only_summary:
            other = "--only-summary" if only_summary else "pytest options"
            raise CaseError(
                f"--plan cannot be combined with {other}, because a plan launches nothing: remove --plan or "
                f"{other}"
            )
        tonight.show_plan()
        return
    report_directory(out)
    page = Page(out, shared.store)
    if only_summary:
        asked()
        _report_killed(page)
        return
    # Begin the page before the options are checked, so that nobody takes the report of an earlier night for
    # this night's report.
    page.begin("the night has not come to an end")
    try:
        tonight = asked()
        arguments = tonight.pytest_arguments(out, pytest_options or ())
        status = _measure(tonight.checks(selftest), arguments, page)
    except PerfsuiteError as error:
        page.explain(str(error))
        raise
    except NothingMeasured as stopped:
        page.explain(stopped.why)
        say(f"perfsuite night: nothing was measured: {stopped.why}")
        raise typer.Exit(stopped.status) from None
    finally:
        _publish(page, page.sessions())
    say(report_line(out, extensions.names(COMMANDS)))
    raise typer.Exit(status if status in (0, 1) else 2)


def report_line(out: Path, commands: Collection[str]) -> str:
    """Return the line that names the report.

    If the command `history` is installed, the line also says how to keep the results.
    """
    keep = f"; to keep the results: perfsuite history push {out / 'results.json'}"
    return f"report: {out / 'index.html'}{keep if 'history' in commands else ''}"


class NightCheck(NamedTuple):
    """A command of perfsuite that must pass before a night measures anything."""

    command: list[str]
    status: int  # exit status of the night if this command finds a problem (and ends with 1)


class NothingMeasured(Exception):
    """Ends a night without a result."""

    def __init__(self, why: str, status: int = 2) -> None:
        super().__init__(why)
        self.why = why
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Night:
    """What a night measures, and how."""

    hardware: str
    k: str | None
    shard: tuple[int, int] | None  # number of this job, from 1, and number of jobs
    find: float | None
    budget: str | None
    shared: Shared

    def show_plan(self) -> None:
        """Show the order and the cost of the cases or, with `--find`, how often they have to be launched."""
        as_json = self.shared.as_json
        if self.find is None:
            show_plan(self._cases(), self.shared.store, self.budget, as_json=as_json)
        else:
            show(self._finding(self.find, has_reference=True), as_json=as_json)

    def checks(self, selftest: str) -> list[NightCheck]:
        """Return the commands that check the machine and run the self-test.

        `selftest` is the framework of the self-test, or "" to choose one.
        """
        # Without transformers, the self-test has no model.
        trained = selftest or ("fake" if find_spec("transformers") is None else "ddp")
        return [
            NightCheck(["doctor", "--quick", f"--expect={self.hardware}"], status=2),
            NightCheck(["selftest", f"--framework={trained}"], status=1),
        ]

    def pytest_arguments(self, out: Path, given: Sequence[str]) -> list[str]:
        """Return the arguments with which pytest measures the cases.

        With `--find`, the cost of the cases is shown first. `given` are the user's own options of pytest.
        They come last, so they override the others.
        """
        options = gate(out)
        options += [f"--perf-store={self.shared.store}", f"--perf-baselines={self.shared.baselines}"]
        if self.shard is not None:
            number, jobs = self.shard
            options += [f"--perf-shard={number}/{jobs}"]
        if self.budget:
            options += [f"--perf-budget={self.budget}"]
        if self.k:
            options += ["-k", self.k]
        if self.find is not None:
            has_reference = any(word.startswith("--perf-reference") for word in given)
            finding = self._finding(self.find, has_reference=has_reference)
            show(finding, as_json=False)
            options += finding.pytest_options()
        return [str(self.shared.cases), "-m", self.hardware, *options, *given]

    def _cases(self) -> list[Case]:
        cases = by_expression(self.shared.cases, self.k or "", self.hardware)
        if self.shard is None:
            return cases
        of_job = shard_of(cases, *self.shard)
        return [case for case in cases if case.id in of_job]

    def _finding(self, find: float, *, has_reference: bool) -> FindPlan:
        store = Store(self.shared.store)
        baselines = BaselineStore(self.shared.baselines, store.baselines)
        return planned_to_find(self._cases(), store, baselines, find, has_reference=has_reference)


def _measure(checks: Sequence[NightCheck], arguments: Sequence[str], page: Page) -> int:
    """Run the checks and then pytest, and return pytest's exit status.

    Raises `NothingMeasured` if pytest refuses the arguments, if a check fails, or if pytest leaves no
    results.
    """
    why = refused(*arguments)
    if why is not None:
        raise NothingMeasured(why)
    for check in checks:
        status = run("perfsuite.cli", *check.command)
        if status not in (0, CANNOT_TELL):
            ended = check.status if status == 1 else 2
            raise NothingMeasured(f"perfsuite {check.command[0]} ended with {status}", ended)
    status = run("pytest", *arguments, variables={**os.environ, NIGHT: page.night})
    if not page.has_report() and not page.sessions():
        raise NothingMeasured(
            f"pytest ended with {status} and wrote no report. Does a case file end the process (os._exit)?"
        )
    cut_short = [results for results in page.sessions() if _was_cut_short(results)]
    if cut_short and status == 0:
        say(
            f"perfsuite night: pytest ended with 0 before the end of its session ({cut_short[-1]}). Does a "
            "case file end the process (os._exit)?"
        )
        return 1
    return status


def _was_cut_short(results: Path) -> bool:
    """Return whether a session ended before it had measured all of its cases."""
    return documents.read(results, SessionFile).status != "complete"


def _report_killed(page: Page) -> None:
    """Write the report of a night that was killed before it wrote one, for example by its CI job."""
    if not page.file.is_file():
        page.begin("the night did not begin")
        _publish(page, [])
        return
    sessions = page.sessions_of_killed()
    if sessions:
        _publish(page, sessions)


def _publish(page: Page, sessions: Sequence[Path]) -> None:
    """Complete the page, and append it to the summary of the CI job."""
    for line in page.complete(sessions):
        typer.echo(line)
    page.append_to_job()
