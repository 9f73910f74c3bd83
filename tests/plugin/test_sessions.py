"""Tests of the plugin in another repository, with nothing but `pip install perfsuite` and a test file.

If nothing depends on processes, launches are simulated in this process (`tests.simulated`). Smoke tests, and
sessions in a process of their own, have real launches.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from perfsuite import documents
from perfsuite.case import torch_build
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.errors import AllocationOverError, MachineError
from perfsuite.launch.job import Job, OnProgress, no_progress
from perfsuite.launch.local import LocalLauncher
from perfsuite.launch.lock import MachineLock, machine_lock
from perfsuite.launch.quiet import Neighbours
from perfsuite.measure import measure
from perfsuite.results.outcome import Outcome, Verdict
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Health, LaunchFile, Run
from perfsuite.results.session_file import SessionFile
from perfsuite.session.against_baseline import AgainstBaseline
from perfsuite.session.session import Session
from perfsuite.session.setup import Host
from tests.processes import arguments
from tests.samples import DISTURBED, make_gpu_machine, make_run
from tests.simulated import EndsAfter, Rewrites
from tests.suite import (
    CASES,
    FAKE_DRY_RUNS,
    ID,
    OnSession,
    batches,
    launching_with,
    local_baseline,
    read_json,
    read_junit,
    read_report,
    run,
    run_cpu,
    waiver,
    write_cases,
)
from tests.twin_counts import counts, launch

FILES = ("--junitxml=j.xml", "--perf-json=out.json", "--perf-report=out")


@pytest.fixture(autouse=True)
def _in_this_process(request: pytest.FixtureRequest) -> None:
    """Simulate launches, except in smoke tests."""
    if request.node.get_closest_marker("smoke") is None:
        request.getfixturevalue("simulated")


def test_names_a_baseline_directory_that_is_missing(suite: pytest.Pytester) -> None:
    said = run_cpu(suite, "--perf-baselines=typo", "--perf-record-launches=1").stdout
    said.fnmatch_lines(["note: no case has a reviewed baseline, because there is no directory typo.*"])


@pytest.mark.smoke("fake")
def test_first_run_records_second_compares(suite: pytest.Pytester) -> None:
    run_cpu(suite).stdout.fnmatch_lines(
        [
            "perfsuite: R regressed, U unhealthy, I inconclusive, i improved, r recorded",
            f"perfsuite: [[]1/1] {ID} begins",
            f"perfsuite: [[]1/1] {ID} recorded after 3 launches in * s",
            f"*{ID}*5?,*10.0*95.4 MiB*recorded*",
            "*1 recorded*",
        ]
    )
    second = run_cpu(suite, "-v", "--perf-json", "out.json")
    second.stdout.fnmatch_lines([f"*{ID}*+0.0%*passed*"])
    (result,) = read_json(suite)["results"]
    assert (result["framework"], result["case_id"], result["outcome"]) == ("fake", ID, "passed")
    assert result["figures"]["tokens_per_s"] == pytest.approx(51200, rel=0.02)
    assert [len(run["step_s"]) for run in result["runs"]] == [70]
    assert len(json.loads(local_baseline(suite).read_text())["launches"]) == 3
    kept = sorted((suite.path / ".perfsuite" / "runs").glob("*/results.json"))
    assert [documents.read(file, SessionFile).results[0].outcome for file in kept] == ["recorded", "passed"]
    assert kept[1].read_text() == (suite.path / "out.json").read_text()


def test_explains_and_reports_a_slowdown(recorded: pytest.Pytester) -> None:
    recorded.makeini("[pytest]\nfilterwarnings = error")
    slow = run_cpu(recorded, "--perf-inject", "slowdown=30%", *FILES, status=1)
    local = local_baseline(recorded).relative_to(recorded.path)
    slow.stdout.fnmatch_lines(
        [
            f"*{ID}: regressed*",
            "*tokens/s: 39,*, baseline 51,*: 23.0% fewer (99% interval *),*",
            f"  baseline: {local}",
            "*1 regressed*",
        ]
    )
    case = read_junit(recorded)
    session = read_json(recorded)
    properties = {str(p.get("name")): str(p.get("value")) for p in case.iter("property")}
    assert properties["perf_outcome"] == "regressed"
    assert properties["perf_framework"] == "fake"
    assert float(properties["perf_tokens_per_s"]) == pytest.approx(39200, rel=0.02)
    assert properties["perf_hardware_class"] == session["machine"]["hardware_class"]
    assert properties["perf_launches"] == str(len(session["results"][0]["runs"]))
    (failure,) = case.iter("failure")
    assert "% fewer (99% interval" in str(failure.text) + str(failure.get("message"))
    assert session["results"][0]["verdict"]["checks"][0]["outcome"] == "regressed"
    page, summary = read_report(recorded)
    assert "<h1>1 regressed</h1>" in page
    assert summary.startswith("## perfsuite: 1 regressed")


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--perf-no-counts", "--perf-resume measures the remaining cases in another allocation"),
        ("--perf-against=.", "Measure the remaining cases in another session: select them with -k"),
    ],
)
def test_the_end_of_an_allocation_says_how_to_go_on(suite: pytest.Pytester, option: str, advice: str) -> None:
    """A comparison cannot be resumed."""
    plugins = [launching_with(EndsAfter(0, AllocationOverError("the job is over")))]
    result = run_cpu(suite, option, status=2, plugins=plugins)
    result.stdout.fnmatch_lines([f"*perfsuite: the job is over. {advice}*"])


def test_compared_arm_writes_no_baseline(suite: pytest.Pytester) -> None:
    same = run_cpu(suite, "--perf-against=.", "--perf-json=out.json", "--perf-report=out")
    same.stdout.fnmatch_lines(
        [
            "*tokens/s A *B *B vs A (99%)*memory B vs A *pairs *verdict*",
            ID,
            "*0.0% (*3 of 3 *passed*",
            f"*{ID}: passed after 3 pairs of launches*",
            "*tokens/s: 51,*, arm A 51,*: 0.0% *",
        ]
    )
    session = read_json(suite)
    assert [arm["text"] for arm in session["arms"]] == [".", "."]
    assert len(session["results"][0]["before"]) == len(session["results"][0]["runs"]) == 3
    assert "B vs A" in read_report(suite)[1]
    assert {path.name for path in (suite.path / ".perfsuite").iterdir()} == {"compare"}
    slow = run_cpu(suite, "--perf-against=.", "--perf-inject=slowdown=30%", "--perf-max-pairs=5", status=1)
    slow.stdout.fnmatch_lines(["*23.0% fewer*", "*1 regressed*"])


def measuring_with(function: Callable[..., Any]) -> OnSession:
    """Return a plugin that makes a session measure its cases with this function."""

    def change(session: Session) -> None:
        assert isinstance(session.mode, AgainstBaseline)
        session.mode.measure = function

    return OnSession(change)


def find(suite: pytest.Pytester, *outcomes: Outcome) -> OnSession:
    """Write cases with micro-batches 1, 2, and so on. Return a plugin with which these are their outcomes.

    Each case takes 100 s of the budget.
    """

    def change(session: Session) -> None:
        def measured(case: Case, *args: Any, runs: list[Run]) -> tuple[list[Run], Verdict]:
            args[-1].on_launch(case, 1)
            runs.append(make_run(case=case, duration_s=100))
            if session.setup.budget is not None:
                session.setup.budget.began -= 100
            return runs, Verdict(outcome=outcomes[case.micro_batch - 1], launches=1)

        assert isinstance(session.mode, AgainstBaseline)
        session.mode.measure = measured

    write_cases(suite, batches(*range(1, len(outcomes) + 1)))
    return OnSession(change)


def test_other_outcomes_are_named_and_may_fail(suite: pytest.Pytester) -> None:
    """The last line has the number of judged cases. If there are too few, the session can fail on request."""
    plugins = [find(suite, "improved", "inconclusive", "unhealthy", "passed")]
    result = run_cpu(suite, "-v", "--perf-min-judged=50%", plugins=plugins)
    assert result.outlines[-2] == "2 of 4 cases judged"
    for outcome in ("improved", "inconclusive"):
        result.stdout.fnmatch_lines([f"*{outcome.upper()}*", f"*: {outcome} after*", f"*1 {outcome}*"])
        run_cpu(suite, f"--perf-strict={outcome}", status=1, plugins=plugins)
    too_few = run_cpu(suite, "--perf-min-judged=51%", status=1, plugins=plugins)
    assert too_few.outlines[-2] == "2 of 4 cases judged, but --perf-min-judged requires 51%: not a pass"


def test_next_session_replaces_a_first_look(suite: pytest.Pytester) -> None:
    """One launch gives no noise, so every later session would be inconclusive."""

    def launches() -> int:
        return len(json.loads(local_baseline(suite).read_text())["launches"])

    run_cpu(suite, "--perf-max-launches=1").stdout.fnmatch_lines(["*recorded in*"])
    assert launches() == 1
    run_cpu(suite).stdout.fnmatch_lines(["*1 recorded*"])
    assert launches() == 3
    run_cpu(suite, "--perf-record-launches=1").stdout.fnmatch_lines(["*1 passed*"])
    run_cpu(suite, "--perf-max-launches=1", "--perf-inject=slowdown=30%").stdout.fnmatch_lines(
        [
            "*: inconclusive after 1 launch*",
            "*23.0% fewer*",
            "*inconclusive; a regression in times is only reported after 3 launches or more*",
        ]
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("-m", "a100"), "it is meant for a100-80gb, but this machine is cpu-"),
        (("-m", "cpu", "--perf-dry"), "a dry run cannot do this: fake does not define how it builds"),
    ],
)
def test_skips_what_cannot_run_which_is_no_pass(
    suite: pytest.Pytester, options: tuple[str, ...], reason: str
) -> None:
    result = run(suite, *options, "-rs", "--perf-json=out.json", "--perf-report=out", status=1)
    result.stdout.fnmatch_lines(
        ["*nothing was measured*", f"*{reason}*", f"SKIPPED*{reason}*", "*1 skipped*"]
    )
    assert reason in read_json(suite)["skipped"][0]["reason"]
    assert "1 skipped" in read_report(suite)[0]


WITH_XDIST = ("-n", "1", "-p", "no:cacheprovider", "-p", "no:rerunfailures")
"""Options for a session with a worker. `tests/conftest.py` changes pytest-rerunfailures in this process, but
not in the worker."""


@pytest.mark.launch
def test_refuses_xdist_before_launching(suite: pytest.Pytester) -> None:
    result = run_cpu(suite, *WITH_XDIST, status=pytest.ExitCode.USAGE_ERROR)
    result.stdout.fnmatch_lines(["ERROR: perfsuite does not run under pytest-xdist*Run without -n*"])
    assert not (suite.path / ".perfsuite").exists()


@pytest.mark.launch
def test_xdist_fails_cases_next_to_other_tests(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_others="def test_other():\n    pass\n")
    result = run(suite, *WITH_XDIST, "--perf-report=out", status=1)
    assert result.parseoutcomes() == {"passed": 1, "errors": 2}
    for text in read_report(suite):
        assert "perfsuite does not run under pytest-xdist" in text


@pytest.mark.parametrize("addopts", ["-n 2", "-n auto", "--dist=loadfile --tx=2*popen"])
def test_ignores_xdist_settings_for_cases_alone(suite: pytest.Pytester, addopts: str) -> None:
    suite.makeini(f"[pytest]\naddopts = {addopts}\nfilterwarnings = error\n")
    suite.mkdir("bench_cases")
    (suite.path / "test_cases.py").rename(suite.path / "bench_cases" / "test_cases.py")
    result = run_cpu(suite, "bench_cases", "--perf-record-launches=1")
    result.stdout.fnmatch_lines(
        ["perfsuite: -n is ignored, because cases run one after another", "*1 recorded*"]
    )


@pytest.mark.parametrize(
    ("mark", "chosen"), [("skip", ""), ("skip", "h100"), ("xfail", "h100"), ("skip", "not cpu")]
)
def test_test_without_cases_fails_on_any_hardware(suite: pytest.Pytester, mark: str, chosen: str) -> None:
    write_cases(suite, "[]")
    suite.makeini(f"[pytest]\nempty_parameter_set_mark = {mark}\n")
    result = run(suite, "-m", chosen, status=1)
    result.stdout.fnmatch_lines(["*no case: the parameters of this test are empty*"])


def test_unknown_mark_for_lost_cases_is_an_error(suite: pytest.Pytester) -> None:
    write_cases(suite, "[]")
    suite.makeconftest("""
        import pytest

        def pytest_itemcollected(item):
            others = [mark for mark in item.own_markers if mark.name != "skip"]
            item.own_markers[:] = [*others, pytest.mark.skip(reason="as an older pytest said").mark]
    """)
    result = run(suite, status=pytest.ExitCode.USAGE_ERROR)
    result.stderr.fnmatch_lines(["*has no case, and pytest * would skip it in a way*"])


@pytest.mark.parametrize("arguments", [("-m", "not slow"), ("-m", "h100", "-k", "other")])
def test_deselected_test_stays_deselected(suite: pytest.Pytester, arguments: tuple[str, ...]) -> None:
    empty = CASES.replace("[FAKE, A100]", "[]")
    marked = empty.replace("@pytest.mark.param", "@pytest.mark.slow\n    @pytest.mark.param")
    suite.makepyfile(test_cases=marked if "slow" in arguments[1] else empty)
    suite.makeini("[pytest]\nmarkers = slow\n")
    run(suite, *arguments, status=pytest.ExitCode.NO_TESTS_COLLECTED)


def test_other_plugins_error_loses_no_result(suite: pytest.Pytester) -> None:
    """pytest-benchmark opens its file there. The directory might be missing."""
    suite.runpytest("-m", "cpu", "--benchmark-json=none/b.json", "--perf-json=out.json", "--perf-report=out")
    content = read_json(suite)
    assert content["status"] == "complete"
    assert [result["verdict"]["outcome"] for result in content["results"]] == ["recorded"]
    assert (suite.path / "out" / "index.html").exists()


@pytest.mark.parametrize(
    ("body", "outcome", "said"),
    [
        ("pass", "errors", "*uses bench but never called it, so nothing was measured*"),
        (
            "try: bench(1)\n        except BaseException: pass",
            "errors",
            "*bench was given 1: give it the case *",
        ),
        ("bench(case); bench(case)", "failed", "*bench measures one case per test: parametrize*"),
        ("pytest.skip('not today')", "skipped", "*nothing was measured*"),
        ("1 / 0", "failed", "*nothing was measured*"),
    ],
)
def test_test_must_call_bench_exactly_once(
    suite: pytest.Pytester, body: str, outcome: str, said: str
) -> None:
    write_cases(suite, body=body)
    result = run(suite, "-W", "ignore", status=1)
    assert result.parseoutcomes()[outcome] == 1
    assert ("uses bench but never called" in str(result.stdout)) == (body == "pass")
    result.stdout.fnmatch_lines([said])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("micro_batch=8", ID.replace("b4", "b8")),
        ("hardware='h100'", "a different case with the same id (it differs in hardware)"),
        ("timeout_s=7, steps=60", ID.replace("1x2", "steps60-1x2")),
    ],
)
def test_refuses_another_case_than_the_parameter(suite: pytest.Pytester, change: str, name: str) -> None:
    write_cases(suite, body=f"bench(case.replace({change}))")
    result = run_cpu(suite, "--perf-json=out.json", status=1)
    said = (
        f"bench measures the case that is the test's parameter, {ID}, but was given {name}. Make that case a*"
    )
    result.stdout.fnmatch_lines([said])
    (kept,) = read_json(suite)["results"]
    assert (kept["outcome"], kept["runs"]) == ("failed", [])


def test_measures_a_case_equal_to_the_parameter(suite: pytest.Pytester) -> None:
    write_cases(suite, body="bench(case.replace(micro_batch=4))")
    run_cpu(suite, "--perf-record-launches=1")


@pytest.mark.parametrize(
    "body",
    [
        "thread = threading.Thread(target=bench, args=(case,))\n        thread.start(); thread.join()",
        "with ThreadPoolExecutor() as pool: pool.submit(bench, case)",
    ],
)
def test_bench_in_another_thread_is_refused(suite: pytest.Pytester, body: str) -> None:
    imports = "    import threading\n    from concurrent.futures import ThreadPoolExecutor\n"
    suite.makepyfile(test_cases=imports + CASES.replace("bench(case)", body))
    result = run_cpu(suite, "-W", "ignore", status=1)
    result.stdout.fnmatch_lines(["*bench was called in another thread, where its verdict would be lost*"])


@pytest.mark.fault("store is read-only")
@pytest.mark.parametrize(
    ("option", "status", "said"),
    [
        ("--perf-store=file/store", 1, ["*cannot write *file/store/*: Not a directory*"]),
        (
            "--perf-json=file/out.json",
            pytest.ExitCode.INTERNAL_ERROR,
            ["*95.4 MiB*recorded*", "*the results were not written*", "*cannot write *out.json*"],
        ),
    ],
)
def test_unwritable_output_costs_no_figures(
    suite: pytest.Pytester, option: str, status: int, said: list[str]
) -> None:
    (suite.path / "file").write_text("")
    run_cpu(suite, option, status=status).stdout.fnmatch_lines(said)


def test_torch_unable_to_use_gpus_is_one_error(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_gpus(session: Session) -> None:
        session.setup.host.machine = make_gpu_machine()

    plugins = [OnSession(has_gpus)]
    monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.13.0+cpu", "cuda": None})
    more = "[FAKE, *(FAKE.replace(framework=DDP(), hardware='gpu', micro_batch=b) for b in (1, 2, 3))]"
    write_cases(suite, more)
    result = run(suite, status=pytest.ExitCode.USAGE_ERROR, plugins=plugins)
    (said,) = (line for line in result.errlines if "torch" in line)
    assert said.startswith("ERROR: torch 2.13.0+cpu was built without CUDA and cannot use the GPUs of this")
    assert not (suite.path / ".perfsuite").exists()
    run_cpu(suite, plugins=plugins)


class LostGpu(LocalLauncher):
    """A launcher on a machine with a broken GPU."""

    def machine(self, shared: Path) -> Machine:
        raise MachineError("GPU 3 (00000000:5B:00.0) cannot be read: GPU is lost")


def test_unreadable_gpu_concerns_only_its_cases(suite: pytest.Pytester) -> None:
    plugins = [launching_with(LostGpu())]
    result = run_cpu(suite, "--perf-json=out.json", status=pytest.ExitCode.USAGE_ERROR, plugins=plugins)
    result.stderr.fnmatch_lines(["ERROR: GPU 3 (00000000:5B:00.0) cannot be read: GPU is lost"])
    for output in (str(result.stdout), str(result.stderr)):
        assert "Traceback" not in output
        assert "INTERNALERROR" not in output
    suite.makepyfile(test_cases="def test_other(benchmark):\n    benchmark.pedantic(len, ('abc',))\n")
    run(suite, "--benchmark-json=b.json", plugins=plugins)
    machine = read_json(suite, "b.json")["machine_info"]
    assert ("hardware" in machine, "frameworks" in machine) == (False, True)


class BesideOthers(Rewrites):
    """Simulates launches that report these healths, one after another. The ranks measure their time."""

    def __init__(self, *healths: Health) -> None:
        super().__init__(clock="perf_counter")
        self._healths = itertools.cycle(healths)

    def launch(self, job: Job, on_progress: OnProgress = no_progress) -> Failure | None:
        failure = super().launch(job, on_progress)
        file = job.run_dir.launch(0)
        documents.write(file, documents.read(file, LaunchFile).replace(health=next(self._healths)))
        return failure


class Restless(Neighbours):
    """Other users who never stop."""

    def wait(self, machine: Machine, devices: int) -> bool:
        return False


def shared_with_others(*healths: Health) -> OnSession:
    """Return a plugin with which launches report these healths, beside other users who never stop."""

    def change(session: Session) -> None:
        session.setup.host.launcher = BesideOthers(*healths)
        session.setup.neighbours = Restless(session.setup.progress.say, session.setup.progress.waiting)

    return OnSession(change)


@pytest.mark.fault("other programs use the machine")
def test_shared_machine_shows_figures_on_request(suite: pytest.Pytester) -> None:
    plugins = [shared_with_others(DISTURBED)]
    nothing = run_cpu(suite, status=1, plugins=plugins)
    nothing.stdout.fnmatch_lines(
        [
            "perfsuite: launch 1 of fake-* is set aside: other processes used 60% of *; seen: *",
            "perfsuite: [[]1/1] fake-* unhealthy in * s",
            "*unhealthy (shared)",
            "*nothing was judged: no measurement can be used as evidence*",
            "Other jobs used the machine. --perf-wait-quiet=SECONDS waits longer*--perf-allow-shared*",
        ]
    )
    shown = run_cpu(suite, "--perf-allow-shared", "--perf-json=out.json", plugins=plugins)
    shown.stdout.fnmatch_lines(
        [
            f"*{ID}*5?,*unhealthy (shared)",
            "--perf-allow-shared: other jobs used the machine during launches of 1 case. Only the counts of "
            "these launches are judged and recorded. Times and memory are shown without being judged",
            "*1 unhealthy*",
        ]
    )
    shown.stdout.no_fnmatch_line("*no measurement can be used as evidence*")
    assert read_json(suite)["results"][0]["shared"] is True
    assert not list(suite.path.glob(".perfsuite/baselines/*/*"))


@pytest.mark.parametrize("shadow", [(), ("--perf-shadow",)])
def test_a_failed_case_is_judged(suite: pytest.Pytester, shadow: tuple[str, ...]) -> None:
    plugins = [find(suite, "failed", "unhealthy")]
    result = run_cpu(suite, *shadow, status=0 if shadow else 1, plugins=plugins)
    assert "nothing was judged" not in str(result.stdout)
    assert "none could be judged" not in str(result.stdout)
    result.stdout.fnmatch_lines(["1 of 2 cases judged"])


def test_names_others_who_used_some_launches(suite: pytest.Pytester) -> None:
    plugins = [shared_with_others(DISTURBED, DISTURBED.replace(foreign_cpu=0))]
    options = ("--perf-wait-quiet=0", "--perf-json=out.json")
    run_cpu(suite, *options, status=1, plugins=plugins).stdout.fnmatch_lines(
        ["*1 case selected, none could be judged: not a pass.", "Other jobs used the machine.*"]
    )
    (result,) = read_json(suite)["results"]
    assert (len(result["runs"]), result["shared"]) == (5, False)


def measured_batches(suite: pytest.Pytester) -> list[int]:
    return [result["runs"][0]["case"]["micro_batch"] for result in read_json(suite)["results"]]


def test_budget_takes_failed_and_oldest_first(suite: pytest.Pytester) -> None:
    plugins = [find(suite, "passed", "passed", "regressed", "passed")]
    first_options = ("--perf-budget=250s", "--perf-json=out.json", "--perf-report=out")
    first = suite.runpytest(*first_options, plugins=plugins)
    first.stdout.fnmatch_lines(
        [
            "*perfsuite: the budget is used up*",
            "2 cases not reached within*",
            "  fake-*: too little of the budget*",
        ]
    )
    began = measured_batches(suite)
    assert len(began) == 2, "the first one took 100 s, so a third does not fit"
    summary = read_report(suite)[1]
    assert "2 not reached" in summary
    assert "launches 3.3 min" in summary
    suite.runpytest("--perf-budget=350s", "--perf-json=out.json", plugins=plugins)
    again = measured_batches(suite)
    assert ({1, 2, 3, 4} - {*began}) <= {*again}
    assert len(again) == 3
    assert again[0] == 3 if 3 in began else again[2] in began
    last_options = ("--perf-budget=250s", "--perf-json=out.json", "--perf-min-judged=60%")
    last = suite.runpytest(*last_options, plugins=plugins)
    assert measured_batches(suite)[0] == 3, "the regressed case comes first"
    last.stdout.fnmatch_lines(["*2 of 4 cases judged, but --perf-min-judged requires 60%: not a pass"])
    none = run_cpu(suite, "--perf-budget=99s", status=pytest.ExitCode.TESTS_FAILED, plugins=plugins)
    none.stdout.fnmatch_lines(
        ["*: it never fits into the budget of 99 s, because it takes about 1.7 min. Give 2min or more"]
    )


def test_jobs_share_the_cases(suite: pytest.Pytester) -> None:
    plugins = [find(suite, "passed", "passed", "passed", "passed")]
    shares = []
    for number in (1, 2):
        run_cpu(suite, f"--perf-shard={number}/2", "--perf-json=out.json", plugins=plugins)
        shares.append(set(measured_batches(suite)))
    assert [len(share) for share in shares] == [2, 2]
    assert set.union(*shares) == {1, 2, 3, 4}
    alone = run_cpu(suite, "--perf-shard=5/5")  # an extra job is not an error
    alone.stdout.fnmatch_lines(["*4 deselected*"])
    run_cpu(suite, "--perf-shard=1/2", "-k", "nothing", status=pytest.ExitCode.NO_TESTS_COLLECTED)


def test_says_that_the_work_is_the_same(suite: pytest.Pytester) -> None:
    """The report says that the work is the same, even if no launch's times are judged."""

    def measured(case: Case, *args: Any, runs: list[Run]) -> tuple[list[Run], Verdict]:
        args[-1].on_launch(case, 1)
        runs.append(launch(counts(flops={"forward": 100}), case=case))
        return runs, Verdict(outcome="unhealthy", launches=1)

    plugins = [measuring_with(measured)]
    write_cases(suite, batches(1, 2))
    assert "same work" not in str(run_cpu(suite, status=1, plugins=plugins).stdout)
    again = run_cpu(suite, status=1, plugins=plugins)
    again.stdout.fnmatch_lines(["*unhealthy in * s, same work as before*"])
    again.stdout.fnmatch_lines(["same work as before, by exact counts: 2 of 2 cases"])


