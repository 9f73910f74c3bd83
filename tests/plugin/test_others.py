"""Tests that other people's installed plugins do not harm cases, and still work for other tests."""

import pytest

from perfsuite.launch import lock
from tests.suite import CASES, ID, read_json, run, run_cpu, write_cases

pytestmark = pytest.mark.usefixtures("simulated")

SLOW = "--perf-inject=slowdown=30%"
SLEEPS = "import time; time.sleep(0.4); bench(case)"
OTHER_SLEEPS = """
    import time

    def test_other():
        time.sleep(0.4)
"""


@pytest.mark.parametrize(
    "way", ["--timeout=0.1", "-otimeout=0.1", "mark", "-otimeout_func_only=true", "thread"]
)
def test_pytest_timeout_leaves_cases_alone(suite: pytest.Pytester, way: str) -> None:
    write_cases(suite, body=SLEEPS)
    given: tuple[str, ...] = (way,) if way.startswith("-") else ()
    if way == "mark":
        mark = "@pytest.mark.timeout(0.1)\n    @pytest.mark.param"
        suite.makepyfile(test_cases=CASES.replace("bench(case)", SLEEPS).replace("@pytest.mark.param", mark))
    elif way == "thread":
        given = ("--timeout=0.1", "--timeout-method=thread")
    elif "func_only" in way:
        given = (way, "--timeout=0.1")
    run_cpu(suite, *given, "--perf-record-launches=1").stdout.fnmatch_lines(["*1 recorded*"])


def test_pytest_timeout_spares_lock_waits(suite: pytest.Pytester) -> None:
    with lock.machine_lock(print):
        result = run_cpu(suite, "--timeout=0.1", "--perf-wait-lock=1s", status=1)
    result.stdout.fnmatch_lines(["another session is still measuring on this machine*"])
    result.stdout.no_fnmatch_line("*Timeout*")


def test_pytest_timeout_still_ends_other_tests(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_others=OTHER_SLEEPS)
    result = run(suite, "--timeout=0.1", "--perf-record-launches=1", status=1)
    result.stdout.fnmatch_lines(["*Timeout (>0.1s) from pytest-timeout*", "*1 failed*1 recorded*"])


def test_a_session_timeout_is_no_complete_session(suite: pytest.Pytester) -> None:
    write_cases(suite, "[FAKE, FAKE.replace(micro_batch=8)]", SLEEPS)
    given = ("--session-timeout=0.1", "--perf-record-launches=1", "--perf-json=out.json")
    run_cpu(suite, *given, status=1).stdout.fnmatch_lines(["*session-timeout: 0.1 sec exceeded*"])
    content = read_json(suite)
    assert (content["status"], len(content["results"])) == ("interrupted", 1)


@pytest.mark.parametrize("way", ["--reruns=2", "--force-reruns=2", "-oreruns=2", "mark", "append"])
def test_pytest_rerunfailures_reruns_no_case(recorded: pytest.Pytester, way: str) -> None:
    given: tuple[str, ...] = (way,) if way.startswith("-") else ()
    if way in ("mark", "append"):
        mark = "@pytest.mark.flaky(reruns=2)\n    @pytest.mark.param"
        recorded.makepyfile(test_cases=CASES.replace("@pytest.mark.param", mark))
        given = ("--reruns=1", "--reruns-mode=append") if way == "append" else ()
    result = run_cpu(recorded, *given, SLOW, "--perf-json=out.json", status=1)
    result.stdout.fnmatch_lines(["*1 regressed*"])
    assert result.parseoutcomes() == {"regressed": 1, "deselected": 1}
    assert len(read_json(recorded)["results"]) == 1


def test_pytest_rerunfailures_reruns_other_tests(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_others="def test_other():\n    assert False\n")
    result = run(suite, "--reruns=2", "--perf-record-launches=1", status=1)
    assert result.parseoutcomes()["rerun"] == 2


def test_repeating_plugin_measures_no_case_twice(suite: pytest.Pytester) -> None:
    """Like pytest-repeat, the plugin adds a parameter."""
    suite.makeconftest("""
        def pytest_generate_tests(metafunc):
            metafunc.fixturenames.append("number")
            metafunc.parametrize("number", range(2))
    """)
    result = run(suite, status=pytest.ExitCode.USAGE_ERROR)
    result.stderr.fnmatch_lines(
        [
            f"ERROR: *measure the same case, {ID}, *To launch each case at least N times, "
            "do not repeat its test, but give --perf-min-launches=N"
        ]
    )


def test_looped_test_measures_no_case_twice(recorded: pytest.Pytester) -> None:
    recorded.makeconftest("""
        import pytest

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_pyfunc_call(pyfuncitem):
            try:
                return (yield)
            except BaseException:
                return pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in ("bench", "case")})
    """)
    result = run_cpu(recorded, SLOW, "--perf-json=out.json", status=1)
    result.stdout.fnmatch_lines(["*1 regressed*"])
    assert len(read_json(recorded)["results"]) == 1


@pytest.mark.launch
def test_faulthandlers_timer_ends_no_session(suite: pytest.Pytester) -> None:
    write_cases(suite, body=SLEEPS)
    result = suite.runpytest_subprocess(
        "-m", "cpu", "-o", "faulthandler_timeout=0.1", "--perf-record-launches=1", "-s"
    )
    assert result.ret == 0
    assert "Timeout (0:00:00.1" not in str(result.stderr)
