"""Tests that no session passes if a test measured its case badly or not at all."""

from pathlib import Path
from typing import Any

import pytest

from perfsuite.launch.download import Plan
from perfsuite.launch.overlay import Wanted
from tests.suite import (
    CASES,
    FAKE_DRY_RUNS,
    ID,
    batches,
    read_json,
    read_junit,
    read_report,
    run,
    run_cpu,
    write_cases,
)

pytestmark = pytest.mark.usefixtures("simulated")

SLOW = "--perf-inject=slowdown=30%"
FILES = ("--junitxml=j.xml", "--perf-json=out.json", "--perf-report=out")
TRIED = "try: bench(case)\n        except BaseException: pass"
RAISES = "with pytest.raises(BaseException): bench(case)"
SUPPRESSED = "import contextlib\n        with contextlib.suppress(BaseException): bench(case)"
FINALLY = "try: bench(case)\n        finally: return"
SKIPPED = f"{TRIED}\n        pytest.skip('not today')"
XFAILED = f"{TRIED}\n        pytest.xfail('known')"
PASSES = """
    import pytest

    @pytest.hookimpl(wrapper=True{})
    def pytest_runtest_makereport(item):
        report = yield
        report.outcome, report.longrepr = "passed", None
        return report
"""
ENDS_WELL = "def pytest_sessionfinish(session):\n    session.exitstatus = 0\n"


@pytest.mark.parametrize(
    ("body", "ended"),
    [
        (TRIED, "passed"),
        (RAISES, "passed"),
        (SUPPRESSED, "passed"),
        (FINALLY, "passed"),
        (SKIPPED, "skipped"),
        (XFAILED, "xfailed"),
    ],
)
def test_a_body_cannot_swallow_a_verdict(recorded: pytest.Pytester, body: str, ended: str) -> None:
    write_cases(recorded, body=body)
    result = run_cpu(recorded, SLOW, *FILES, "-W", "ignore", status=1)
    result.stdout.fnmatch_lines(
        [
            "*23.0% fewer*",
            "*perfsuite: 1 verdict was swallowed by the test*",
            f"*test_it?{ID}?: regressed, but its test ended as {ended}",
            "*1 regressed*",
        ]
    )
    assert read_json(recorded)["results"][0]["outcome"] == "regressed"
    (failure,) = read_junit(recorded).iter("failure")
    message = {
        "passed": "the test passed",
        "skipped": "the test was skipped",
        "xfailed": "the test failed as expected",
    }[ended]
    assert str(failure.text).startswith(f"{message}, but its verdict is a failure\n")


@pytest.mark.parametrize(
    ("mark", "ended"),
    [("xfail", "xfailed"), ("xfail(strict=True)", "xfailed"), ("xfail(raises=BaseException)", "xfailed")],
)
def test_expected_failure_cannot_hide_a_verdict(recorded: pytest.Pytester, mark: str, ended: str) -> None:
    recorded.makepyfile(
        test_cases=CASES.replace("@pytest.mark.param", f"@pytest.mark.{mark}\n    @pytest.mark.param")
    )
    result = run_cpu(recorded, SLOW, "-x", status=1)
    result.stdout.fnmatch_lines([f"*: regressed, but its test ended as {ended}", "*1 regressed*"])


@pytest.mark.parametrize("conftest", [PASSES.format(""), PASSES.format(", tryfirst=True"), ENDS_WELL])
def test_a_hook_cannot_swallow_a_verdict(recorded: pytest.Pytester, conftest: str) -> None:
    recorded.makeconftest(conftest)
    result = run_cpu(recorded, SLOW, status=1)
    assert ("swallowed" in str(result.stdout)) == (conftest != ENDS_WELL)


def test_maxfail_counts_a_swallowed_verdict(recorded: pytest.Pytester) -> None:
    write_cases(recorded, batches(4, 8), TRIED)
    result = run_cpu(recorded, "--perf-inject=crash", "-x", "--perf-json=out.json", status=1)
    assert len(read_json(recorded)["results"]) == 1
    result.stdout.fnmatch_lines(["*1 failed*"])


