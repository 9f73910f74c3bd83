from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from perfsuite.results.metric import GATED, PEAK_MEMORY, TOKENS_PER_S, TOKENS_PER_S_MEAN, Metric
from perfsuite.results.run import Figures

HIGHER = (TOKENS_PER_S, TOKENS_PER_S_MEAN)
LOWER = (PEAK_MEMORY,)


def test_every_gated_metric_is_a_figure_and_has_a_direction() -> None:
    assert (*HIGHER, *LOWER) == GATED
    assert {metric.name for metric in GATED} <= set(Figures.model_fields)
    assert {metric.better for metric in HIGHER} == {"higher"}
    assert {metric.better for metric in LOWER} == {"lower"}


@pytest.mark.parametrize("metric", HIGHER, ids=lambda m: m.name)
def test_speed_costs_seconds_per_token(metric: Metric) -> None:
    assert metric.cost(4.0) == 0.25
    assert metric.cost(5.0) < metric.cost(4.0)


@pytest.mark.parametrize("metric", LOWER, ids=lambda m: m.name)
def test_what_should_be_low_is_a_cost_as_it_is(metric: Metric) -> None:
    assert metric.cost(4.0) == 4.0


@pytest.mark.parametrize("metric", GATED, ids=lambda m: m.name)
def test_worsening_is_relative_and_positive_for_the_worse(metric: Metric) -> None:
    worse, better = (50, 200) if metric.better == "higher" else (200, 50)
    assert metric.worsening(worse, 100) == pytest.approx(1.0)
    assert metric.worsening(better, 100) == pytest.approx(-0.5)
    assert metric.worsening(100, 100) == 0


@pytest.mark.parametrize("metric", GATED, ids=lambda m: m.name)
def test_worsening_is_the_change_of_the_cost_whatever_the_unit(metric: Metric) -> None:
    assert metric.worsening(93_600, 99_000) == pytest.approx(metric.worsening(936, 990))
    assert 1 + metric.worsening(8, 7) == pytest.approx(1 / (1 + metric.worsening(7, 8)))


@pytest.mark.parametrize(
    ("metric", "cpu", "gpu"),
    [
        (TOKENS_PER_S, 0.15, 0.03),
        (TOKENS_PER_S_MEAN, 0.20, 0.05),
        (PEAK_MEMORY, 0.20, 0.01),
    ],
    ids=lambda value: value.name if isinstance(value, Metric) else str(value),
)
def test_tolerance_depends_on_the_device(metric: Metric, cpu: float, gpu: float) -> None:
    assert (metric.tolerance("cpu"), metric.tolerance("cuda")) == (cpu, gpu)


def test_only_memory_needs_no_statistics_on_an_accelerator() -> None:
    assert [metric for metric in GATED if metric.judging("cuda") == "exact"] == [PEAK_MEMORY]
    assert {metric.judging("cpu") for metric in GATED} == {"sequential"}


EVERYTHING: dict[str, Any] = {
    "name": "x",
    "label": "x",
    "unit": "s",
    "better": "lower",
    "judged": "sequential",
    "tolerances": {"cpu": 0.1, "cuda": 0.1},
}


@pytest.mark.parametrize("missing", ["name", "label", "unit", "better", "judged"])
def test_nothing_that_could_be_guessed_has_a_default(missing: str) -> None:
    with pytest.raises(TypeError, match=missing):
        Metric(**{name: value for name, value in EVERYTHING.items() if name != missing})


@pytest.mark.parametrize("changes", [{}, {"judged": "shown", "judged_on_cpu": "exact"}])
@pytest.mark.parametrize("tolerances", [{}, {"cpu": 0.1}])
def test_what_is_judged_needs_a_tolerance_for_each_device(
    changes: dict[str, Any], tolerances: dict[str, float]
) -> None:
    with pytest.raises(ValueError, match=r"metric 'x' is judged .* needs tolerances for 'cpu' and 'cuda'"):
        Metric(**{**EVERYTHING, **changes, "tolerances": tolerances})
    assert Metric(**{**EVERYTHING, "judged": "shown", "tolerances": {}}).judging("cpu") == "shown"


def test_a_metric_is_recorded_in_the_ranks_or_read_on_the_driver_not_both() -> None:
    with pytest.raises(ValueError, match="metric 'x' has both recorder and read: give one of them"):
        Metric(**{**EVERYTHING, "recorder": object, "read": lambda run: 1.0})


@pytest.mark.parametrize(("better", "change"), [("lower", 0.25), ("higher", -0.2)])
def test_the_change_of_the_figure_follows_from_that_of_its_cost(better: str, change: float) -> None:
    assert Metric(**{**EVERYTHING, "better": better}).change(0.25) == pytest.approx(change)


def test_a_metric_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        TOKENS_PER_S.unit = "s"  # type: ignore[misc]
