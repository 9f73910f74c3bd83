from __future__ import annotations

import pytest

from perfsuite.plugin.options import options
from tests.suite import run_cpu


@pytest.mark.parametrize("given", [(), ("--perf-no-preflight",)])
def test_nodes_are_looked_at_unless_told_otherwise(pytester: pytest.Pytester, given: tuple[str, ...]) -> None:
    assert options(pytester.parseconfigure(*given)).preflight is not bool(given)


@pytest.mark.launch
def test_bad_options_are_usage_errors(suite: pytest.Pytester) -> None:
    result = run_cpu(suite, "--perf-inject", "slow")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'slow': give slowdown=P%*"])
    result = run_cpu(suite, "--perf-wait-quiet=soon")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--perf-wait-quiet=soon: give a whole number, 0 or more*"])


@pytest.mark.launch
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["--perf-against=.", "--perf-dry"],
            "--perf-against=. with --perf-dry: two arms",
        ),
        (["--perf-against=.", "--perf-resume"], "--perf-against=. with --perf-resume: two arms"),
        (["--perf-against=nosuch"], "--perf-against 'nosuch': 'nosuch' is no commit of"),
        (["--perf-max-pairs=5"], "--perf-max-pairs is for --perf-against: add that, or leave it out"),
        (["--perf-against=.", "--perf-max-pairs=2"], "--perf-max-pairs=2: give a whole number from 5 to 12"),
        (["--perf-against=.", "--perf-max-pairs=x"], "--perf-max-pairs=x: give a whole number from 5 to 12"),
    ],
)
def test_what_a_comparison_of_arms_cannot_have_is_a_usage_error(
    suite: pytest.Pytester, given: list[str], words: str
) -> None:
    result = run_cpu(suite, *given)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{words}*"])


@pytest.mark.parametrize(
    ("given", "explain"), [((), False), (("--perf-explain",), True), (("-o", "perf_explain=true"), True)]
)
def test_a_profile_is_taken_where_it_is_asked_for(
    pytester: pytest.Pytester, given: tuple[str, ...], explain: bool
) -> None:
    assert options(pytester.parseconfigure(*given)).explain is explain
