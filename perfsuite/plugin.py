"""The pytest plugin: options, markers, the `bench` fixture, statuses and reports.

The only importer of pytest.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from perfsuite import baseline, data, report
from perfsuite.case import Case
from perfsuite.errors import PerfsuiteError
from perfsuite.hardware import ACCELERATORS, Machine, detect
from perfsuite.inject import Fault
from perfsuite.judge import UNMEASURED, Outcome, Policy, Verdict, judge
from perfsuite.noise import ClassNoise, class_noise
from perfsuite.progress import Progress
from perfsuite.replay import ReplayClock, raise_in, replay
from perfsuite.report import Result, Skipped
from perfsuite.result import Run
from perfsuite.run import measure, unsupported
from perfsuite.sequential import MAX_LAUNCHES

CLOCK = pytest.StashKey[ReplayClock]()
RESULT = pytest.StashKey[Result]()
SESSION = pytest.StashKey["Session"]()
WORDS = {
    "improved": ("i", ("IMPROVED", {"green": True, "bold": True})),
    "recorded": ("r", ("RECORDED", {"cyan": True})),
    "inconclusive": ("I", ("INCONCLUSIVE", {"yellow": True, "bold": True})),
    "unhealthy": ("U", ("UNHEALTHY", {"yellow": True, "bold": True})),
    "regressed": ("R", ("REGRESSED", {"red": True, "bold": True})),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The `--perf-*` options; each has an ini key where a repository may want to fix it."""
    group = parser.getgroup("perfsuite", "performance regression tests of distributed training")
    group.addoption("--perf-json", metavar="FILE", help="write every verdict and figure to FILE as JSON")
    group.addoption(
        "--perf-no-baseline",
        choices=["record", "fail"],
        help="a case without a baseline: record one in the store (default), or fail",
    )
    group.addoption("--perf-store", metavar="DIR", help="local baselines and run files (default: .perfsuite)")
    group.addoption("--perf-baselines", metavar="DIR", help="reviewed baselines (default: baselines)")
    group.addoption(
        "--perf-inject",
        metavar="FAULT",
        help="inject a fault to test the gate, for example slowdown=30%%; such runs are never recorded",
    )
    group.addoption(
        "--perf-max-launches",
        metavar="N",
        help=f"launches at the most until a case is inconclusive (default {MAX_LAUNCHES})",
    )
    group.addoption(
        "--perf-min-launches", metavar="N", help="launches at the least: 5 or more to accept as a baseline"
    )
    group.addoption("--perf-strict-improved", action="store_true", help="fail where a case improved")
    group.addoption("--perf-strict-inconclusive", action="store_true", help="fail where it is not known")
    parser.addini("perf_max_launches", "as --perf-max-launches", default=str(MAX_LAUNCHES))
    parser.addini("perf_min_launches", "as --perf-min-launches", default="1")
    parser.addini("perf_no_baseline", "as --perf-no-baseline", default="record")
    parser.addini("perf_store", "as --perf-store, from the root directory", default=".perfsuite")
    parser.addini("perf_baselines", "as --perf-baselines, from the root directory", default="baselines")


def pytest_configure(config: pytest.Config) -> None:
    """Register the hardware markers and check the options."""
    for name in ACCELERATORS:
        config.addinivalue_line("markers", f"{name}: a perfsuite case meant for {name}")
    config.stash[SESSION] = session = Session(config)
    session.policy()
    if fault := config.getoption("--perf-inject"):
        with _usage_error():
            Fault.parse(fault)


def _is_blind(result: Result) -> bool:
    return any(check.blind for check in result.verdict.checks)


@contextlib.contextmanager
def _usage_error() -> Iterator[None]:
    try:
        yield
    except PerfsuiteError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_make_parametrize_id(val: object) -> str | None:
    """A case is shown by its own id."""
    return val.id if isinstance(val, Case) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test with the hardware that its case is meant for, so that `-m` selects on it."""
    if (case := _case(item)) is not None:
        for marker in case.markers:
            item.add_marker(marker)


def _case(item: pytest.Item) -> Case | None:
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return None
    return next((value for value in callspec.params.values() if isinstance(value, Case)), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse two cases that share an id: they would share a baseline."""
    seen: dict[str, Case] = {}
    for case in filter(None, map(_case, items)):
        if seen.setdefault(case.id, case) != case:
            raise pytest.UsageError(
                f"two different cases have the id {case.id}: give their models different names"
            )


def pytest_collection_finish(session: pytest.Session) -> None:
    """How many benchmarks were selected."""
    session.config.stash[SESSION].selected = sum(_uses_bench(item) for item in session.items)


def _uses_bench(item: pytest.Item) -> bool:
    return "bench" in getattr(item, "fixturenames", ())


