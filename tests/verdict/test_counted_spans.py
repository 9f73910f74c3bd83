"""Test that equal findings in several steps become one finding, which names these steps."""

from typing import Literal

import pytest

from perfsuite.results.counts import OUTSIDE_OF_STEPS, Counts, PythonCalls
from perfsuite.results.outcome import Finding
from perfsuite.results.quantities import FLOOR, MODULES_FLOOR, WRITTEN_LOOSE
from perfsuite.results.rank_report import START_UP
from perfsuite.verdict.counted_spans import combined, missing_spans, when, without_start_up_calls
from perfsuite.verdict.exact import check, count_differences
from tests.counted import make_memory
from tests.samples import known
from tests.twin_counts import baseline_of, counts, launch

STEPS = tuple(range(4, 16))


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (STEPS, ""),
        ((5, 10, 15), "every 5th step (5, 10, 15)"),
        ((4, 6, 8, 10, 12, 14), "every 2nd step (4, 6, 8, 10, 12, 14)"),
        ((10,), "in step 10 of 4-15"),
        ((9, 10, 11, 12, 13, 14, 15), "from step 9 on"),
        ((5, 10), "in steps 5,10 of 4-15"),
    ],
)
def test_names_when_a_change_comes(steps: tuple[int, ...], said: str) -> None:
    assert when(steps, STEPS) == said


def test_names_a_period_only_for_steps_in_a_row() -> None:
    assert when((4, 100), (4, 50, 100)) == "in steps 4,100 of 4,50,100"


def finding(now: int, outcome: Literal["regressed", "passed"] = "regressed") -> Finding:
    return Finding(
        field="kernels in forward",
        quantity="kernels",
        unit="calls",
        before=100,
        now=now,
        ranks="",
        outcome=outcome,
        sentence="more",
    )


def are_equal(one: int, other: int) -> bool:
    return one == other


def test_a_change_of_all_steps_is_said_once() -> None:
    findings = combined(dict.fromkeys(STEPS, finding(110)), STEPS, are_equal)

    assert findings == [finding(110)]


def test_larger_change_in_some_steps_is_separate() -> None:
    by_step = {step: finding(200 if step % 5 == 0 else 110) for step in STEPS}

    sentences = [difference.sentence for difference in combined(by_step, STEPS, are_equal)]

    assert sentences == ["in steps 4,6-9,11-14 of 4-15: more", "every 5th step (5, 10, 15): more"]


def test_listed_change_needs_the_reported_step() -> None:
    listed = dict.fromkeys(STEPS, finding(101, "passed"))

    assert combined(listed, STEPS, are_equal) == [finding(101, "passed")]
    assert not combined({10: finding(101, "passed")}, STEPS, are_equal)


def in_steps(**kernels: int) -> Counts:
    """Return counts of steps 4 to 15.

    Each step has 100 kernels, except those that are given, for example `step10=117`.
    """
    counts = Counts(kernels={"forward": kernels.get("step4", 100)})
    for step in STEPS[1:]:
        counts = counts.with_step(Counts(step=step, kernels={"forward": kernels.get(f"step{step}", 100)}))
    return counts


def test_work_of_a_single_later_step_is_found() -> None:
    (difference,) = count_differences(baseline_of(in_steps()), baseline_of(in_steps(step10=117)))

    assert difference.outcome == "regressed"
    assert difference.steps == "in step 10 of 4-15"
    assert difference.sentence == "in step 10 of 4-15: kernels in forward: 100 -> 117 a step"


def test_finds_periodic_work_moved_to_step_4() -> None:
    """Each step is compared with the same step of the baseline. Less work in another step hides nothing."""
    differences = count_differences(baseline_of(in_steps(step5=117)), baseline_of(in_steps(step4=117)))

    assert {difference.steps: difference.outcome for difference in differences} == {
        "in step 4 of 4-15": "regressed",
        "in step 5 of 4-15": "improved",
    }


def test_memory_is_not_compared_in_a_late_step() -> None:
    before, now = (
        Counts(memory=make_memory(peak=size)).with_step(Counts(step=40, kernels={"forward": 1}))
        for size in (10**9, 2 * 10**9)
    )

    (difference,) = count_differences(baseline_of(before), baseline_of(now))

    assert difference.quantity == "peak of live tensors"
    assert difference.steps == ""