def test_swallowed_verdict_has_its_own_error(suite: pytest.Pytester) -> None:
    write_cases(suite, "[FAKE.replace(framework=Script(path='none.py'))]", TRIED)
    result = run_cpu(suite, status=1)
    result.stdout.fnmatch_lines(["*No such file or directory*", "*: failed, but its test ended as passed"])


def test_shadow_mode_and_waivers_still_excuse(recorded: pytest.Pytester) -> None:
    write_cases(recorded, body=TRIED)
    result = run_cpu(recorded, SLOW, "--perf-shadow")
    result.stdout.no_fnmatch_line("*swallowed*")


BY_CASE = "if case.micro_batch == 4: bench(case); return\n        {}"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "pytest.xfail('no')",
            "its test expected a failure: no. Declare the failure in the case (known_issue), or waive it",
        ),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("pytest.fail('no')", "no"),
        ("pass", "the test uses bench but never called it, so nothing was measured"),
        (
            "try: bench(FAKE)\n        except BaseException: pass",
            "bench measures the case that is the test's par*",
        ),
    ],
)
def test_test_without_a_verdict_fails_everywhere(suite: pytest.Pytester, body: str, why: str) -> None:
    write_cases(suite, batches(4, 8), BY_CASE.format(body))
    run_cpu(suite, *FILES[1:], "--perf-record-launches=1", "-W", "ignore", status=1)
    first, unmeasured = read_json(suite)["results"]
    assert first["outcome"] == "recorded"
    assert (unmeasured["outcome"], unmeasured["verdict"]["failure"]) == ("failed", "error")
    (reason,) = unmeasured["verdict"]["reasons"]
    assert reason.startswith(f"it was not measured: {why.rstrip('*')}")
    assert read_report(suite)[1].startswith("## perfsuite: 1 failed, 1 recorded")


@pytest.mark.parametrize("way", ["body", "mark"])
def test_a_skip_by_the_test_is_not_judged(suite: pytest.Pytester, way: str) -> None:
    if way == "body":
        write_cases(suite, batches(4, 8), BY_CASE.format("pytest.skip('not today')"))
    else:
        skip = "pytest.param(FAKE.replace(micro_batch=8), marks=pytest.mark.skip(reason='not today'))"
        write_cases(suite, f"[FAKE, {skip}]")
    chosen = ("--perf-record-launches=1", *FILES[1:])
    result = run_cpu(suite, *chosen)
    result.stdout.fnmatch_lines(["0 of 2 cases judged"])
    (skipped,) = read_json(suite)["skipped"]
    assert (skipped["reason"], skipped["by_test"], skipped["not_reached"]) == ("not today", True, False)
    assert "1 skipped" in read_report(suite)[1]
    run_cpu(suite, *chosen, "--perf-min-judged=60%", status=1)


@pytest.fixture
def skipping(suite: pytest.Pytester) -> pytest.Pytester:
    """Return a suite with one case, and a file of cases that lacks a package."""
    write_cases(suite, "[FAKE]")
    gone = 'import pytest\n\npytest.importorskip("nosuch")\n\n\ndef test_it(bench, case): bench(case)\n'
    suite.makepyfile(test_gone=gone)
    suite.makepyfile(test_other='import pytest\n\npytest.skip("not a case", allow_module_level=True)\n')
    return suite


def test_lists_a_file_of_cases_that_skips_itself(skipping: pytest.Pytester) -> None:
    result = run_cpu(skipping, "--perf-record-launches=1", *FILES[1:])
    result.stdout.fnmatch_lines(
        ["*perfsuite: 1 file of cases skipped at import*", "  test_gone.py: could not import 'nosuch': *"]
    )
    (skipped,) = read_json(skipping)["skipped"]
    assert (skipped["case_id"], skipped["by_test"]) == ("test_gone.py", True)
    assert "1 skipped" in read_report(skipping)[1]


def test_a_file_that_skips_itself_is_not_judged(recorded: pytest.Pytester) -> None:
    run_cpu(recorded, "--perf-min-judged=100%")
    recorded.makepyfile(test_gone='import pytest\npytest.importorskip("nosuch")\ndef test_it(bench): ...\n')
    result = run_cpu(recorded, "--perf-min-judged=100%", status=1)
    result.stdout.fnmatch_lines(["1 of 2 cases judged, but --perf-min-judged requires 100%: not a pass"])


