from __future__ import annotations

import math
from typing import Any

import pytest

from perfsuite.errors import ReportError
from perfsuite.results.figures import (
    _energy_per_token_j,
    _gpu_utilisation,
    extra_figures,
    median_figures,
)
from perfsuite.results.metric import Metric
from perfsuite.results.run import DeviceHealth, Figures, Run
from tests.results.test_health import make_health
from tests.samples import make_report, make_run


def make_metric(**changes: Any) -> Metric:
    values = {"name": "x", "label": "x", "unit": "", "better": "lower", "judged": "shown", "recorder": object}
    return Metric(**{**values, **changes})


def merged(metric: Metric, *values: float | None) -> dict[str, float]:
    reports = [
        make_report(rank, world_size=len(values), extra={} if value is None else {"x": value, "y": 9.0})
        for rank, value in enumerate(values)
    ]
    return extra_figures(make_run(), reports, [metric])


@pytest.mark.parametrize(
    ("across_ranks", "expected"), [("max", 4.0), ("min", 1.0), ("sum", 7.0), ("mean", 7 / 3)]
)
def test_the_value_of_a_launch_is_made_of_those_of_its_ranks(across_ranks: str, expected: float) -> None:
    assert merged(make_metric(across_ranks=across_ranks), 2.0, 4.0, 1.0) == {"x": pytest.approx(expected)}


def test_ranks_without_a_value_are_left_out() -> None:
    assert merged(make_metric(across_ranks="mean"), None, 4.0) == {"x": 4.0}
    assert merged(make_metric(), None, None) == {}


def test_ranks_that_have_to_be_equal_are_or_it_is_an_error() -> None:
    metric = make_metric(across_ranks="equal")
    assert merged(metric, 2.0, 2.0) == {"x": 2.0}
    with pytest.raises(ReportError, match=r"ranks disagree on x \(rank 0: 2, rank 1: 3\), which has to"):
        merged(metric, 2.0, 3.0)


def test_a_metric_is_read_out_of_the_whole_run() -> None:
    def steps(run: Run) -> float | None:
        return len(run.step_s) or None

    metric = make_metric(recorder=None, read=steps)
    assert extra_figures(make_run(), [make_report()], [metric]) == {"x": 25.0}
    assert extra_figures(make_run(step_s=()), [make_report()], [metric]) == {}


def test_an_error_of_read_names_the_metric_and_says_what_to_do() -> None:
    def fails(run: Run) -> float:
        raise KeyError("clock")

    metric = make_metric(recorder=None, read=fails)
    with pytest.raises(
        ReportError, match=r"metric 'x' could not be read out of the launch: KeyError: 'clock'\. Mend"
    ):
        extra_figures(make_run(), [], [metric])


def test_medians_are_over_the_launches_that_have_a_figure() -> None:
    launches = [
        Figures(tokens_per_s=1, mfu=0.4, extra={"x": 5}),
        Figures(tokens_per_s=3, extra={"x": 7}),
        Figures(tokens_per_s=math.inf, extra={"y": 1}),
    ]
    assert median_figures(launches) == Figures(tokens_per_s=3, mfu=0.4, extra={"x": 6, "y": 1})
    assert median_figures([]) == Figures()


def test_utilisation_and_energy_are_those_of_the_gpus_that_tell() -> None:
    devices = tuple(
        DeviceHealth(index=index, utilisation=90.0 + index, energy_j=3000.0 + index) for index in range(3)
    )
    told = make_health(devices=devices)
    assert _gpu_utilisation(told) == 91
    assert _energy_per_token_j(told, 100) == pytest.approx(9003 / 1900)
    silent = make_health(devices=(*devices, DeviceHealth(index=3)))
    assert _gpu_utilisation(silent) == 91
    assert _energy_per_token_j(silent, 100) is None
    for nothing in (None, make_health()):
        assert _gpu_utilisation(nothing) is None
        assert _energy_per_token_j(nothing, 100) is None