def test_no_counts_on_request_is_said_once(suite: pytest.Pytester) -> None:
    plugins = [find(suite, "passed", "passed")]
    printed = str(run_cpu(suite, "--perf-no-counts", plugins=plugins).stdout)
    assert printed.count("--perf-no-counts: the work of a step was neither counted nor judged") == 1
    assert "not counted" not in printed


@pytest.mark.fault("another session uses the machine")
def test_two_sessions_measure_one_after_the_other(
    suite: pytest.Pytester, request: pytest.FixtureRequest
) -> None:
    held = MachineLock()
    held.take(print)
    request.addfinalizer(held.release)  # otherwise the process's next session waits forever
    run(suite, "--collect-only")
    run_cpu(suite, "--perf-missing-baseline=fail", status=1)  # this launches nothing

    def change(session: Session) -> None:
        session.setup.lock = MachineLock(sleep=lambda seconds: held.release())  # the holder ends meanwhile

    run_cpu(suite, plugins=[OnSession(change)]).stdout.fnmatch_lines(
        [
            f"perfsuite: waiting for another session on this machine: pid {os.getpid()} of *",
            "perfsuite: [[]1/1] fake-* begins",
        ]
    )
    held.take(print)  # the session has released it


def test_a_lock_that_stays_taken_fails_its_cases(suite: pytest.Pytester) -> None:
    write_cases(suite, batches(4, 8))
    with machine_lock(print):
        result = run_cpu(suite, "--perf-wait-lock=1s", status=1)
    result.stdout.fnmatch_lines(["another session is still measuring on this machine after 1 s: pid *"])
    result.stdout.fnmatch_lines(["*2 failed*"])
    result.stdout.no_fnmatch_line("*traceback*")


