import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from perfsuite.results.baseline import from_runs
from perfsuite.results.run import Run
from perfsuite.verdict.judge import NOT_THE_SAME
from perfsuite.verdict.loss import _near, few_differ, loss_differs, may_differ, steadily_differ
from tests.samples import make_run
from tests.verdict.judging import check_of, judged, session, with_loss

FIVE = from_runs([with_loss(1)] * 5)
ONE = make_run()


def reason_of(baseline: Sequence[tuple[float, ...]], now: tuple[float, ...]) -> str | None:
    """Return the sentence about a loss `now` that differs from a baseline. None if it does not differ."""
    # Copying a launch without validation takes a tenth of the time of building one. This matters, because
    # tests simulate thousands of nights.
    runs = [ONE.model_copy(update={"loss": loss}) for loss in (now, *baseline)]
    return loss_differs(runs[:1], from_runs(runs[1:]))


@pytest.mark.parametrize("factor", [0.9, 0.97, 1.03, 1.1, math.nan, math.inf])
def test_diverging_loss_fails_and_hides_no_speed(factor: float) -> None:
    for speed, outcome, launches in ((0.5, "regressed", 3), (1, "passed", 1), (2, "improved", 3)):
        verdict = session([with_loss(factor, speed=speed)] * 15, FIVE)
        assert (verdict.outcome, verdict.failure, verdict.launches) == ("failed", "loss", launches)
        assert check_of(verdict, "tokens_per_s").outcome == outcome


def with_norm(norm: float | None, scale: float = 1, unclipped: float | None = None, **more: Any) -> Run:
    run = with_loss(scale, **more)
    figures = run.figures.model_copy(update={"gradient_norm": norm, "unclipped_norm": unclipped})
    return run.model_copy(update={"figures": figures})


@pytest.mark.parametrize(
    ("factor", "said"), [(0.252, "0.252"), (0.5, "0.500"), (3.99, "3.990"), (65536, "6.554e+04")]
)
def test_lone_loss_multiple_is_scaled_elsewhere(factor: float, said: str) -> None:
    """For example, a library might divide the loss by the number of micro-batches only after backward."""
    baseline = from_runs([with_norm(1.0, unclipped=7.0)] * 5)
    verdict = session([with_norm(1.0, factor, unclipped=7.1, speed=2)] * 15, baseline)
    assert (verdict.outcome, verdict.failure) == ("improved", None)
    reason = (
        f"the loss is x {said} in every step, but the gradients are the same: only the loss has another scale"
    )
    assert verdict.changed == (reason,)


@pytest.mark.parametrize("norm", [7.0, 0.1])
def test_a_scaled_loss_hides_no_other_clipping(norm: float) -> None:
    """The norm before clipping is the same, but the norm after clipping shows that clipping changed."""
    baseline = from_runs([with_norm(1.0, unclipped=7.0)] * 5)
    verdict = judged([with_norm(norm, 4, unclipped=7.0)], baseline)
    said = f"the norm of the gradients after clipping in step 4 is {norm:.4g}, but 1 +- 0.02 in the baseline"
    assert (verdict.outcome, verdict.failure, verdict.reasons) == ("failed", "loss", (said,))


