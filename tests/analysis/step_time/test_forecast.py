import math
from statistics import NormalDist

import pytest

from perfsuite.analysis.step_time.forecast import SPREAD, MeasuredCase, forecast, seconds_at
from perfsuite.errors import PredictionError
from perfsuite.results.dry_facts import Expected, Parallelism
from tests.counted import make_expected


def step(gpu_s: float, host_s: float = 0.0, parallelism: Parallelism = "none") -> Expected:
    """Return a step in which the GPU and the host take these times. The step takes the longer of the two."""
    return make_expected(
        matmul_s=gpu_s,
        host_s=max(0.0, host_s - gpu_s),
        parallelism=parallelism,
        by_host=tuple((factor, max(gpu_s, factor * host_s)) for factor in (0, 0.5, 1, 2, 4)),
    )


def measured(expected: Expected, gpu: float, host: float = 1.0) -> MeasuredCase:
    """Return a case measured on a machine whose GPU takes `gpu` times as long as assumed.

    The machine's host takes `host` times as long as assumed.
    """
    return MeasuredCase("a", expected, gpu * seconds_at(expected, host / gpu))


def test_times_between_two_hosts_are_interpolated() -> None:
    its = step(1, 1)
    assert [seconds_at(its, host) for host in (0.25, 1, 1.5, 3, 8)] == [1, 1, 1.5, 3, 8]


def test_the_factor_of_the_gpu_applies_to_other_cases() -> None:
    its = forecast(step(2), [measured(step(1), 1.2), measured(step(3), 1.2)])
    assert its.gpu_factor == pytest.approx(1.2)
    assert its.host_factor is None, "the GPU never waits for the host"
    assert math.sqrt(its.low_s * its.high_s) == pytest.approx(2.4)
    assert 1.04 < its.high_s / 2.4 < 1.1


def test_cases_that_wait_for_the_host_show_its_factor() -> None:
    cases = [measured(step(1, host_s), 1.2, 3.0) for host_s in (0.3, 0.4, 2, 3)] * 3
    its = forecast(step(1, 4), cases)
    assert its.host_factor == pytest.approx(3.0, rel=0.1)
    assert its.low_s < 12 < its.high_s


def test_an_unknown_host_gets_no_number() -> None:
    """To forecast a step whose pace the host can set, such a case must have been measured."""
    with pytest.raises(PredictionError, match="First measure a case whose GPU waits for the host") as caught:
        forecast(step(1, 4), [measured(step(1), 1.2)])
    assert not any(letter.isdigit() for letter in str(caught.value))


def test_a_host_that_the_cases_do_not_show_gets_no_number() -> None:
    """In the only measured case, the GPU sets the pace unless the host is three times as slow as assumed."""
    with pytest.raises(PredictionError, match="which the measured cases do not show") as caught:
        forecast(step(1, 4), [measured(step(1, 0.3), 1.2)])
    assert not any(letter.isdigit() for letter in str(caught.value))


def test_steps_at_the_pace_of_the_host_show_no_factor_of_the_gpu() -> None:
    with pytest.raises(PredictionError, match="First measure a case with larger layers or batches"):
        forecast(step(1), [measured(step(1, 4), 1.2)])


def test_steps_at_the_pace_of_the_host_have_their_own_interval() -> None:
    """The larger errors of these steps do not widen the intervals of steps at the pace of the GPU."""
    at_pace_of_gpu = [measured(step(1), 1.0)] * 4
    at_pace_of_host = [measured(step(1, 4), gpu, gpu) for gpu in (0.7, 0.9, 1.1, 1.3)]
    alone = forecast(step(1), at_pace_of_gpu)
    assert forecast(step(1), [*at_pace_of_gpu, *at_pace_of_host]) == alone
    its = forecast(step(1, 4), [*at_pace_of_gpu, *at_pace_of_host])
    assert its.high_s / its.low_s > 1.5 * alone.high_s / alone.low_s


def test_each_parallelism_has_its_own_factor() -> None:
    cases = [measured(step(1), 1.2), measured(step(1, parallelism="sharded"), 0.8)]
    assert forecast(step(1), cases).gpu_factor == pytest.approx(1.2)
    assert forecast(step(1, parallelism="sharded"), cases).gpu_factor == pytest.approx(0.8)
    with pytest.raises(PredictionError, match="First measure a case with replicated parameters"):
        forecast(step(1, parallelism="replicated"), cases)


def test_cases_that_differ_widen_the_interval() -> None:
    alike = forecast(step(1), [measured(step(1), 1.0)] * 4)
    unlike = forecast(step(1), [measured(step(1), gpu) for gpu in (0.8, 0.9, 1.1, 1.2)])
    more = forecast(step(1), [measured(step(1), 1.0)] * 9)
    assert unlike.high_s > 1.1 * alike.high_s
    assert more.high_s < alike.high_s


@pytest.mark.parametrize("number", [1, 4, 12])
def test_nine_of_ten_usual_errors_are_in_the_interval(number: int) -> None:
    """The errors of the measured cases are quantiles of a normal distribution with the usual spread."""
    quantiles = [NormalDist(0, SPREAD).inv_cdf((index + 0.5) / number) for index in range(number)]
    its = forecast(step(1), [measured(step(1), math.exp(error)) for error in quantiles])
    sigma = SPREAD * math.sqrt(1 + 1 / number)
    share = NormalDist(0, sigma).cdf(math.log(its.high_s)) - NormalDist(0, sigma).cdf(math.log(its.low_s))
    assert 0.9 <= share < 0.98