@pytest.mark.parametrize("on_ci", [False, True])
def test_a_failure_prints_its_text_once(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, on_ci: bool
) -> None:
    """On CI, pytest repeats the whole text in its short summary.

    The text of perfsuite is above this summary.
    """
    monkeypatch.setenv("CI", "true") if on_ci else monkeypatch.delenv("CI", raising=False)
    result = run_cpu(suite, "--perf-missing-baseline=fail", status=1)
    above, summary = str(result.stdout).split("short test summary info")
    assert above.count("no_baseline: no baseline on") + above.count("  no baseline on") == 1
    assert summary.count("no baseline on") <= 1
    write_cases(suite, "[FAKE.replace(framework=Script(path='none.py'))]")
    result = run_cpu(suite, status=1)
    above, summary = str(result.stdout).split("short test summary info")
    assert above.count("No such file or directory") == 1
    assert summary.count("No such file or directory") <= 1
    result.stdout.no_fnmatch_line("*During handling of the above exception*")
    result.stdout.fnmatch_lines(["path='none.py': No such file or directory in *"])  # without a traceback


@pytest.mark.fault("anything else fails in pytest's process")
def test_every_report_has_an_unexpected_error(suite: pytest.Pytester) -> None:
    """One error occurs before the launch, and one in it. A third case is measured."""
    nothing: dict[str, Any] = {}

    def measured(case: Case, *args: Any, **options: Any) -> Any:
        return measure(case, *args, **options) if case.micro_batch != 2 else nothing["in a launch"]

    class BrokenHost(Host):
        def why_not(self, case: Case) -> str | None:
            return super().why_not(case) if case.micro_batch != 3 else nothing["before"]

    def change(session: Session) -> None:
        session.setup.host = BrokenHost()

    plugins = [measuring_with(measured), OnSession(change)]
    write_cases(suite, batches(2, 3, 4))
    options = (*FILES[1:], "--perf-record-launches=1")
    result = run(suite, *options, status=1, plugins=plugins)
    results = read_json(suite)["results"]
    outcomes = [
        (result_of_case["outcome"], result_of_case["verdict"]["failure"]) for result_of_case in results
    ]
    assert outcomes == [("failed", "error"), ("failed", "error"), ("recorded", None)]
    for case_result, words in zip(results, ("in a launch", "before"), strict=False):
        assert f"KeyError: '{words}' (its traceback: " in case_result["verdict"]["reasons"][0]
        (traceback,) = suite.path.glob(f".perfsuite/runs/*/{case_result['case_id']}/traceback.txt")
        assert f'nothing["{words}"]' in traceback.read_text()
        assert all(case_result["case_id"] in text for text in read_report(suite))
        result.stdout.fnmatch_lines([f"{case_result['case_id']} *failed"])


