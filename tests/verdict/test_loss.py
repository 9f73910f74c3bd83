import math
import random
from collections.abc import Sequence

import pytest

from perfsuite.results.baseline import from_runs
from perfsuite.results.run import Run
from perfsuite.verdict.loss import _near, loss_differs, other_gradients, steadily_other_gradients
from tests.samples import make_run
from tests.verdict.judging import check_of, judged, session, with_loss

FIVE = from_runs([with_loss(1)] * 5)


def told(baseline: Sequence[tuple[float, ...]], now: tuple[float, ...]) -> str | None:
    """What differs between the loss of a launch and those of a baseline's launches."""
    return loss_differs([make_run(loss=now)], from_runs([make_run(loss=loss) for loss in baseline]))


@pytest.mark.parametrize("factor", [0.9, 0.97, 1.03, 1.1, math.nan, math.inf])
def test_a_loss_that_leaves_the_baselines_fails_and_hides_no_speed(factor: float) -> None:
    for speed, outcome, launches in ((0.5, "regressed", 3), (1, "passed", 1), (2, "improved", 3)):
        verdict = session([with_loss(factor, speed=speed)] * 15, FIVE)
        assert (verdict.outcome, verdict.failure, verdict.launches) == ("failed", "loss", launches)
        assert check_of(verdict, "tokens_per_s").outcome == outcome


def test_a_loss_that_is_the_same_multiple_in_every_step_is_scaled_elsewhere() -> None:
    """As where a library takes the mean over micro-batches after backward, and not before."""
    factors = {0.252: "0.252", 0.5: "0.5", 3.99: "3.99", 1 / 1024: "0.000977", 65536: "6.55e+04"}
    for factor, said in factors.items():
        verdict = judged([with_loss(factor)], FIVE)
        assert (verdict.outcome, verdict.failure) == ("passed", None)
        assert verdict.changed == (f"the loss is x {said} in every step: scaled elsewhere",)


def with_norm(norm: float | None, scale: float = 1) -> Run:
    run = with_loss(scale)
    return run.replace(figures=run.figures.replace(gradient_norm=norm))


def test_gradients_of_another_norm_fail_though_the_loss_is_equal() -> None:
    for before, now, differs in (
        *(([1.0] * 3, with_norm(norm), True) for norm in (1.03, 0.36, math.nan)),
        *(([1.0] * 3, with_norm(norm), False) for norm in (1.019, None)),
        *(([1.0] * 3, with_norm(norm, scale=4), norm == 2.0) for norm in (4.0, 1.0, 2.0)),
        *(([0.0] * 3, with_norm(norm), norm > 0) for norm in (0.0, 1e-9)),  # nothing is allowed
        ([1.0] * 2, with_norm(0.36), False),  # two launches tell no scatter
        *(([0.9, 1.0, 1.1, 0.8, 1.2], with_norm(norm), norm > 5.65) for norm in (1.5, 5.6, 5.7)),
    ):
        verdict = judged([now], from_runs([with_norm(norm) for norm in before]))
        assert (verdict.failure == "loss") == differs
        assert any("norm of the gradients before step 4" in why for why in verdict.reasons) == differs
    norms = [other_gradients(with_norm(50.0), with_norm(norm)) for norm in (49.0, 51.0, 51.1, None)]
    assert norms == [None, None, "the norm of the gradients before step 4: 50 -> 51.1", None]
    one, other, unknown = with_norm(50.0), with_norm(51.1), with_norm(None)
    assert steadily_other_gradients([one, one], [other, other], 1) == norms[2]
    assert steadily_other_gradients([one, one], [other, unknown], 1) is None
    assert steadily_other_gradients([one, other], [other, one], 1) is None, "each side has both"
    assert steadily_other_gradients([one, with_norm(50.5)], [other, other], 1) is None, "without a seed"
    near = with_norm(50.01)
    assert steadily_other_gradients([one, near], [other, other], 1) == norms[2]
    back = "the norm of the gradients before step 4: 51.1 -> 50"
    assert steadily_other_gradients([other, other], [one, near], 1) == back


def test_a_loss_that_is_not_the_same_whole_multiple_in_all_steps_of_all_launches_is_another() -> None:
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


