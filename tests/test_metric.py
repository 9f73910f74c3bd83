from __future__ import annotations

import pytest

from perfsuite.metric import GATED, PEAK_MEMORY, TOKENS_PER_S, Metric
from perfsuite.result import Figures


@pytest.mark.parametrize(
    ("metric", "now", "before", "worsening"),
    [
        (TOKENS_PER_S, 90, 100, 0.1),
        (TOKENS_PER_S, 110, 100, -0.1),
        (PEAK_MEMORY, 110, 100, 0.1),
        (PEAK_MEMORY, 90, 100, -0.1),
        (TOKENS_PER_S, 100, 100, 0),
        (PEAK_MEMORY, 100, 100, 0),
        (TOKENS_PER_S, 0, 100, 1),
    ],
)
def test_worsening_is_relative_and_positive_for_the_worse(
    metric: Metric, now: float, before: float, worsening: float
) -> None:
    assert metric.worsening(now, before) == pytest.approx(worsening, abs=1e-12)


def test_worsening_from_nothing_is_no_crash() -> None:
    """A tiny model's memory on a CPU can be 0 above the level before it."""
    assert PEAK_MEMORY.worsening(0, 0) == 0
    assert PEAK_MEMORY.worsening(10**6, 0) > 1


@pytest.mark.parametrize(
    ("metric", "cpu", "gpu"), [(TOKENS_PER_S, 0.15, 0.03), (PEAK_MEMORY, 0.15, 0.01)], ids=lambda v: str(v)
)
def test_tolerance_depends_on_the_device(metric: Metric, cpu: float, gpu: float) -> None:
    assert (metric.tolerance("cpu"), metric.tolerance("cuda")) == (cpu, gpu)


def test_every_gated_metric_is_a_figure() -> None:
    assert [metric.name for metric in GATED] == ["tokens_per_s", "peak_memory_bytes"]
    assert {metric.name for metric in GATED} <= set(Figures.model_fields)


@pytest.mark.parametrize("missing", ["name", "unit", "better", "tolerance_cpu", "tolerance_gpu"])
def test_nothing_about_a_metric_has_a_default(missing: str) -> None:
    everything = {
        "name": "x",
        "unit": "s",
        "better": "lower",
        "tolerance_cpu": 0.1,
        "tolerance_gpu": 0.1,
    }
    del everything[missing]
    with pytest.raises(TypeError, match=missing):
        Metric(**everything)  # type: ignore[arg-type]