@dataclass
class Session:
    """What perfsuite knows during one pytest session."""

    config: pytest.Config
    selected: int = 0
    results: list[Result] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    nothing_measured: bool = False

    @cached_property
    def machine(self) -> Machine:
        """Looked at once, and only if something is measured."""
        return detect()

    def option(self, name: str) -> str:
        """The command line's value, else the ini file's."""
        value = self.config.getoption(f"--perf-{name}") or self.config.getini(
            f"perf_{name.replace('-', '_')}"
        )
        return str(value)

    def directory(self, name: str) -> Path:
        """A directory from the options, relative to the root directory."""
        return self.config.rootpath / self.option(name)

    @cached_property
    def run_directory(self) -> Path:
        """The files of this session's launches."""
        return self.directory("store") / "runs" / datetime.now().strftime("%Y%m%d-%H%M%S-%f")

    @cached_property
    def progress(self) -> Progress:
        """Written past pytest's capturing."""
        terminal: Any = self.config.pluginmanager.getplugin("terminalreporter")
        capture: Any = self.config.pluginmanager.getplugin("capturemanager")

        def uncaptured() -> Any:
            return capture.global_and_fixture_disabled() if capture else contextlib.nullcontext()

        def line(text: str) -> None:
            with uncaptured():
                terminal.ensure_newline()
                terminal.write_line(text)

        def live(text: str | None) -> None:
            with uncaptured():
                terminal.rewrite((text or "")[: shutil.get_terminal_size().columns - 1], erase=True)

        if terminal is None:
            return Progress(self.selected, line=lambda text: None, live=None)
        return Progress(self.selected, line=line, live=live if terminal.isatty else None)

    @cached_property
    def baseline_directories(self) -> list[Path]:
        """Reviewed baselines come before local ones."""
        return [self.directory("baselines"), self.directory("store") / "baselines"]

    @cached_property
    def noise(self) -> ClassNoise:
        """Pooled over all baselines of this machine's class, as they were when the session began."""
        return class_noise(baseline.of_class(self.baseline_directories, self.machine.hardware_class))

    def policy(self) -> Policy:
        """How many launches a verdict may cost."""
        return Policy(
            max_launches=self.number("max-launches", least=3),
            min_launches=self.number("min-launches", least=1),
        )

    def number(self, name: str, *, least: int) -> int:
        """A whole number from the options. Raises `UsageError` naming what is allowed."""
        text = self.option(name)
        if not text.isdigit() or int(text) < least:
            raise pytest.UsageError(f"--perf-{name}={text}: give a whole number, {least} or more")
        return int(text)

    def is_failing(self, outcome: Outcome) -> bool:
        """Whether the test fails with this outcome."""
        return outcome in ("regressed", "failed") or bool(
            (outcome == "improved" and self.config.getoption("--perf-strict-improved"))
            or (outcome == "inconclusive" and self.config.getoption("--perf-strict-inconclusive"))
        )

    def measure(self, case: Case, nodeid: str) -> Result:
        """Launch, compare, judge until decided, and record what has no baseline yet."""
        inject = self.config.getoption("--perf-inject")
        hardware_class = self.machine.hardware_class
        found = baseline.find(self.baseline_directories, hardware_class, case)
        accepted, file = found if found else (None, None)
        directory, policy = self.run_directory / case.id, self.policy()
        if accepted is None and self.option("no-baseline") == "fail":
            runs: list[Run] = []
            verdict = self._no_baseline()
        else:
            runs, verdict = measure(
                case,
                self.machine,
                directory,
                lambda runs: judge(runs, accepted, self.noise, policy),
                inject=inject,
                on_launch=lambda launch: self.progress.begin(case.id, case.total_steps, launch),
                on_progress=self.progress.step,
            )
            self.progress.end(verdict.outcome)
        if verdict.outcome == "recorded" and inject is None:
            file = baseline.path(self.baseline_directories[-1], hardware_class, case)
            data.write(file, baseline.from_runs(runs))
        result = Result(
            nodeid=nodeid,
            case_id=case.id,
            framework=case.framework.name,
            runs=tuple(runs),
            verdict=verdict,
            baseline_file=str(file) if file else None,
            directory=str(directory),
        )
        self.results.append(result)
        return result

    def _no_baseline(self) -> Verdict:
        directories = " or ".join(map(str, self.baseline_directories))
        reason = f"no baseline on {self.machine.hardware_class} in {directories}, and --perf-no-baseline=fail"
        return Verdict(outcome="failed", launches=0, failure="no_baseline", reasons=(reason,))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, what this machine cannot run; give pytest-benchmark a clock that replays."""
    if not _uses_bench(item):
        return
    if hasattr(item.config, "workerinput"):
        pytest.fail(
            "perfsuite does not run under pytest-xdist: cases side by side would disturb each other. "
            "Run without -n (or with -p no:xdist).",
            pytrace=False,
        )
    session = item.config.stash[SESSION]
    if (case := _case(item)) is not None and (reason := unsupported(case, session.machine)) is not None:
        session.skipped.append(
            Skipped(nodeid=item.nodeid, case_id=case.id, framework=case.framework.name, reason=reason)
        )
        pytest.skip(reason)
    clock = item.stash[CLOCK] = ReplayClock()
    closest = item.get_closest_marker("benchmark")
    options = {**(closest.kwargs if closest else {}), "timer": clock}
    item.add_marker(pytest.mark.benchmark(**options), append=False)


@pytest.fixture
def bench(request: pytest.FixtureRequest, benchmark: Any) -> Callable[[Case], Result]:
    """Measure a case and fail the test if it regressed: `def test_llama(bench, case): bench(case)`."""
    item = request.node
    session = request.config.stash[SESSION]

    def measure(case: Case) -> Result:
        if (reason := unsupported(case, session.machine)) is not None:
            pytest.skip(reason)
        try:
            result = session.measure(case, item.nodeid)
        except BaseException as error:
            raise_in(benchmark, error)
        item.stash[RESULT] = result
        failing = session.is_failing(result.verdict.outcome)
        steps = result.measured_steps
        told = {
            "case_id": case.id,
            "framework": result.framework,
            "outcome": result.verdict.outcome,
            **{name: value for name, value in result.figures if value is not None},
        }
        benchmark.extra_info.update(told)
        item.user_properties += [(f"perf_{name}", value) for name, value in told.items()]
        failure = pytest.fail.Exception(report.explanation(result), pytrace=False)
        if not steps:
            raise_in(benchmark, failure)
        replay(benchmark, item.stash[CLOCK], steps)
        if failing:
            raise failure
        return result

    return measure


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Carry the verdict to the terminal."""
    made: pytest.TestReport = yield
    result = item.stash.get(RESULT, None)
    if result is not None and made.when == "call":
        made.perf_outcome = result.verdict.outcome  # type: ignore[attr-defined]
    return made


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, Any] | None:
    """Verdicts that pytest has no word for get their own."""
    outcome = getattr(report, "perf_outcome", None)
    if report.when != "call" or outcome not in WORDS:
        return None
    letter, word = WORDS[outcome]
    return outcome, letter, word


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The table; then, for each regression, what was measured against what."""
    session = config.stash[SESSION]
    if session.results:
        machine = session.machine
        terminalreporter.section(f"perfsuite: {machine.hardware_class} ({machine.device_name})")
        on_terminal = terminalreporter.isatty
        width, color = (
            (shutil.get_terminal_size().columns if on_terminal else 140),
            terminalreporter.hasmarkup,
        )
        terminalreporter.write_line(report.table(session.results, color=color, width=width))
        for result in session.results:
            noted = any(run.notes for run in result.runs)
            if result.verdict.outcome not in ("passed", "recorded", "failed") or noted or _is_blind(result):
                terminalreporter.write_line("")
                terminalreporter.write_line(report.explanation(result))
    if session.nothing_measured:
        terminalreporter.section("perfsuite: nothing was measured", red=True, bold=True)
        terminalreporter.write_line(
            f"{session.selected} cases were selected, none gave a valid measurement: this is not a pass."
        )
        for skip in session.skipped[:20]:
            terminalreporter.write_line(f"  {skip.case_id}: {skip.reason}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the JSON file, and never be green when nothing was measured."""
    ours = session.config.stash[SESSION]
    ours.nothing_measured = bool(
        ours.selected
        and all(result.verdict.outcome in UNMEASURED for result in ours.results)
        and not session.config.option.collectonly
    )
    if ours.nothing_measured and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if file := session.config.getoption("--perf-json"):
        interrupted = exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
        content = report.to_json(
            ours.machine, ours.results, ours.skipped, status="interrupted" if interrupted else "complete"
        )
        with _usage_error():
            data.write_text(Path(file), json.dumps(content, indent=1) + "\n")


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Hardware and framework versions for pytest-benchmark's JSON."""
    from importlib.metadata import PackageNotFoundError, version

    machine_info["hardware"] = data.plain(config.stash[SESSION].machine)
    versions = {}
    for package in ("torch", "transformers", "accelerate", "nanotron"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    machine_info["frameworks"] = versions


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_benchmark_compare_machine_info(
    machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
) -> None:
    """Refuse to compare runs of unlike hardware."""
    now = machine_info.get("hardware", {}).get("hardware_class")
    then = compared_benchmark.get("machine_info", {}).get("hardware", {}).get("hardware_class")
    if now != then:
        raise pytest.UsageError(
            f"--benchmark-compare: the saved run is from {then or 'a machine without perfsuite'}, "
            f"this machine is {now}: times of unlike hardware cannot be compared"
        )
