"""Test the sentence about a change that all cases of a session have in common."""

from collections.abc import Sequence
from typing import Any

import pytest

from perfsuite.report import markdown
from perfsuite.report.common_change import NOTHING, sentences
from perfsuite.report.html import page
from perfsuite.results.outcome import BY_THE_MACHINE, Verdict
from perfsuite.results.session_file import Measurement
from tests.samples import make_result, make_session_file, metric_check, now

MOVES = (-0.048, -0.05, -0.049, -0.051, -0.05)
TORCH = "torch: 2.13.0 -> 2.14.0"


def case(name: str, change: float, **changes: Any) -> Measurement:
    """Return a case whose tokens/s changed by the share `change`, with an interval of +- 1%."""
    outcome = "regressed" if change < -0.03 else "improved" if change > 0.03 else "passed"
    check = metric_check(outcome=outcome, change=change, interval=(change - 0.01, change + 0.01))
    check = check.replace(**{key: changes.pop(key) for key in ("note", "outcome") if key in changes})
    verdict = Verdict(outcome=check.outcome, launches=3, checks=(check,), **changes)
    return make_result(now()).replace(verdict=verdict, case_id=name)


def night(moves: Sequence[float] = MOVES, **changes: Any) -> list[Measurement]:
    """Return cases with these changes."""
    return [case(f"case{number}", change, **changes) for number, change in enumerate(moves)]


def test_slower_cases_are_one_finding() -> None:
    [sentence] = sentences(night())
    assert sentence.startswith(
        "5 of 5 cases are slower by about the same amount: tokens/s -5.0% (99% interval -5."
    )
    assert "The cases changed together, so look for one cause." in sentence
    assert sentence.endswith(f"{NOTHING}.")


def test_faster_cases_are_one_finding() -> None:
    [sentence] = sentences(night([-move for move in MOVES]))
    assert sentence.startswith("5 of 5 cases are faster by about the same amount: tokens/s +5.0%")


def test_names_what_changed_in_all_cases() -> None:
    results = [
        *night(MOVES[1:], changed=(TORCH, "NCCL_ALGO: Ring -> Tree")),
        case("x", -0.05, changed=(TORCH,)),
    ]
    [sentence] = sentences(results)
    assert sentence.endswith(f"Changed in all of them: {TORCH}.")


def test_names_a_case_that_differs() -> None:
    [sentence] = sentences([*night(), case("far", -0.3)])
    assert sentence.startswith("5 of 6 cases")
    assert sentence.endswith("Different from these: far (-30.0%).")


def test_unchanged_code_on_a_slow_machine_is_one_finding() -> None:
    [sentence] = sentences(night(outcome="inconclusive", note=BY_THE_MACHINE))
    assert "5 of 5 cases are slower" in sentence


@pytest.mark.parametrize(
    "results",
    [
        pytest.param(night([-0.01, -0.012, -0.011, -0.01]), id="no case changed on its own"),
        pytest.param(night([-0.05, 0.05, 0.0, -0.05, 0.04]), id="cases move in both directions"),
        pytest.param(night(MOVES[:3]), id="too few cases"),
        pytest.param(night(against="arm A"), id="arms are launched alternately"),
        pytest.param([make_result(now(), before=None)] * 5, id="no baselines"),
    ],
)
def test_other_sessions_have_no_sentence(results: list[Measurement]) -> None:
    assert sentences(results) == []


def test_each_hardware_class_has_its_own_sentence() -> None:
    there = [result.replace(case_id=f"{result.case_id}-b") for result in night([0.0, 0.001, -0.001, 0.002])]
    machine = there[0].runs[0].machine.replace(hardware_class="other")
    there = [result.replace(runs=(result.runs[0].replace(machine=machine),)) for result in there]
    [sentence] = sentences([*there, *night()])
    assert sentence.startswith("5 of 5 cases are slower")


@pytest.mark.parametrize("report", [page, markdown], ids=["HTML", "Markdown"])
def test_reports_show_the_sentence(report: Any) -> None:
    session = make_session_file(*night())
    assert "5 of 5 cases are slower by about the same amount" in report.render([session])