@pytest.mark.launch
@pytest.mark.fault("Ctrl-C")
def test_ctrl_c_keeps_results_and_leaves_nothing(suite: pytest.Pytester) -> None:
    """The second case hangs, and is then interrupted."""
    write_cases(suite, batches(4, 8))
    suite.makeconftest("""
        import os, signal, threading, time
        from dataclasses import replace
        from pathlib import Path
        from perfsuite.measure import measure
        from perfsuite.plugin.collection import SESSION

        def measure_or_hang(case, *args, **options):
            *others, how = args
            fault = "hang" if case.micro_batch == 8 else None
            return measure(case, *others, replace(how, inject=fault), **options)

        def interrupt():
            while not list(Path(".perfsuite").glob("runs/*/fake-*b8*/launch-1/rank-1.log")):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        def pytest_sessionstart(session):
            session.config.stash[SESSION].mode.measure = measure_or_hang
            threading.Thread(target=interrupt, daemon=True).start()
    """)
    result = suite.runpytest_subprocess("-W", "error", "--perf-record-launches=1", *FILES[1:])
    assert result.ret == pytest.ExitCode.INTERRUPTED
    content = read_json(suite)
    assert content["status"] == "interrupted"
    assert [r["outcome"] for r in content["results"]] == ["recorded"]
    assert content["interrupted_case"] == "fake-llama-tiny-s64-b8-fp32-1x2"
    for text in read_report(suite):
        assert "fake-llama-tiny-s64-b8-fp32-1x2 was not judged" in text
    result.stdout.fnmatch_lines(["*fake-llama-tiny-s64-b4*recorded*"])
    assert not [p for p in psutil.process_iter() if str(suite.path) in " ".join(arguments(p))]