@pytest.mark.parametrize("factor", [4, 0.25])
@pytest.mark.parametrize("speed", [1.0, 2.0])
@pytest.mark.parametrize("clipped", [True, False])
def test_common_factor_fails_with_any_clipping(factor: float, speed: float, clipped: bool) -> None:
    baseline = from_runs([with_norm(1.0, unclipped=7.0)] * 5)
    now = with_norm(1.0 if clipped else factor, factor, unclipped=7.0 * factor, speed=speed)
    verdict = session([now] * 15, baseline)
    assert (verdict.outcome, verdict.failure) == ("failed", "loss")
    said = f"loss and gradients x {factor:.3f} in every step, compared with the baseline"
    assert verdict.reasons == (
        f"{said}: is gradient accumulation averaged? (the norm of the gradients before clipping in step 4 "
        f"is x {factor:.3f})",
    )


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (7.0, None, "(unknown: this side did not record the norm"),
        (None, 7.0, "(unknown: the baseline did not record the norm"),
        (None, None, "(unknown: neither side recorded the norm"),
        (7.0, 14.0, "loss x 4.000 in every step, compared with the baseline, and the norm"),
    ],
)
def test_never_excuses_a_loss_factor_unseen(before: float | None, now: float | None, words: str) -> None:
    """Older baselines, for example, have no norms before clipping.

    The norms after clipping do not show whether the gradients have the same factor.
    """
    baseline = from_runs([with_norm(1.0, unclipped=before)] * 5)
    verdict = judged([with_norm(1.0, 4, unclipped=now)], baseline)
    assert (verdict.outcome, verdict.failure) == ("failed", "loss")
    assert words in verdict.reasons[0]


def test_clipping_hides_no_quadrupled_gradients() -> None:
    baseline = from_runs([with_norm(1.0, unclipped=7.0)] * 5)
    verdict = judged([with_norm(1.0, unclipped=28.0)], baseline)
    said = "the norm of the gradients before clipping in step 4 is 28, but 7 +- 0.14 in the baseline"
    assert (verdict.outcome, verdict.reasons) == ("failed", (said,))
    assert judged([with_norm(1.0, unclipped=7.05)], baseline).outcome == "passed"


def test_old_baseline_without_norms_still_judges() -> None:
    verdict = judged([with_norm(1.0, unclipped=28.0)], from_runs([with_norm(1.0)] * 5))
    said = "not compared, because missing in the baseline: the norm of the gradients before clipping"
    assert (verdict.outcome, verdict.changed) == ("passed", (said,))


def test_incomparable_gain_is_not_improved() -> None:
    """A gain cannot be confirmed if, for example, a case has `loss=None` and no counts."""
    fast = with_loss(1, speed=2)
    blind = from_runs([with_loss(1).replace(loss=())] * 5)
    for now, baseline in ((fast.replace(loss=()), FIVE), (fast, blind), (fast.replace(loss=()), blind)):
        verdict = session([now] * 15, baseline)
        assert (verdict.outcome, verdict.reasons) == ("inconclusive", (NOT_THE_SAME,))
        assert check_of(verdict, "tokens_per_s").outcome == "improved"
    by_norm = session(
        [with_norm(1.0, unclipped=7.0, speed=2).replace(loss=())] * 15,
        from_runs([with_norm(1.0, unclipped=7.0).replace(loss=())] * 5),
    )
    assert by_norm.outcome == "improved"


def test_other_gradient_norm_fails_at_equal_loss() -> None:
    for before, now, differs in (
        *(([1.0] * 3, with_norm(norm), True) for norm in (1.03, 0.36, math.nan)),
        *(([1.0] * 3, with_norm(norm), False) for norm in (1.019, None)),
        *(([0.0] * 3, with_norm(norm), norm > 0) for norm in (0.0, 1e-9)),  # no difference from 0 is allowed
        ([1.0] * 2, with_norm(0.36), False),  # two launches are too few for a scatter
        *(([0.9, 1.0, 1.1, 0.8, 1.2], with_norm(norm), norm > 5.65) for norm in (1.5, 5.6, 5.7)),
    ):
        verdict = judged([now], from_runs([with_norm(norm) for norm in before]))
        assert (verdict.failure == "loss") == differs
        assert (
            any("norm of the gradients after clipping in step 4" in why for why in verdict.reasons) == differs
        )


def computing(loss: tuple[float, ...], norm: float, unclipped: float) -> Run:
    """Return a launch with this loss and these norms. Creating it takes less time than with `with_norm`."""
    figures = ONE.figures.model_copy(update={"gradient_norm": norm, "unclipped_norm": unclipped})
    return ONE.model_copy(update={"loss": loss, "figures": figures})