def test_an_event_is_judged_under_its_name() -> None:
    before, now = (
        in_steps().replace(spans={"save": Counts(kernels={"forward": kernels})}) for kernels in (1, 3)
    )

    (difference,) = count_differences(baseline_of(before), baseline_of(now))

    assert difference.span == "save"
    assert difference.sentence == "save: kernels in forward: 1 -> 3 a step"


def imported(**modules: int) -> Counts:
    """Return counts with a start-up that imported this many modules of each package."""
    return in_steps().replace(spans={"start-up": Counts(modules=modules)})


def test_names_newly_imported_modules_by_package() -> None:
    before = imported(torch=1000, numpy=204)
    now = imported(torch=1008, numpy=204, torchvision=198)

    (difference,) = count_differences(baseline_of(before), baseline_of(now))

    assert difference.outcome == "regressed"
    assert difference.sentence == "start-up: modules imported: 1,204 -> 1,410 (torchvision +198, torch +8)"


def test_few_more_modules_are_no_regression() -> None:
    before = imported(torch=1000)
    now = imported(torch=1000 + MODULES_FLOOR)

    assert not count_differences(baseline_of(before), baseline_of(now))


def test_judges_warm_imports_beside_a_cold_start() -> None:
    """Only the first launch of a session compiles. It therefore imports additional modules."""
    before = imported(torch=1000)
    cold = in_steps().replace(spans={"cold start-up": Counts(modules={"torch": 1500})})
    warm = imported(torch=1000, torchvision=198)

    verdict = known(check([launch(cold), launch(warm)], baseline_of(before)))

    assert [listed.span for listed in verdict.findings] == ["start-up"]
    assert not [note for note in verdict.notes if "start-up" in note]


def building(calls: int) -> Counts:
    """Return counts with a start-up that made this many Python calls while it built the model."""
    python = PythonCalls(version="3.11", calls={OUTSIDE_OF_STEPS: calls}, functions={"library.build": calls})
    spans = {"start-up": Counts(modules={"torch": 1}), "start-up: build": Counts(python=python)}
    return in_steps().replace(spans=spans)


def test_judges_calls_of_a_start_up_part() -> None:
    (difference,) = count_differences(baseline_of(building(20_000)), baseline_of(building(30_000)))

    assert difference.outcome == "regressed"
    assert difference.sentence == (
        "start-up: build: Python 3.11 calls: 20,000 -> 30,000 (library.build +10,000)"
    )


def test_share_of_a_start_up_does_not_precede_a_multiple() -> None:
    """A start-up makes so many calls that any change of their number is large compared with a step."""

    def runs(steps: int, start_up: int) -> Counts:
        python = PythonCalls(version="3.11", calls={"forward": steps}, functions={"f": steps})
        return building(start_up).replace(python=python)

    findings = count_differences(baseline_of(runs(5_000, 400_000)), baseline_of(runs(50_000, 600_000)))

    assert [listed.sentence.partition(" calls")[0] for listed in findings] == [
        "Python 3.11",
        "start-up: build: Python 3.11",
    ]


def test_a_start_up_comes_after_the_steps() -> None:
    """A start-up happens once, however many modules it imports."""
    more = {"forward": 178, "backward": 327, "optimizer": 351}
    before = counts(spans={START_UP: Counts(modules={"old": 1})})
    now = counts(kernels=more, spans={START_UP: Counts(modules={"old": 1, "new": 500})})

    findings = count_differences(baseline_of(before), baseline_of(now))

    assert [finding.span for finding in findings if finding.outcome == "regressed"] == ["", START_UP]


def test_start_up_part_of_one_side_is_a_note() -> None:
    before = building(20_000)
    now = building(20_000)
    parts = {
        "start-up": now.spans["start-up"],
        "start-up: build and first step": now.spans["start-up: build"],
    }
    spans = [*missing_spans(before, [now.replace(spans=parts)])]

    assert spans == [("start-up: build", True), ("start-up: build and first step", False)]


@pytest.mark.parametrize("is_counted_before", [True, False])
def test_calls_uncounted_on_one_side_are_no_note(is_counted_before: bool) -> None:
    """A timed launch never counts Python calls, so their absence needs no note."""
    counted = building(20_000)
    timed = imported(torch=1)
    before, now = (counted, timed) if is_counted_before else (timed, counted)

    assert not [*missing_spans(before, [now])]