@pytest.mark.parametrize("launches", [0, 1])
def test_ctrl_c_keeps_launches_of_the_first_case(suite: pytest.Pytester, launches: int) -> None:
    plugins = [launching_with(EndsAfter(launches, KeyboardInterrupt()))]
    result = suite.runpytest_inprocess("-m", "cpu", no_reraise_ctrlc=True, plugins=plugins)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines([f"*perfsuite: nothing was {'judged' if launches else 'measured'} ==*"])
    (file,) = suite.path.glob(".perfsuite/runs/*/results.json")
    content = json.loads(file.read_text())
    assert (content["status"], content["results"]) == ("interrupted", [])
    assert (content["interrupted_case"], len(content["interrupted_launches"])) == (ID, launches)


def test_a_known_issue_is_still_there_or_gone(suite: pytest.Pytester) -> None:
    issue = {"url": "https://example.org/209", "failure": "crash"}
    write_cases(suite, f"[FAKE.replace(known_issue={issue})]")
    recorded = run_cpu(suite)
    recorded.stdout.fnmatch_lines(["*known issue gone: https://example.org/209. Remove known_issue from*"])
    crashing = run_cpu(suite, "-rx", "--perf-inject", "crash", "--perf-json=out.json")
    crashing.stdout.fnmatch_lines(["*XFAIL*known issue: crash: RuntimeError: injected crash*", "*1 xfailed*"])
    assert read_json(suite)["results"][0]["excused"] == "known issue"