def once(before: Run, now: Run) -> str | None:
    """Return the difference that one launch of each side suggests."""
    return may_differ(from_runs([before]).launches, from_runs([now]).launches)


def few(before: list[Run], now: list[Run]) -> str | None:
    """Return the difference that several launches of each side show."""
    difference = few_differ(now, before, "arm A")
    return None if difference is None else difference.removesuffix(", in 2 launches of each arm")


def test_two_launches_each_show_other_gradients() -> None:
    difference = "the norm of the gradients after clipping in step 4: 50 -> 51.1 (at most 2.0% is allowed)"
    norms = [once(with_norm(50.0), with_norm(norm)) for norm in (49.0, 51.0, 51.1, None)]
    assert norms == [None, None, difference, None]
    one = with_norm(50.0)
    other = with_norm(51.1)
    unknown = with_norm(None)
    near = with_norm(50.01)
    assert few([one, one], [other, other]) == few([one, near], [other, other]) == difference
    assert (
        few([other, other], [one, near])
        == "the norm of the gradients after clipping in step 4: 51.1 -> 50 (at most 2.0% is allowed)"
    )
    assert few([one, one], [other, unknown]) is None
    assert few([one, other], [other, one]) is None, "each side has both norms"
    assert few([one, with_norm(50.5)], [other, other]) is None, "the launches have no seed"
    hidden = with_norm(1.0, unclipped=7.0)
    shown = with_norm(1.0, unclipped=28.0)
    assert few([hidden, hidden], [shown, shown]) == (
        "the norm of the gradients before clipping in step 4: 7 -> 28 (at most 2.0% is allowed)"
    )


def test_two_launches_each_show_another_loss() -> None:
    difference = "the loss between 50% and 60% of the steps: 3.3500 -> 3.6850 (at most 2.0% is allowed)"
    one = with_loss(1)
    late = with_loss(1.1, first=12)
    assert once(one, with_loss(1.019)) is None
    assert once(one, late) == few([one, one], [late, late]) == difference
    assert few([one], [late]) is None, "one launch of each side is too few for a scatter"
    assert few([one, late], [late, one]) is None
    assert few([one, with_loss(1.01)], [late, late]) is None, "the launches have no seed"


def test_one_launch_each_shows_a_common_factor() -> None:
    before = with_norm(1.0, unclipped=7.0)
    now = with_norm(1.0, 4, unclipped=28.0)
    assert "loss and gradients x 4.000 in every step, compared with arm A" in str(few([before], [now]))
    assert few([before], [with_norm(1.0, 4, unclipped=7.0)]) is None, "the gradients are the same"
    assert few([before], [with_norm(1.0, -1, unclipped=7.0)]) is None, (
        "one launch is not enough for a different loss"
    )
    assert few([before] * 2, [with_norm(1.0, -1, unclipped=7.0)] * 2) is not None


@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize("sigma", [0.001, 0.01, 0.05])
def test_unseeded_equal_launches_never_differ(sigma: float, launches: int) -> None:
    """In 300 simulated nights, no difference is reported."""
    rng = random.Random(7)

    def launch() -> Run:
        norm = 7 * rng.lognormvariate(0, sigma)
        return computing(unseeded(rng, sigma), min(1.0, norm), norm)

    for _ in range(300):
        before, now = ([launch() for _ in range(launches)] for _ in range(2))
        assert few_differ(now, before, "arm A") is None


@pytest.mark.parametrize(("sigma", "launches"), [(0.0, 1), (0.005, 2), (0.02, 2), (0.04, 2)])
def test_finds_a_factor_of_four_despite_scatter(sigma: float, launches: int) -> None:
    rng = random.Random(8)

    def launch(factor: float) -> Run:
        norm = 7 * factor * rng.lognormvariate(0, sigma)
        return computing(unseeded(rng, sigma, factor), 1.0, norm)

    alarms = 0
    for _ in range(100):
        before, now = ([launch(factor) for _ in range(launches)] for factor in (1, 4))
        alarms += few_differ(now, before, "arm A") is not None
    assert alarms >= 80


