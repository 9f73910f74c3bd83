import pytest

from perfsuite.analysis.slopes import FEWEST, slopes_of
from perfsuite.results.run import Slope
from tests.samples import make_report, make_run


def slopes(*levels: dict[int, int], step_s: tuple[float, ...] = ()) -> dict[str, Slope]:
    """Return the slopes of a launch whose ranks measured these levels. The window begins after step 5."""
    run = make_run(step_s=step_s, window=(min(5, len(step_s)), len(step_s)))
    reports = [make_report(rank, levels={"resident memory": sizes}) for rank, sizes in enumerate(levels)]
    return {slope.name: slope for slope in slopes_of(run, reports)}


def test_a_line_is_its_own_slope() -> None:
    """Only the window counts. Growth during the warm-up is not part of the slope."""
    times = (9.0,) * 5 + tuple(1 + 0.5 * step for step in range(20))
    found_slopes = slopes({step: 100 * max(step, 6) for step in range(1, 26)}, step_s=times)
    assert found_slopes["step time"].per_step == pytest.approx(0.5)
    memory = found_slopes["resident memory"]
    assert memory.per_step == pytest.approx(100)
    assert memory.interval == pytest.approx((100, 100))
    assert (memory.unit, memory.rank) == ("bytes", 0)


def test_interval_covers_what_noise_allows() -> None:
    noisy = tuple(1 + 0.1 * (-1) ** step for step in range(25))
    low, high = slopes(step_s=noisy)["step time"].interval
    assert low < 0 < high
    assert high - low == pytest.approx(0.0160, rel=0.05)


def test_one_large_allocation_is_no_certain_growth() -> None:
    once = {step: 1000 * (step > 12) for step in range(1, 26)}
    low, high = slopes(once, step_s=(1.0,) * 25)["resident memory"].interval
    assert low < 0 < high


def test_growth_in_every_second_step_is_certain() -> None:
    growing = {step: 1000 * (step // 2) for step in range(1, 26)}
    low, _ = slopes(growing, step_s=(1.0,) * 25)["resident memory"].interval
    assert low > 0


def test_memory_is_the_fastest_growing_ranks() -> None:
    levels = [{step: grows * step for step in range(1, 26)} for grows in (3, 8, 5)]
    memory = slopes(*levels, step_s=(1.0,) * 25)["resident memory"]
    assert memory.rank == 1
    assert memory.per_step == pytest.approx(8)


def test_too_few_values_have_no_slope() -> None:
    assert slopes({step: step for step in range(10)}, step_s=(1.0,) * (5 + FEWEST - 1)) == {}