def test_shows_waived_regressions_everywhere(recorded: pytest.Pytester) -> None:
    waivers = recorded.path / "perf-waivers.toml"
    waivers.write_text(waiver(tolerated="40%", metric="tokens*"))
    slow = run_cpu(recorded, "-rx", "--perf-inject", "slowdown=30%", *FILES)
    sentence = "waived: tokens/s -2*%: 40% tolerated until 2999-12-31, owner @me, issue https://example.org/1"
    slow.stdout.fnmatch_lines([f"*{ID}: {sentence}*", "*XFAIL*waived: *", "*1 xfailed*"])
    (result,) = read_json(recorded)["results"]
    assert (result["outcome"], result["excused"]) == ("regressed", "waived")
    (skipped,) = read_junit(recorded).iter("skipped")
    assert "40% tolerated until 2999-12-31, owner @me" in str(skipped.get("message"))
    page, summary = read_report(recorded)
    assert "<h1>1 waived" in page
    assert "40% tolerated until 2999-12-31, owner @me, issue https://example.org/1" in page
    assert summary.startswith("## perfsuite: 1 waived")
    assert "40% tolerated until 2999-12-31, owner &#64;me, issue https://example.org/1" in summary

    waivers.write_text(waiver(tolerated="10%", metric="tokens*") + waiver(tolerated="10%", case="fsdp-*"))
    beyond = run_cpu(recorded, "--perf-inject", "slowdown=30%", "--perf-report=out", status=1)
    beyond.stdout.fnmatch_lines(
        [
            "note: perf-waivers.toml: *fsdp-?* matches none of the 2 cases here",
            "*not waived: tokens/s -2*%: beyond the waiver of tokens* for fake-*: 10%*",
        ]
    )
    assert "not waived: tokens/s" in read_report(recorded)[1]
    waivers.write_text("[[waiver]]")
    bad = run_cpu(recorded, status=pytest.ExitCode.USAGE_ERROR)
    bad.stderr.fnmatch_lines(["ERROR: *perf-waivers.toml: required, but missing: waiver.0.case, *"])