def test_inconstant_multiple_is_another_loss() -> None:
    parts = [(factor, *part) for factor in (4, 0.25) for part in ((5, 25), (0, 20), (0, 1))]
    late = with_loss(1.1, first=20)
    for runs in (
        *([with_loss(factor, first=first, last=last)] for factor, first, last in parts),
        *([with_loss(factor)] for factor in (-2, 0, 1.5, 2.1, 0.4)),
        [with_loss(4), with_loss(2)],
        *([late, with_loss(1)], [with_loss(1), late, with_loss(1)], [with_loss(1), with_loss(1), late]),
    ):
        verdict = judged(runs, FIVE)
        assert (verdict.failure, verdict.changed) == ("loss", ())
        assert "every step" not in verdict.reasons[0]


def test_loss_finding_names_place_value_and_usual() -> None:
    said = "the loss between 50% and 60% of the steps is 3.6850, but 3.3500 +- 0.0670 in the baseline"
    assert judged([with_loss(1.1, first=12)], FIVE).reasons == (said,)


def unseeded(rng: random.Random, sigma: float, factor: float = 1) -> tuple[float, ...]:
    """Return the loss of a launch in ten values, each with a relative scatter of `sigma`."""
    return tuple((7 - 0.5 * tenth) * factor * rng.lognormvariate(0, sigma) for tenth in range(10))


@pytest.mark.parametrize("launches", [3, 5, 10])
@pytest.mark.parametrize("sigma", [0.005, 0.01, 0.02])
def test_always_scattering_loss_is_not_another(sigma: float, launches: int) -> None:
    """There is no alarm in 200 nights.

    A limit of 6 standard deviations, estimated from each tenth of the steps alone, would give an alarm on
    every fourth night (with a scatter of 2% and 3 launches).
    """
    rng = random.Random(4)
    for _ in range(200):
        baseline = [unseeded(rng, sigma) for _ in range(launches)]
        assert reason_of(baseline, unseeded(rng, sigma)) is None


@pytest.mark.parametrize("steps", [12, 70])
@pytest.mark.parametrize(
    ("first", "last", "sigma"),
    [
        (2.3, 2.3, 0.3),  # random data, four samples a step
        (0.5, -0.5, 0.1),  # the critic of a GAN
        (5.0, 0.05, 0.02),  # the model memorises its data
    ],
)
def test_a_loss_of_unseeded_data_is_not_another(first: float, last: float, sigma: float, steps: int) -> None:
    """There is no alarm in 300 nights, nor was there in 2,000 nights.

    If the limit depended only on the spread in each tenth of the steps, up to 1.7% of the nights would give
    an alarm.
    """
    rng = random.Random(1)

    def launch() -> tuple[float, ...]:
        curve = (first + (last - first) * step / steps for step in range(steps))
        return tuple(loss + rng.gauss(0, sigma) for loss in curve)

    baselines = [[launch() for _ in range(3)] for _ in range(300)]
    assert [said for held in baselines if (said := reason_of(held, launch())) is not None] == []


@pytest.mark.parametrize(
    ("sigma", "launches", "factor"),
    [(0.0, 3, 1.03), (0.001, 3, 1.04), (0.01, 3, 1.2), (0.01, 5, 1.1), (0.01, 10, 1.1), (0.02, 5, 1.25)],
)
@pytest.mark.parametrize("lower", [False, True])
def test_another_loss_that_scatters_is_found(sigma: float, launches: int, factor: float, lower: bool) -> None:
    rng = random.Random(4)
    by = 1 / factor if lower else factor
    nights = ([unseeded(rng, sigma) for _ in range(launches)] for _ in range(50))
    assert sum(reason_of(baseline, unseeded(rng, sigma, by)) is not None for baseline in nights) >= 45