def test_a_loss_is_named_with_the_place_the_value_and_what_is_usual() -> None:
    said = "the loss over 50 to 60 % of the steps is 3.6850, the baseline's 3.3500 +- 0.0670"
    assert judged([with_loss(1.1, first=12)], FIVE).reasons == (said,)


def unseeded(rng: random.Random, sigma: float, factor: float = 1) -> tuple[float, ...]:
    """The loss of a launch, which scatters by `sigma`, relative, over each tenth of the steps."""
    return tuple((7 - 0.5 * tenth) * factor * rng.lognormvariate(0, sigma) for tenth in range(10))


@pytest.mark.parametrize("launches", [3, 5, 10])
@pytest.mark.parametrize("sigma", [0.005, 0.01, 0.02])
def test_a_loss_that_always_scatters_is_no_other_loss(sigma: float, launches: int) -> None:
    """Not in 200 nights; with 6 standard deviations of each tenth alone it was one in 4 (2 %, 3 launches)."""
    rng = random.Random(4)
    for _ in range(200):
        baseline = [unseeded(rng, sigma) for _ in range(launches)]
        assert told(baseline, unseeded(rng, sigma)) is None


@pytest.mark.parametrize("steps", [12, 70])
@pytest.mark.parametrize(
    ("first", "last", "sigma"),
    [
        (2.3, 2.3, 0.3),  # random data, four samples a step
        (0.5, -0.5, 0.1),  # a GAN's critic
        (5.0, 0.05, 0.02),  # memorised
    ],
)
def test_a_loss_of_unseeded_data_is_not_another(first: float, last: float, sigma: float, steps: int) -> None:
    """Not in 300 nights (2,000 were simulated); by the spread of each tenth alone in up to 1.7 %."""
    rng = random.Random(1)

    def launch() -> tuple[float, ...]:
        curve = (first + (last - first) * step / steps for step in range(steps))
        return tuple(loss + rng.gauss(0, sigma) for loss in curve)

    baselines = [[launch() for _ in range(3)] for _ in range(300)]
    assert [said for held in baselines if (said := told(held, launch())) is not None] == []


@pytest.mark.parametrize(
    ("sigma", "launches", "factor"),
    [(0.0, 3, 1.03), (0.001, 3, 1.04), (0.01, 3, 1.2), (0.01, 5, 1.1), (0.01, 10, 1.1), (0.02, 5, 1.25)],
)
@pytest.mark.parametrize("lower", [False, True])
def test_another_loss_that_scatters_is_found(sigma: float, launches: int, factor: float, lower: bool) -> None:
    rng, by = random.Random(4), 1 / factor if lower else factor
    nights = ([unseeded(rng, sigma) for _ in range(launches)] for _ in range(50))
    assert sum(told(baseline, unseeded(rng, sigma, by)) is not None for baseline in nights) >= 45


ZEROS = (0.0,) * 9


def scaled(factor: float, *, first: int = 0, last: int = 25) -> tuple[float, ...]:
    return with_loss(factor, first=first, last=last).loss


def test_a_loss_that_scatters_late_is_compared_sharply_where_it_does_not() -> None:
    late = [scaled(factor, first=20) for factor in (0.9, 0.95, 1.0, 1.05, 1.1)]
    assert told(late, scaled(1.03, last=5)) is not None
    assert told(late, scaled(1.15, first=20)) is None
    # Where a few launches agree by chance, the scatter of most steps counts.
    usual = [scaled(factor) for factor in (0.97, 0.98, 1.0, 1.02, 1.03)]
    assert told([usual[2][:10] + loss[10:] for loss in usual], scaled(1.1, last=5)) is None


def test_a_loss_may_differ_by_two_percent_or_as_much_as_three_launches_or_more_scatter() -> None:
    for launches, allowed in (
        *(((1.0,), 0.02), ((0.9, 1.1), 0.02)),  # where too few tell: sums in another order
        *(((1.0,) * 3, 0.02), ((1.0,) * 4, 0.02)),  # where nothing scatters
        ((0.99, 1.0, 1.01), 0.1474),  # t of 6 degrees of freedom at 4.3 standard deviations: 12.77
        ((0.99, 0.99, 1.0, 1.01, 1.01), 0.0757),  # t of 12: 6.91
    ):
        baseline = [(level,) * 10 for level in launches]
        for difference in (allowed, -allowed):
            assert told(baseline, (1 + 0.998 * difference,) * 10) is None
            assert told(baseline, (1 + 1.002 * difference,) * 10) is not None