def test_shadow_mode_says_what_would_have_failed(recorded: pytest.Pytester) -> None:
    recorded.makeini("[pytest]\nperf_shadow = true")
    run_cpu(recorded, "-rx", "--perf-inject", "slowdown=30%", *FILES).stdout.fnmatch_lines(
        [
            f"*{ID}*regressed (shadow)*",
            f"*{ID}: regressed (shadow) after*",
            "--perf-shadow: 1 of 1 case would have failed",
            "XFAIL * regressed (shadow): tokens/s -2*",
            "*1 xfailed*",
        ]
    )
    session = read_json(recorded)
    (result,) = session["results"]
    assert (result["outcome"], result["excused"], result["shadow"]) == ("regressed", None, True)
    assert session["conditions"]["options"]["--perf-shadow"] == "yes"
    case = read_junit(recorded)
    assert case.find("failure") is None
    (skipped,) = case.iter("skipped")
    assert str(skipped.get("message")).startswith("regressed (shadow)")
    page, summary = read_report(recorded)
    assert "<h1>1 regressed (1 shadow" in page
    assert "regressed (shadow)" in summary


def test_shadow_mode_fails_only_wrong_tests(suite: pytest.Pytester) -> None:
    def shadow(said: str, *options: str, would: int = 1, plugins: Sequence[object] = ()) -> None:
        result = run_cpu(suite, "-rx", "--perf-shadow", *options, plugins=plugins)
        result.stdout.fnmatch_lines([said])
        result.stdout.fnmatch_lines([f"--perf-shadow: {would} of 1 case would have failed"])

    shadow("XFAIL * failed (shadow): no baseline*", "--perf-missing-baseline=fail")
    shadow("*perfsuite: too few*", "--perf-min-judged=100%", would=0)  # this records the baseline
    shadow("XFAIL * failed (shadow): crash*", "--perf-inject=crash")
    for error, said in ((MachineError("no machine"), "no machine"), (ValueError("bug"), "ValueError: bug*")):
        plugins = [measuring_with(Mock(side_effect=error))]
        shadow(f"XFAIL * failed (shadow): {said}", plugins=plugins)
    write_cases(suite, body="assert not case")
    run_cpu(suite, "--perf-shadow", status=1).stdout.fnmatch_lines(["*1 failed*"])


