"""Test the sentences about the reference of a session."""

from typing import Any

import pytest

from perfsuite.report import markdown, summary
from perfsuite.report.common_change import sentences
from perfsuite.report.html import page
from perfsuite.report.reference import beside_reference
from perfsuite.report.text import sentence
from perfsuite.results.outcome import AgainstReference, Verdict
from perfsuite.results.session_file import (
    ArmFacts,
    Canary,
    MachineChange,
    Measurement,
    SessionReference,
)
from perfsuite.verdict.common_change import CommonChange
from tests.samples import make_result, make_session_file, metric_check, now

MOVES = (-0.011, -0.012, -0.0105, -0.0115, -0.0108, -0.011)
CLASS = str(make_result(now()).hardware_class)


def case(name: str, change: float, outcome: str = "passed", against: float = 0.0) -> Measurement:
    """Return a case whose tokens/s changed by the share `change`, with an interval of +- 0.3%."""
    check = metric_check(
        outcome=outcome,
        change=change,
        interval=(change - 0.003, change + 0.003),
        against_reference=AgainstReference(change=against, interval=(against - 0.004, against + 0.004)),
    )
    return make_result(now()).replace(
        verdict=Verdict(outcome=check.outcome, launches=3, checks=(check,)), case_id=name
    )


def night(*moves: float) -> list[Measurement]:
    """Return cases with these changes."""
    return [case(f"case{number}", change) for number, change in enumerate(moves or MOVES)]


def reference(change: float = -0.010, half: float = 0.003, **changes: Any) -> SessionReference:
    """Return a reference that changed by the share `change`, with an interval of +- `half`."""
    machine = MachineChange(
        metric="tokens_per_s",
        hardware_class=CLASS,
        change=change,
        interval=(change - half, change + half),
        case_sigma=0.002,
        canaries=("a", "b", "c", "d", "e"),
    )
    arm = ArmFacts(text="v1:uv.lock", facts={"commit": "0123abcd0123"})
    return SessionReference(**{"arm": arm, "changes": (machine,), **changes})


def test_cases_and_reference_that_move_together_are_the_machine() -> None:
    [said] = sentences(night(), reference())
    assert said == (
        "6 of 6 cases are 1.1% slower tonight, and so is the reference (1.0%, 0.7 to 1.3): the machine, not "
        "the code."
    )


def test_cases_that_move_without_the_reference_are_one_finding() -> None:
    [said] = sentences(night(), reference(change=0.0, half=0.002))
    assert said.startswith("6 of 6 cases are 1.1% slower tonight, but the reference is 0.0% faster (0.0%, ")
    assert "so it is not the machine alone. The cases changed together" in said


def test_intervals_that_touch_can_be_different_changes() -> None:
    """The difference, 1.4%, is more than three times its standard error."""
    (machine,) = reference(half=0.008).changes
    names = tuple(f"case{number}" for number in range(18))
    common = CommonChange(estimate=0.0243, error=0.0024, scatter=0.0, cases=names, apart=())
    said = beside_reference(machine, 20, common, "One cause")
    assert said.startswith("18 of 20 cases are 2.4% slower tonight, but the reference is 1.0% slower")
    assert "so it is not the machine alone" in said


def test_an_uncertain_reference_decides_nothing() -> None:
    [said] = sentences(night(), reference(change=-0.005, half=0.02))
    assert "The reference (0.5%, -1.5 to 2.5) does not show whether the machine is the cause" in said


def test_a_slow_reference_is_the_machine_even_if_cases_differ() -> None:
    [said] = sentences(night(-0.03, 0.03, 0.0, -0.02, 0.02, 0.01), reference())
    assert said == "The reference is 1.0% slower tonight (1.0%, 0.7 to 1.3): the machine, not the code."


def test_a_reference_that_did_not_change_is_named() -> None:
    [said] = sentences(night(-0.001, 0.001, 0.0, 0.0005), reference(change=0.001))
    assert said == (
        "The reference is as fast tonight as its baselines, as far as 5 cases can show: tokens/s +0.1% (99% "
        "interval -0.2% to +0.4%)."
    )


def test_a_faster_machine_has_its_own_words() -> None:
    [said] = sentences(night(*(-move for move in MOVES)), reference(change=0.011))
    assert said.startswith("6 of 6 cases are 1.1% faster tonight, and so is the reference (1.1%, 0.8 to 1.4)")


def test_names_a_case_that_is_slower_than_the_reference() -> None:
    results = [*night(), case("llama-fsdp2", -0.034, "regressed", -0.024)]
    assert "llama-fsdp2 is 2.4% slower than tonight's reference." in sentences(results, reference())


def test_names_canaries_that_show_nothing() -> None:
    canary = Canary(case_id="a", baseline_file="a.json", unused="crash: exit code 1")
    said = sentences(night(), reference(canaries=(canary,), problems=("it is unknown how much",)))
    assert said[1:] == [
        "The launches of a with the reference are not used: crash: exit code 1.",
        "Reference: it is unknown how much.",
    ]


def test_names_a_canary_that_changed_alone() -> None:
    moved = reference()
    apart = moved.replace(changes=(moved.changes[0].replace(apart=("f",)),))
    assert sentences(night(), apart)[1].startswith(
        "The launches of f with the reference are left out, because the speed of this case changed"
    )


def test_a_reference_without_a_result_leaves_the_old_sentence() -> None:
    crashed = reference(changes=(), problems=("the reference cannot be launched",))
    moved = [case(f"case{number}", -0.05 + number / 1000, "regressed") for number in range(5)]
    said = sentences(moved, crashed)
    assert said[0].startswith("5 of 5 cases are slower by about the same amount")
    assert said[-1] == "Reference: the reference cannot be launched."


@pytest.mark.parametrize("render", [page.render, markdown.render])
def test_reports_name_the_reference(render: Any) -> None:
    report = render([make_session_file(*night(), reference=reference())])
    assert "and so is the reference (1.0%, 0.7 to 1.3): the machine, not the code" in report
    assert "v1:uv.lock (commit 0123abcd0123)" in report


def test_the_page_says_what_speeds_are_judged_against() -> None:
    judged = page.render([make_session_file(*night(), reference=reference())])
    assert "Speeds are judged relative to tonight&#39;s reference" in judged
    assert "Speeds are judged relative" not in page.render([make_session_file(make_result(now()))])


def test_launches_of_the_reference_count_as_time() -> None:
    run = now().replace(duration_s=600.0)
    canary = Canary(case_id="a", baseline_file="a.json", runs=(run,))
    quick = make_session_file(*night())
    session = quick.replace(reference=reference(canaries=(canary,)))
    assert float(summary.took(session).split()[0]) == pytest.approx(
        float(summary.took(quick).split()[0]) + 10, abs=0.11
    )


def test_a_check_shows_both_changes() -> None:
    check = case("x", -0.034, "regressed", -0.024).verdict.checks[0]
    said = sentence(check)
    assert "3.4% fewer (99% interval -3.7% to -3.1%)" in said
    assert "2.4% fewer than tonight's reference (99% interval -2.8% to -2.0%)" in said