ZEROS = (0.0,) * 9


def scaled(factor: float, *, first: int = 0, last: int = 25) -> tuple[float, ...]:
    return with_loss(factor, first=first, last=last).loss


def test_late_scatter_keeps_early_losses_sharp() -> None:
    late = [scaled(factor, first=20) for factor in (0.9, 0.95, 1.0, 1.05, 1.1)]
    assert reason_of(late, scaled(1.03, last=5)) is not None
    assert reason_of(late, scaled(1.15, first=20)) is None
    # All launches agree in the early steps, possibly by chance. The scatter of most steps is used there.
    usual = [scaled(factor) for factor in (0.97, 0.98, 1.0, 1.02, 1.03)]
    assert reason_of([usual[2][:10] + loss[10:] for loss in usual], scaled(1.1, last=5)) is None


def test_loss_may_differ_by_2_percent_or_scatter() -> None:
    for launches, allowed in (
        *(((1.0,), 0.02), ((0.9, 1.1), 0.02)),  # too few launches for a scatter: 2% is allowed
        *(((1.0,) * 3, 0.02), ((1.0,) * 4, 0.02)),  # launches without any scatter
        ((0.99, 1.0, 1.01), 0.1474),  # Student's t with 6 degrees of freedom: 12.77
        ((0.99, 0.99, 1.0, 1.01, 1.01), 0.0757),  # with 12 degrees of freedom: 6.91
    ):
        baseline = [(level,) * 10 for level in launches]
        for difference in (allowed, -allowed):
            assert reason_of(baseline, (1 + 0.998 * difference,) * 10) is None
            assert reason_of(baseline, (1 + 1.002 * difference,) * 10) is not None


@pytest.mark.parametrize(
    ("baseline", "now", "differs"),
    [
        *(([(1.0,) * 5, (1.0,) * 5, (1.0,) * 6], (1.0,) * steps, False) for steps in (4, 9)),
        # If only one launch of the baseline has a step, its scatter is unknown.
        ([(1.0,) * 5, (1.0,) * 5, (1.0,) * 6], (1.0,) * 5 + (1.1,), True),
        ([(1.0,) * 5, (1.0,) * 5, (1.0,) * 6], (1.0,) * 6 + (9.0,), False),
        # If two launches of the baseline have a step, its scatter is known.
        ([*[(1.0,) * 9] * 3, (1.0,) * 9 + (0.97,), (1.0,) * 9 + (1.03,)], (1.0,) * 9 + (1.1,), False),
        ([()] * 5, scaled(1.3), False),  # the baseline has no loss
        ([(), (), scaled(1)], scaled(1.3), True),
        # Even if the loss is 0 in most steps, the other steps must not differ by more than usual.
        *(
            ([(1.0, *ZEROS)] * 3, (first, *ZEROS), differs)
            for first, differs in ((1.0199, False), (1.0201, True))
        ),
        ([(1.0, *ZEROS)] * 3, (1.0, *(0.1,) * 9), True),
        # If a loss is always 0, no difference is allowed.
        *(
            ([(0.0,) * 10] * launches, (now,) * 10, now != 0)
            for launches in (1, 2, 3)
            for now in (0.0, 1e-9, -1e-9)
        ),
        ([(1.0, *ZEROS)] * 3, (4.0, *ZEROS), True),  # the only value that is not 0 has a factor of 4
    ],
)
def test_curves_are_compared_as_far_as_they_go(
    baseline: list[tuple[float, ...]], now: tuple[float, ...], differs: bool
) -> None:
    assert (reason_of(baseline, now) is not None) == differs