@pytest.mark.parametrize(
    ("baseline", "now", "differs"),
    [
        *(([(1.0,) * 5, (1.0,) * 5, (1.0,) * 6], (1.0,) * steps, False) for steps in (4, 9)),
        ([(1.0,) * 5, (1.0,) * 5, (1.0,) * 6], (1.0,) * 5 + (1.1,), True),  # one launch tells no scatter
        ([(1.0,) * 5, (1.0,) * 5, (1.0,) * 6], (1.0,) * 6 + (9.0,), False),
        # Two launches that are longer than the others tell scatter.
        ([*[(1.0,) * 9] * 3, (1.0,) * 9 + (0.97,), (1.0,) * 9 + (1.03,)], (1.0,) * 9 + (1.1,), False),
        ([()] * 5, scaled(1.3), False),  # none
        ([(), (), scaled(1)], scaled(1.3), True),
        # Where most of a loss is zero the rest may differ no more.
        *(
            ([(1.0, *ZEROS)] * 3, (first, *ZEROS), differs)
            for first, differs in ((1.0199, False), (1.0201, True))
        ),
        ([(1.0, *ZEROS)] * 3, (1.0, *(0.1,) * 9), True),
        # Nothing is allowed.
        *(
            ([(0.0,) * 10] * launches, (now,) * 10, now != 0)
            for launches in (1, 2, 3)
            for now in (0.0, 1e-9, -1e-9)
        ),
        ([(1.0, *ZEROS)] * 3, (4.0, *ZEROS), False),  # scaled elsewhere
    ],
)
def test_curves_are_compared_as_far_as_they_go(
    baseline: list[tuple[float, ...]], now: tuple[float, ...], differs: bool
) -> None:
    assert (told(baseline, now) is not None) == differs


def test_a_spread_is_at_least_that_of_the_tenth_with_its_two_neighbours() -> None:
    for spreads, near in (
        ((0, 0, 6, 0, 0), (0, math.sqrt(12), 6, math.sqrt(12), 0)),
        *(((3, 4, 4), (math.sqrt(12.5), 4, 4)), ((4, 4, 3), (4, 4, math.sqrt(12.5))), ((5,), (5,))),
    ):
        assert [_near(spreads, tenth) for tenth in range(len(spreads))] == pytest.approx(near)


SPIKE = (8.0, 7.0, 9.0, 6.0, 5.0, 4.0, 3.9, 3.8, 3.7, 3.6)


def test_from_a_spike_of_the_baseline_on_a_loss_may_only_not_be_higher() -> None:
    for changed in ({}, {3: 7.5, 4: 6.5, 9: 3.0}, {2: 8.5}, {2: 9.1, 3: 9.1}):  # other roundings after it
        assert told([SPIKE] * 5, tuple(changed.get(tenth, loss) for tenth, loss in enumerate(SPIKE))) is None
    for tenth, loss in ((0, 8.3), (1, 6.7), (2, 9.3), (9, math.nan), (9, 9.3)):
        said = told([SPIKE] * 5, (*SPIKE[:tenth], loss, *SPIKE[tenth + 1 :]))
        assert said is not None
    assert told([SPIKE] * 5, tuple(4 * loss for loss in SPIKE)) is None, "scaled elsewhere"
    highest = "the loss over 90 to 100 % of the steps is 9.3000, the baseline's highest 9.0000 + 0.1800"
    assert said == highest


def test_a_loss_that_spikes_today_alone_is_another_and_one_that_rises_by_two_percent_has_no_spike() -> None:
    """The highest is at its end, and half of it would go unjudged if that were a spike."""
    assert told([tuple(8.0 - 0.4 * tenth for tenth in range(10))] * 5, SPIKE) is not None
    flat = (5.0,) * 8
    assert told([(*flat, 5.09, 0.5)] * 5, (*flat, 5.09, 0.4)) is not None
    for tenth, differs in ((7, True), (8, False)):
        now = [*flat, 5.09, 5.101]
        now[tenth] = 4.0
        assert told([(*flat, 5.09, 5.09)] * 5, tuple(now)) is not None
        assert (told([(*flat, 5.2, 5.101)] * 5, tuple(now)) is not None) == differs