@pytest.mark.smoke
def test_other_repository_needs_only_the_package(tmp_path: Path) -> None:
    """In a new interpreter and a directory without a conftest, the fixture comes from the entry point."""
    (tmp_path / "test_theirs.py").write_text(
        "import perfsuite, pytest\n"
        "CASE = perfsuite.Case(model='gpt2-tiny', framework='fake', sequence_length=32, micro_batch=1,\n"
        "    topology={'processes_per_node': 1}, hardware='cpu')\n"
        "@pytest.mark.parametrize('case', [CASE, CASE.replace(micro_batch=2)])\n"
        "def test_theirs(bench, case):\n"
        "    assert bench(case).verdict.outcome == 'recorded'\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    command = ["-m", "pytest", "-m", "cpu", "-q", "-p", "no:cacheprovider", "--perf-record-launches=1"]
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 recorded" in done.stdout


SIDE_BY_SIDE = ("--perf-dry", "-m", "cpu", "-n", "1", "--benchmark-disable", "--perf-json", "out.json")


@pytest.mark.launch
def test_dry_runs_may_run_side_by_side(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    suite.makepyfile(test_cases=CASES.replace("Fake()", "DDP()"), conftest=FAKE_DRY_RUNS)
    result = suite.runpytest_subprocess(*SIDE_BY_SIDE, "--perf-interconnect=8xib400")
    assert result.ret == 0, result.outlines
    result.stdout.fnmatch_lines(["*ddp-llama-tiny-s64-b4-fp32-1x2*recorded*", "*1 recorded*"])
    (case,) = read_json(suite)["results"]
    assert case["runs"][0]["counts"][0]["ranks"] == [0]
    assert case["runs"][0]["machine"]["interconnect"] == "8xib400"


@pytest.mark.launch
def test_empty_parallel_dry_runs_fail(suite: pytest.Pytester) -> None:
    result = suite.runpytest_subprocess(*SIDE_BY_SIDE)
    assert result.ret == 1, result.outlines
    assert len(read_json(suite)["skipped"]) == 1
