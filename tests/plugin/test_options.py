from __future__ import annotations

import pytest

from tests.suite import run_cpu

pytestmark = pytest.mark.launch


def test_bad_options_are_usage_errors(suite: pytest.Pytester) -> None:
    result = run_cpu(suite, "--perf-inject", "slow")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'slow': give slowdown=P%*"])
    result = run_cpu(suite, "--perf-wait-quiet=soon")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--perf-wait-quiet=soon: give a whole number, 0 or more*"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--perf-against=.", "--perf-dry"],
            "--perf-against=. with --perf-dry: two arms",
        ),
        (["--perf-against=.", "--perf-resume"], "--perf-against=. with --perf-resume: two arms"),
        (["--perf-against=nosuch"], "--perf-against 'nosuch': 'nosuch' is no commit of"),
        (["--perf-max-pairs=5"], "--perf-max-pairs is for --perf-against: add that, or leave it out"),
        (["--perf-against=.", "--perf-max-pairs=2"], "--perf-max-pairs=2: give a whole number from 3 to 12"),
        (["--perf-against=.", "--perf-max-pairs=x"], "--perf-max-pairs=x: give a whole number from 3 to 12"),
    ],
)
def test_what_a_comparison_of_arms_cannot_have_is_a_usage_error(
    suite: pytest.Pytester, options: list[str], words: str
) -> None:
    result = run_cpu(suite, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{words}*"])
