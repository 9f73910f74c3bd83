from __future__ import annotations

import pytest

from perfsuite.plugin_options import options
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
