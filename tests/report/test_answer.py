"""Tests of the three answers that a comparison gives, and of their order."""

import pytest

from perfsuite.report.answer import DOES_MORE, IS_SLOWER, NOT_CHECKED, answer
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.results.outcome import UNCONFIRMED
from perfsuite.results.rank_report import SpanTimes
from perfsuite.results.session_file import Measurement, Skipped
from tests.counted import NOT_COUNTED, make_check, make_counted, make_dry, make_finding
from tests.report.test_slopes import MIB, growing
from tests.samples import ARMS, judged, make_case, make_compared, make_machine, make_session_file

SAME = make_check(make_finding(outcome="passed"), outcome="passed")


def answered(*results: Measurement, **changes: object) -> dict[str, str]:
    return answer(make_session_file(*results, arms=ARMS, **changes))


def test_the_work_of_a_step_comes_before_its_time() -> None:
    assert [*answered(make_compared())] == [DOES_MORE, IS_SLOWER, NOT_CHECKED]


def test_a_session_without_arms_has_no_answer() -> None:
    assert answer(make_session_file(make_compared())) == {}


def test_names_the_cases_whose_step_does_more() -> None:
    more, same = make_dry(), make_dry(SAME).replace(case_id="same")
    assert answered(more, same)[DOES_MORE] == f"yes, in 1 of 2 cases: {more.case_id}"
    assert answered(same)[DOES_MORE] == "no: in 1 case, it does no more than in arm A"


def test_uncounted_work_is_unknown() -> None:
    said = answered(judged(make_dry(), outcome="inconclusive", counts=NOT_COUNTED))
    assert said[DOES_MORE].startswith("unknown for 1 case: ")
    assert "the work of a step in " in said[NOT_CHECKED]


def test_a_timed_comparison_names_growth_that_it_does_not_judge() -> None:
    grown = judged(make_compared(1.0), counts=SAME)
    less = judged(make_compared(1.0), counts=make_check(make_finding(before=2, now=1, outcome="passed")))
    assert answered(grown)[DOES_MORE].startswith("yes, in 1 of 1 case: ")
    assert answered(less)[DOES_MORE] == "no: in 1 case, it does no more than in arm A"


def test_names_the_cases_that_are_slower() -> None:
    slower = make_compared(0.7)
    assert answered(slower)[IS_SLOWER] == f"yes, in 1 of 1 case: {slower.case_id}"
    assert answered(make_compared(1.0))[IS_SLOWER] == "no: 1 case within the tolerances"


def test_says_what_to_do_about_a_disturbed_machine() -> None:
    """The launches were timed, and their counts do not depend on the machine."""
    disturbed = judged(
        make_compared(1.0), outcome="unhealthy", checks=(), counts=SAME, unhealthy_launches=(1,)
    )
    said = answered(disturbed)
    assert said[DOES_MORE].startswith("yes, in 1 of 1 case: ")
    assert said[IS_SLOWER] == (
        f"unknown for 1 case, because launches were set aside as unhealthy: {disturbed.case_id}. Repeat the "
        "comparison on a machine that runs nothing else"
    )
    growing = judged(disturbed, outcome="regressed")
    assert answered(growing)[IS_SLOWER] == said[IS_SLOWER], "counts are judged on any machine"
    both = answered(make_compared(0.7), disturbed)[IS_SLOWER]
    assert both.startswith("yes, in 1 of 1 case: ")
    assert "; unknown for 1 case, because launches were set aside" in both


def test_names_memory_that_only_the_process_shows() -> None:
    """A leak in C++ or Rust is neither an object of Python nor a tensor."""
    leaking = growing(20 * MIB)
    said = answered(leaking)[NOT_CHECKED]
    assert f"memory outside of Python: the process of {leaking.case_id} grows by +19.5 GiB in 1,000" in said
    assert "memory outside" not in answered(make_compared(1.0))[NOT_CHECKED]


