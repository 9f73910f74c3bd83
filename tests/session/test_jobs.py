from fnmatch import fnmatch

import pytest

from perfsuite.session.jobs import refused, run


def test_run_returns_the_status_and_says_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("nosuch_module", "-x") == 1
    assert "$ nosuch_module -x" in capfd.readouterr().err


@pytest.mark.launch
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), None),
        (("-m", "h100"), "pytest selects no case: bench_cases -m h100"),
        pytest.param(("--perf-shard=9/9",), None, marks=pytest.mark.nightly),
        (
            ("--perf-min-launches=x",),
            "pytest cannot collect the cases: ERROR: --perf-min-launches=x: give a whole*",
        ),
        pytest.param(("-n", "2"), None, marks=pytest.mark.nightly),
    ],
)
def test_what_pytest_would_say_is_known(
    suite: pytest.Pytester, arguments: tuple[str, ...], said: str | None
) -> None:
    suite.mkdir("bench_cases")
    (suite.path / "test_cases.py").rename(suite.path / "bench_cases" / "test_cases.py")
    refusal = refused("bench_cases", *arguments)
    assert refusal == said if said is None else fnmatch(str(refusal), said)


@pytest.mark.launch
def test_a_file_that_cannot_be_imported_is_said(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_cases="import nosuch")
    assert "No module named 'nosuch'" in str(refused("."))