def test_cold_only_start_up_is_not_judged() -> None:
    cold = in_steps().replace(spans={"cold start-up": Counts(modules={"torch": 1500})})

    verdict = known(check([launch(cold)], baseline_of(imported(torch=1000))))

    assert [note.partition(":")[0] for note in verdict.notes] == ["cold start-up", "start-up"]


def test_names_what_was_counted_on_one_side() -> None:
    save = {"save": Counts()}
    before = Counts(also_counted=(5, 40))
    now = Counts(also_counted=(5, 6, 7), spans=save)

    assert [*missing_spans(before, [now])] == [("step 40", True), ("steps 6-7", False), ("save", False)]


def saved(**counts: int | None) -> Counts:
    return in_steps().replace(spans={"save checkpoint": Counts(**counts)})


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"bytes_written": 2**30}, {"bytes_written": 2**31}, "bytes written: 1.0 -> 2.0 GiB"),
        ({"collectives_begun": 4}, {"collectives_begun": 5}, "collectives begun: 4 -> 5"),
        ({"allocator_peak": 2**30}, {"allocator_peak": 2**31}, "allocator's peak: 1.0 -> 2.0 GiB"),
    ],
)
def test_more_of_what_an_event_does_regresses(before: dict[str, int], now: dict[str, int], said: str) -> None:
    (difference,) = count_differences(baseline_of(saved(**before)), baseline_of(saved(**now)))

    assert difference.outcome == "regressed"
    assert difference.sentence == f"save checkpoint: {said}"


def test_few_more_checkpoint_bytes_say_nothing() -> None:
    before = saved(bytes_written=2**30)
    now = saved(bytes_written=2**30 + WRITTEN_LOOSE)

    assert not count_differences(baseline_of(before), baseline_of(now))


def test_some_more_checkpoint_bytes_do_not_regress() -> None:
    before = saved(bytes_written=2**30)
    now = saved(bytes_written=2**30 + FLOOR)

    assert known(check([launch(now)], baseline_of(before))).outcome == "passed"


@pytest.mark.parametrize(
    ("before", "now", "where"),
    [(2**30, None, "not counted in these launches"), (None, 2**30, "not in the baseline")],
)
def test_bytes_of_one_side_alone_are_no_verdict(before: int | None, now: int | None, where: str) -> None:
    then, today = (baseline_of(saved(bytes_written=written)) for written in (before, now))

    counted = known(check([launch(saved(bytes_written=now))], then))

    assert counted.outcome == "passed"
    assert counted.notes == (f"save checkpoint: bytes written: not judged, {where}",)
    assert not count_differences(then, today)


def test_flops_hidden_in_a_later_step_are_no_gain() -> None:
    before = Counts(flops={"forward": 10**9}).with_step(Counts(step=5, flops={"forward": 10**9}))
    hidden = Counts(step=5, flops={"forward": 10**6}, ops={"mine.fused": 1})
    counted = known(check([launch(Counts(flops={"forward": 10**9}).with_step(hidden))], baseline_of(before)))

    assert counted.outcome == "not counted"
    assert any(note.startswith("step 5: FLOPs") for note in counted.notes)


def test_omits_start_up_calls_that_say_nothing() -> None:
    run = without_start_up_calls(launch(building(20_000)))

    (entry,) = run.counts
    assert [*entry.counts.spans] == ["start-up"]
    assert entry.counts.step == building(20_000).step


@pytest.mark.parametrize(("before", "now"), [(3, 6), (49, 50), (100, 103)])
def test_an_event_that_occurs_more_often_regresses(before: int, now: int) -> None:
    (difference,) = count_differences(
        baseline_of(saved(occurrences=before)), baseline_of(saved(occurrences=now))
    )

    assert difference.outcome == "regressed"
    assert difference.sentence == f"save checkpoint: occurrences: {before} -> {now}"


def test_a_phase_may_occur_a_little_more_often() -> None:
    now = baseline_of(saved(occurrences=102))

    assert not count_differences(baseline_of(saved(occurrences=100)), now)


def test_failed_occurrences_are_no_improvement() -> None:
    counted = known(check([launch(saved(occurrences=None))], baseline_of(saved(occurrences=3))))

    assert counted.outcome == "passed"
    assert counted.notes == ("save checkpoint: occurrences: not judged, not counted in these launches",)