def test_says_why_a_case_failed() -> None:
    failed = judged(make_dry(), outcome="failed", counts=None, reasons=("arm B failed: crash: boom",))
    said = answered(failed)[DOES_MORE]
    assert said == f"unknown for 1 case: {failed.case_id}; arm B failed: crash: boom"
    long = judged(failed, reasons=("x" * 300,))
    said = answered(long, failed)[DOES_MORE]
    assert said.endswith(f"; the first of them failed because {'x' * 198} …")


def test_an_undecided_case_is_not_fast() -> None:
    case = make_compared(1.0, pairs=2)
    assert answered(case)[IS_SLOWER] == f"unknown for 1 case: {case.case_id}"


@pytest.mark.parametrize(
    ("result", "why"),
    [(make_dry(), "a dry run computes nothing"), (make_counted(), "the arms were only counted")],
)
def test_says_why_nothing_was_timed(result: Measurement, why: str) -> None:
    counted = judged(result, checks=())
    assert answered(counted)[IS_SLOWER].startswith(f"not timed here: {why}")
    assert "times: a slower kernel" in answered(counted)[NOT_CHECKED]


def test_says_that_the_gpu_was_pretended_to_be_a_cpu() -> None:
    on_gpu = make_dry(SAME)
    on_cpu = make_dry(SAME, machine=make_machine())
    assert "kernels" not in answered(on_gpu)[NOT_CHECKED].replace("slower kernel", "")
    assert "GPU kernels and GPU memory in 1 case" in answered(on_cpu)[NOT_CHECKED]


def test_says_so_for_a_case_meant_for_cpus() -> None:
    """A user who runs such a case dry might train on GPUs."""
    on_cpu = make_dry(SAME, machine=make_machine(), case=make_case(hardware="cpu"))
    assert "GPU kernels and GPU memory in 1 case" in answered(on_cpu)[NOT_CHECKED]


def spans(*steps: int) -> dict[str, SpanTimes]:
    return {"evaluate": SpanTimes(seconds=(1.0,) * len(steps), steps=steps)}


def test_names_events_outside_of_counted_steps() -> None:
    said = answered(make_counted(spans=spans(25, 50)))[NOT_CHECKED]
    assert f"work outside of the counted steps of {make_case().id}: evaluate (first in step 26)" in said


def test_events_in_counted_steps_were_checked() -> None:
    said = answered(make_counted(spans=spans(COUNTED_STEP - 1, 50)))[NOT_CHECKED]
    assert "outside of the counted steps" not in said


def test_names_changes_that_only_first_launches_showed() -> None:
    """Both arms share the user's caches, so such a change can be lost."""
    result = make_counted()
    reason = f"start-up: build: Python 3.11 calls: 41,237 -> 2,052,985, {UNCONFIRMED}"
    once = result.replace(verdict=result.verdict.replace(reasons=(reason,)))
    assert "only the first launches of " in answered(once)[NOT_CHECKED]


def test_counts_of_one_arm_were_not_checked() -> None:
    notes = ("steps 9-15: not judged, not counted in these launches", "another note")
    check = make_check(outcome="passed").replace(notes=notes)
    said = answered(judged(make_dry(check), counts=check))[NOT_CHECKED]
    assert said.endswith("; counts of only one arm: steps 9-15")


def test_a_dry_run_checks_only_steps() -> None:
    assert "start-up, checkpoints, evaluation and waiting for data: " in answered(make_dry(SAME))[NOT_CHECKED]
    assert "start-up" not in answered(make_counted())[NOT_CHECKED]


def test_skipped_cases_were_not_checked() -> None:
    skipped = Skipped(nodeid="x", case_id="x", framework="ddp", reason="needs h100")
    assert "1 case that cannot run here" in answered(make_compared(), skipped=(skipped,))[NOT_CHECKED]
    assert "1 case that cannot run dry" in answered(make_dry(SAME), skipped=(skipped,))[NOT_CHECKED]