def test_a_skip_of_a_reviewed_case_fails(suite: pytest.Pytester) -> None:
    run_cpu(suite, "--perf-record-launches=1", "--perf-json=out.json")
    folder = suite.mkdir("baselines") / read_json(suite)["machine"]["hardware_class"]
    folder.mkdir()
    (folder / f"{ID}.json").write_text("{}")
    write_cases(
        suite,
        batches(4, 8),
        BY_CASE.format("bench(case)").replace("bench(case); return", "pytest.skip('no')"),
    )
    result = run_cpu(suite, "--perf-missing-baseline=fail", "--perf-json=out.json", status=1)
    result.stdout.fnmatch_lines(
        ["*it was not measured: the test skipped the case (no), but the case has a reviewed baseline*"]
    )
    (reason,) = read_json(suite)["results"][0]["verdict"]["reasons"]
    assert reason.endswith(f"{ID}.json) and --perf-missing-baseline=fail is set")


def test_a_replaced_bench_measures_nothing(suite: pytest.Pytester) -> None:
    replaced = (
        CASES
        + """
    @pytest.fixture
    def bench():
        return lambda case: None
"""
    )
    suite.makepyfile(test_cases=replaced)
    result = run_cpu(suite, "--perf-json=out.json", status=1)
    result.stdout.fnmatch_lines(["*the test passed without measuring its case*"])
    assert len(read_json(suite)["results"]) == 1


@pytest.mark.parametrize("kept", [1, 0])
def test_tests_that_a_hook_removes_late_are_missed(suite: pytest.Pytester, kept: int) -> None:
    write_cases(suite, batches(4, 8, 16))
    suite.makeconftest(
        "import pytest\n\n@pytest.hookimpl(tryfirst=True)\ndef pytest_runtestloop(session):\n"
        f"    session.items[:] = session.items[:{kept}]\n"
    )
    status = pytest.ExitCode.INTERRUPTED if kept else pytest.ExitCode.TESTS_FAILED
    run_cpu(suite, "--perf-record-launches=1", "--perf-json=out.json", status=status)
    content = read_json(suite)
    assert (content["status"], len(content["results"])) == ("interrupted", kept)


def test_an_end_of_pytest_in_a_test_is_no_pass(suite: pytest.Pytester) -> None:
    write_cases(suite, batches(4, 8), BY_CASE.format("pytest.exit('enough', returncode=0)"))
    result = run_cpu(
        suite, "--perf-record-launches=1", "--perf-json=out.json", status=pytest.ExitCode.INTERRUPTED
    )
    result.stdout.fnmatch_lines(["*perfsuite: not every case was run*"])
    assert read_json(suite)["status"] == "interrupted"


def test_a_test_that_is_not_run_at_all_is_no_pass(suite: pytest.Pytester) -> None:
    write_cases(suite, batches(4, 8))
    suite.makeconftest("""
        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_protocol(item):
            return True if "b8" in item.nodeid else None
    """)
    run_cpu(suite, "--perf-record-launches=1", status=pytest.ExitCode.INTERRUPTED)


def test_only_verdicts_on_code_count_as_judged(recorded: pytest.Pytester) -> None:
    write_cases(recorded, "[FAKE, FAKE.replace(framework=Script(path='none.py'))]")
    run_cpu(recorded, status=1).stdout.fnmatch_lines(["1 of 2 cases judged"])


SIDE_BY_SIDE = ("--perf-dry", "-m", "cpu", "-n", "1", "--benchmark-disable", "--perf-json=out.json")