def test_spread_is_at_least_that_of_its_neighbours() -> None:
    for spreads, near in (
        ((0, 0, 6, 0, 0), (0, math.sqrt(12), 6, math.sqrt(12), 0)),
        *(((3, 4, 4), (math.sqrt(12.5), 4, 4)), ((4, 4, 3), (4, 4, math.sqrt(12.5))), ((5,), (5,))),
    ):
        assert [_near(spreads, tenth) for tenth in range(len(spreads))] == pytest.approx(near)


SPIKE = (8.0, 7.0, 9.0, 6.0, 5.0, 4.0, 3.9, 3.8, 3.7, 3.6)


def test_after_a_spike_only_a_higher_loss_fails() -> None:
    # After the spike, rounding errors have grown, so a different loss proves nothing.
    for changed in ({}, {3: 7.5, 4: 6.5, 9: 3.0}, {2: 8.5}, {2: 9.1, 3: 9.1}):
        assert (
            reason_of([SPIKE] * 5, tuple(changed.get(tenth, loss) for tenth, loss in enumerate(SPIKE)))
            is None
        )
    for tenth, loss in ((0, 8.3), (1, 6.7), (2, 9.3), (9, math.nan), (9, 9.3)):
        said = reason_of([SPIKE] * 5, (*SPIKE[:tenth], loss, *SPIKE[tenth + 1 :]))
        assert said is not None
    assert "x 4.000 in every step" in str(reason_of([SPIKE] * 5, tuple(4 * loss for loss in SPIKE)))
    highest = (
        "the loss between 90% and 100% of the steps is 9.3000, but at most 9.0000 + 0.1800 in the baseline"
    )
    assert said == highest


def test_spike_only_today_is_another_loss() -> None:
    """The highest loss of these baselines must not count as a spike.

    Otherwise, no lower loss after this step would fail.
    """
    assert reason_of([tuple(8.0 - 0.4 * tenth for tenth in range(10))] * 5, SPIKE) is not None
    flat = (5.0,) * 8
    assert reason_of([(*flat, 5.09, 0.5)] * 5, (*flat, 5.09, 0.4)) is not None
    for tenth, differs in ((7, True), (8, False)):
        now = [*flat, 5.09, 5.101]
        now[tenth] = 4.0
        assert reason_of([(*flat, 5.09, 5.09)] * 5, tuple(now)) is not None
        assert (reason_of([(*flat, 5.2, 5.101)] * 5, tuple(now)) is not None) == differs


TENTHS = tuple(7 - 0.5 * tenth for tenth in range(10))


def changed(curve: tuple[float, ...], tenths: range, factor: float) -> tuple[float, ...]:
    return tuple(loss * factor if tenth in tenths else loss for tenth, loss in enumerate(curve))


@pytest.mark.parametrize("odd", [range(10), range(6, 10), range(6, 7)])
@pytest.mark.parametrize("factor", [1e-9, -3.0, 1.4, 1e6, math.inf])
@pytest.mark.parametrize("launches", [3, 5, 10])
def test_one_odd_launch_excuses_no_other_loss(odd: range, factor: float, launches: int) -> None:
    """One launch of the baseline has an odd loss.

    A new launch must still not differ by more than 17% from a baseline of three launches, or by more than 7%
    from a baseline of five launches.
    """
    baseline = [changed(TENTHS, odd, factor), *[TENTHS] * (launches - 1)]
    assert reason_of(baseline, TENTHS) is None
    assert reason_of(baseline, changed(TENTHS, range(6, 10), 1.25 if launches == 3 else 1.1)) is not None


@pytest.mark.parametrize("factor", [1.4, 1e6])
def test_limits_one_odd_launch_among_scattered(factor: float) -> None:
    rng = random.Random(5)
    for _ in range(50):
        baseline = [unseeded(rng, 0.003, factor), *(unseeded(rng, 0.003) for _ in range(4))]
        assert reason_of(baseline, unseeded(rng, 0.003)) is None
        assert reason_of(baseline, unseeded(rng, 0.003, 1.3)) is not None


