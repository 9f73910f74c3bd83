from __future__ import annotations

from typing import Any

import pytest

from perfsuite.case.case import KnownIssue
from perfsuite.results import baseline
from perfsuite.results.baseline import Acceptance
from perfsuite.results.outcome import Excuse, Verdict
from perfsuite.verdict.excuse import excuse
from tests.samples import make_case, make_run

ISSUE = {"known_issue": KnownIssue(url="https://example.org/issues/209", failure="timeout")}
SWEPT = {"may_run_out_of_memory": True}
LOCAL = baseline.from_runs([make_run()] * 5)
REVIEWED = LOCAL.replace(accepted=Acceptance(by="somebody", date="2026-01-01", commit=None))


@pytest.mark.parametrize(
    ("changes", "failure", "known", "expected"),
    [
        (ISSUE, "timeout", None, "known issue"),
        (ISSUE, "timeout", LOCAL, "known issue"),
        (ISSUE, "timeout", REVIEWED, None),
        (ISSUE, "crash", None, None),
        (ISSUE, "out_of_memory", None, None),
        (SWEPT, "out_of_memory", None, "out of memory"),
        (SWEPT, "out_of_memory", LOCAL, None),
        (SWEPT, "out_of_memory", REVIEWED, None),
        (SWEPT, "crash", None, None),
        ({**ISSUE, **SWEPT}, "timeout", None, "known issue"),
        ({**ISSUE, **SWEPT}, "out_of_memory", None, "out of memory"),
        ({}, "out_of_memory", None, None),
        ({}, "timeout", None, None),
    ],
)
def test_which_failures_are_no_surprise(
    changes: dict[str, Any], failure: Any, known: baseline.Baseline | None, expected: Excuse | None
) -> None:
    verdict = Verdict(outcome="failed", launches=1, failure=failure)
    assert excuse(make_case(**changes), verdict, known) == expected


def test_memory_that_others_may_have_had_is_no_excuse() -> None:
    verdict = Verdict(outcome="failed", launches=1, failure="out_of_memory")
    assert excuse(make_case(**SWEPT), verdict, None, shared=True) is None
    hang = verdict.replace(failure="timeout")
    assert excuse(make_case(**ISSUE), hang, None, shared=True) == "known issue"


def test_what_did_not_fail_needs_no_excuse() -> None:
    passed = Verdict(outcome="passed", launches=1)
    assert excuse(make_case(**ISSUE, **SWEPT), passed, None) is None