@pytest.fixture
def dry_suite(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return a suite with a case whose dry run is fake, also in processes of pytest-xdist."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    suite.makepyfile(test_cases=CASES.replace("Fake()", "DDP()"), conftest=FAKE_DRY_RUNS)
    return suite


@pytest.mark.nightly
def test_processes_of_xdist_swallow_no_verdict(dry_suite: pytest.Pytester) -> None:
    dry_suite.makepyfile(test_cases=CASES.replace("Fake()", "DDP()").replace("bench(case)", TRIED))
    result = dry_suite.runpytest_subprocess(*SIDE_BY_SIDE, "--perf-missing-baseline=fail")
    assert result.ret == 1, result.outlines
    result.stdout.fnmatch_lines(["*: failed, but its test ended as passed", "*1 failed*"])
    (kept,) = read_json(dry_suite)["results"]
    assert kept["verdict"]["failure"] == "no_baseline"


@pytest.mark.nightly
def test_what_processes_of_xdist_refuse_is_said(dry_suite: pytest.Pytester) -> None:
    dry_suite.makepyfile(test_cases=CASES.replace("bench, case", "case"))
    result = dry_suite.runpytest_subprocess(*SIDE_BY_SIDE)
    assert result.ret == pytest.ExitCode.USAGE_ERROR, result.outlines
    result.stdout.fnmatch_lines(["ERROR: test_cases.py::test_it* has a case among its parameters (*"])


@pytest.mark.launch
def test_dead_xdist_process_interrupts_a_run(dry_suite: pytest.Pytester) -> None:
    body = BY_CASE.format("import os; os._exit(0)")
    cases = CASES.replace("Fake()", "DDP()").replace("[FAKE, A100]", batches(4, 8))
    dry_suite.makepyfile(test_cases=cases.replace("bench(case)", body))
    result = dry_suite.runpytest_subprocess(*SIDE_BY_SIDE, "--max-worker-restart=0")
    assert result.ret != 0
    assert read_json(dry_suite)["status"] == "interrupted"


@pytest.mark.parametrize("option", ["--setup-plan", "--setup-only"])
def test_showing_fixtures_measures_nothing(suite: pytest.Pytester, option: str) -> None:
    result = run(suite, option, "-m", "cpu", "--perf-missing-baseline=fail")
    result.stdout.fnmatch_lines(["*SETUP    F bench*"])
    result.stdout.no_fnmatch_line("*nothing was measured*")
    assert not (suite.path / ".perfsuite").exists()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Replace pip, and return the list of what is installed for arms."""
    asked: list[Any] = []

    def release(wanted: Wanted, *_: Any) -> Path:
        asked.append([*wanted.releases])
        return tmp_path

    monkeypatch.setattr("perfsuite.launch.arm.release", release)
    monkeypatch.setattr("perfsuite.launch.arm.plan", lambda *_: Plan(changes=()))
    return asked


def test_installs_nothing_before_collecting_cases(suite: pytest.Pytester, installed: list[Any]) -> None:
    suite.makepyfile(test_cases="raise LookupError('a name')")

    run(suite, "-m", "cpu", "--perf-against=torch==9.9", status=pytest.ExitCode.INTERRUPTED)

    assert installed == []


def test_installs_nothing_for_an_arm_without_case(suite: pytest.Pytester, installed: list[Any]) -> None:
    run_cpu(suite, "--perf-against=torch==9.9", "-k", "nothing", status=pytest.ExitCode.NO_TESTS_COLLECTED)

    assert installed == []


def test_installs_an_arms_packages_once(suite: pytest.Pytester, installed: list[Any]) -> None:
    run_cpu(suite, "--perf-against=torch==9.9", "--perf-json=out.json")

    assert installed == [["torch==9.9"]]
    assert [arm["text"] for arm in read_json(suite)["arms"]] == ["torch==9.9", "."]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def test_it(bench, case):", "def test_it(case):", "has a case among its parameters"),
        ("[FAKE, A100]", "[[FAKE], [A100]]", "is nested inside a parameter"),
    ],
)
def test_refuses_a_test_without_a_case(suite: pytest.Pytester, old: str, new: str, said: str) -> None:
    suite.makepyfile(test_cases=CASES.replace(old, new).replace("bench(case)", "pass"))

    result = run(suite, "-m", "cpu", status=pytest.ExitCode.USAGE_ERROR)

    result.stderr.fnmatch_lines([f"ERROR: test_cases.py::test_it*{said}*"])


def test_no_bench_marks_unmeasured_tests(suite: pytest.Pytester) -> None:
    marked = CASES.replace("def test_it(bench, case):", "@pytest.mark.no_bench\n    def test_it(case):")
    suite.makepyfile(test_cases=marked.replace("bench(case)", "pass"))

    run(suite, "-m", "cpu or a100")