def test_one_odd_norm_excuses_no_other_gradients() -> None:
    before = [with_norm(norm) for norm in (1e6, 1.0, 1.0, 1.0, 1.0)]
    for norm, differs in ((1.0, False), (1.4, True), (0.6, True)):
        assert (loss_differs([with_norm(norm)], from_runs(before)) is not None) == differs


def test_spike_in_one_launch_ends_no_comparison() -> None:
    baseline = [TENTHS, changed(TENTHS, range(1, 2), 1.3)]
    assert reason_of(baseline, changed(changed(TENTHS, range(1, 2), 1.15), range(2, 10), 0.5)) is not None


@pytest.mark.parametrize("odd", [range(10), range(6, 7)])
def test_counts_find_other_loss_despite_odd_launch(odd: range) -> None:
    then = from_runs([make_run(loss=changed(TENTHS, odd, 100)), *[make_run(loss=TENTHS)] * 2]).launches
    now = from_runs([make_run(loss=changed(TENTHS, range(6, 10), 1.1))] * 2).launches
    assert steadily_differ(then, then[1:]) is None
    assert (
        steadily_differ(then, now)
        == "the loss between 60% and 70% of the steps: 4.0000 -> 4.4000 (at most 2.0% is allowed)"
    )


def test_counts_find_other_gradients_despite_odd_norm() -> None:
    then = from_runs([with_norm(norm) for norm in (1e6, 1.0, 1.0)]).launches
    now = from_runs([with_norm(1.1)] * 2).launches
    assert (
        steadily_differ(then, now)
        == "the norm of the gradients after clipping in step 4: 1 -> 1.1 (at most 2.0% is allowed)"
    )


def test_counts_name_the_difference_allowed() -> None:
    then, now = (
        from_runs([make_run(loss=changed(TENTHS, range(10), factor * near)) for near in (1, 1.01)]).launches
        for factor in (1, 2)
    )
    assert (steadily_differ(then, now) or "").endswith(" (at most 60.0% is allowed)")


def test_nan_norm_has_no_allowed_share() -> None:
    then, now = (from_runs([with_norm(norm)]).launches for norm in (math.nan, 1.0))
    assert may_differ(then, now) == "the norm of the gradients after clipping in step 4: nan -> 1"


NEAR_ZERO = (2e-8, -0.11, 0.02, 3e-5, -0.04, 0.01, -0.02, 0.03, 0.01, -0.06)
"""The losses of reinforcement learning: terms that cancel each other."""


def with_curve(*loss: float) -> Run:
    return ONE.model_copy(update={"loss": loss})


def test_a_loss_that_cancels_may_differ() -> None:
    other = with_curve(1e-8, *NEAR_ZERO[1:])
    assert few_differ([other] * 2, [with_curve(*NEAR_ZERO)] * 2, "arm A") is None


def test_names_a_place_where_losses_really_differ() -> None:
    other = with_curve(1e-8, -0.06, *NEAR_ZERO[2:])
    said = few_differ([other] * 2, [with_curve(*NEAR_ZERO)] * 2, "arm A")
    assert said is not None
    assert said.startswith("the loss between 10% and 20% of the steps: -0.1100 -> -0.0600")


def test_shows_the_digits_of_a_small_loss() -> None:
    small = with_curve(*(loss / 100 for loss in NEAR_ZERO))
    other = with_curve(NEAR_ZERO[0] / 100, -0.0006, *(loss / 100 for loss in NEAR_ZERO[2:]))
    assert ": -0.0011 -> -0.0006 " in str(few_differ([other] * 2, [small] * 2, "arm A"))


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_loss_hides_no_other_difference(broken: float) -> None:
    before = with_curve(2.0, broken, *[2.0] * 8)
    now = with_curve(3.0, broken, *[2.0] * 8)
    assert may_differ(from_runs([before]).launches, from_runs([now]).launches) is not None
