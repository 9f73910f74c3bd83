import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from perfsuite.errors import ExtensionError
from perfsuite.results import metric as metrics
from perfsuite.results.metric import (
    CPU_S_PER_STEP,
    DATA_WAIT,
    GATED,
    PEAK_MEMORY,
    TOKENS_PER_S,
    Metric,
    find_metric,
    judged_metrics,
)
from perfsuite.results.run import Figures
from tests.packages import Packages


def test_gated_metrics_have_direction_and_tolerance() -> None:
    assert {metric.name for metric in GATED} <= set(Figures.model_fields)
    assert [metric.better for metric in GATED] == ["higher", "higher", "lower"]
    assert [metric.cost(4.0) for metric in GATED] == [0.25, 0.25, 4.0], "speed costs seconds per token"
    assert [metric.tolerance("cpu") for metric in GATED] == [0.15, 0.20, 0.20]
    assert [metric.tolerance("cuda") for metric in GATED] == [0.03, 0.05, 0.01]
    assert [CPU_S_PER_STEP.tolerance(device) for device in ("cpu", "cuda")] == [0.15, 0.15]
    assert [metric.judging("cpu") for metric in GATED] == ["sequential"] * 3
    assert [metric.judging("cuda") for metric in GATED] == ["sequential", "sequential", "exact"]


@pytest.mark.parametrize("metric", GATED, ids=lambda m: m.name)
def test_worsening_is_the_relative_cost_change(metric: Metric) -> None:
    worse, better = (50, 200) if metric.better == "higher" else (200, 50)
    changes = [metric.worsening(now, 100) for now in (worse, better, 100)]
    assert changes == pytest.approx([1.0, -0.5, 0])
    assert metric.worsening(93_600, 99_000) == pytest.approx(metric.worsening(936, 990))
    assert 1 + metric.worsening(8, 7) == pytest.approx(1 / (1 + metric.worsening(7, 8)))


def test_converts_cost_changes_to_figure_changes() -> None:
    assert TOKENS_PER_S.change(0.25) == pytest.approx(-0.2)
    assert TOKENS_PER_S.change(-0.2) == pytest.approx(0.25)
    assert TOKENS_PER_S.bound(0.15) == pytest.approx(0.1304, abs=1e-4)
    assert TOKENS_PER_S.interval((-0.2, 0.25)) == pytest.approx((-0.2, 0.25))
    assert TOKENS_PER_S.interval((-1.0, math.inf)) == (-1.0, math.inf)
    assert (PEAK_MEMORY.change(0.25), PEAK_MEMORY.bound(0.2)) == (0.25, 0.2)
    assert PEAK_MEMORY.interval((-0.1, 0.2)) == (-0.1, 0.2)


Values = dict[str, Any]
VALUES: Values = {"name": "x", "label": "x", "unit": "s", "better": "lower", "judged": "sequential"}
TOLERANCES: Values = {"tolerances": {"cpu": 0.1, "cuda": 0.1}}


def test_metric_has_no_defaults_and_is_frozen() -> None:
    for missing in VALUES:
        given = {name: value for name, value in VALUES.items() if name != missing}
        with pytest.raises(TypeError, match=missing):
            Metric(**given, **TOLERANCES)
    with pytest.raises(TypeError, match="positional"):
        Metric(*VALUES.values(), TOLERANCES)  # type: ignore[arg-type, call-arg]
    with pytest.raises(FrozenInstanceError):
        TOKENS_PER_S.unit = "s"  # type: ignore[misc]


@pytest.mark.parametrize("changes", [{}, {"judged": "shown", "judged_on_cpu": "exact"}])
@pytest.mark.parametrize("tolerances", [{}, {"cpu": 0.1}])
def test_judged_metric_needs_device_tolerances(changes: Values, tolerances: Values) -> None:
    values = {**VALUES, **changes}
    with pytest.raises(ValueError, match=r"metric 'x' is judged .* needs tolerances for 'cpu' and 'cuda'"):
        Metric(**{**values, "tolerances": tolerances})
    assert Metric(**{**values, "judged": "shown", "judged_on_cpu": None}).judging("cpu") == "shown"


# Metrics of other packages

CODE = """
    from perfsuite.results import Metric

    def metric(name, **how):
        values = {"label": name, "unit": "", "better": "lower", "judged": "shown", "read": lambda run: 1.0}
        return Metric(**{"name": name, **values, **how})

    GOOD = metric("good")
    JUDGED = metric("judged", judged="exact", tolerances={"cpu": 0.1, "cuda": 0.1})
    OTHER = metric("other_name")
    NOTHING = metric("nothing", read=None)
    MFU = metric("mfu")
    NO_METRIC = 3
"""
Installs = Callable[..., None]


@pytest.fixture
def installed(packages: Packages) -> Installs:
    def install_metrics(package: str = "extra-good", **entry_points: str) -> None:
        module = package.replace("-", "_")
        lines = [f"{name} = {module}:{value}" for name, value in entry_points.items()]
        packages.install(package, CODE, metrics="\n".join(lines))

    return install_metrics


def test_finds_own_figures_by_name() -> None:
    assert find_metric("tokens_per_s") is TOKENS_PER_S
    assert find_metric("nobody_has_it") is None
    assert metrics.recorded() == ((), ())
    assert set(metrics._BUILT_IN) <= set(Figures.model_fields)


def test_package_metric_is_judged_where_measured(installed: Installs) -> None:
    installed(good="GOOD", judged="JUDGED")
    assert [metric.name for metric in metrics.recorded().metrics] == ["good", "judged"]
    good = find_metric("good")
    assert good is not None
    assert (good.of(Figures(extra={"good": 2.0})), good.of(Figures())) == (2.0, None)
    launches = [Figures(extra={"good": 1.0}), Figures(extra={"judged": 1.0, "gone": 1.0})]
    assert [metric.name for metric in metrics.extra_metrics(launches)] == ["gone", "good", "judged"]
    assert [metric.name for metric in judged_metrics(launches)] == [
        *(metric.name for metric in GATED),
        "judged",
    ]
    assert (metrics.extra_metrics([Figures()]), judged_metrics([Figures()])) == ((), GATED)


def test_judges_cpu_time_on_a_cpu_where_measured() -> None:
    launches = [Figures(cpu_s_per_step=0.1), Figures()]
    assert (
        judged_metrics(launches, "cpu")
        == judged_metrics(launches)
        == metrics.metrics_of(launches)
        == (*GATED, CPU_S_PER_STEP)
    )
    assert (
        judged_metrics(launches, "cuda")
        == judged_metrics([Figures()], "cpu")
        == metrics.metrics_of([Figures()])
        == GATED
    )
    assert CPU_S_PER_STEP.worsening(0.12, 0.1) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("mfu", "MFU", "used twice: by perfsuite itself, and by extra-bad 1.5 (extra_bad:MFU)"),
        ("x", "NO_METRIC", "extra-bad 1.5 (perfsuite.metrics): it is 3: an entry point of perfsuite.metrics"),
        (
            "x",
            "OTHER",
            "must name a perfsuite.results.Metric that has the same name, and either a recorder or a read",
        ),
        (
            "nothing",
            "NOTHING",
            "must name a perfsuite.results.Metric that has the same name, and either a recorder",
        ),
    ],
)
def test_names_a_metric_that_cannot_be_used(installed: Installs, name: str, value: str, said: str) -> None:
    installed(good="GOOD")
    installed("extra-bad", **{name: value})
    usable, [problem] = metrics.recorded()
    assert [metric.name for metric in usable] == ["good"]
    assert said in problem
    assert "pip uninstall extra-bad" in problem


def test_a_broken_metric_is_an_error_by_name(installed: Installs) -> None:
    installed("extra-bad", x="NO_METRIC")
    with pytest.raises(ExtensionError):
        find_metric("x")


def test_a_broken_metric_is_described(installed: Installs) -> None:
    installed("extra-bad", x="NO_METRIC")
    assert metrics.described("x").label == "x (its package cannot be used)"


WAITED = [Figures(data_wait_s=wait_s, step_s_mean=1.0 + wait_s) for wait_s in (0.1, 0.11, 0.3)]


def test_data_wait_is_judged_as_share_of_step() -> None:
    metric = DATA_WAIT.against(WAITED)
    assert (metric.step_s, metric.rest_s) == pytest.approx((1.11, 1.0))
    assert metric.worsening(0.11, 0.11) == 0
    assert metric.worsening(0.11 + 0.555, 0.11) == pytest.approx(0.5)
    assert metric.worsening(0.11, 0.665) == pytest.approx(-1 / 3)


def test_tiny_wait_may_grow_a_thousandfold() -> None:
    metric = DATA_WAIT.against([Figures(data_wait_s=1e-6, step_s_mean=0.2)])
    assert metric.worsening(1e-3, 1e-6) == pytest.approx(0.005, rel=0.01)


@pytest.mark.parametrize(("step_s", "floor"), [(10.0, 0.02), (0.05, 0.02), (0.01, 0.1)])
def test_floor_is_a_share_of_a_step_or_1_ms(step_s: float, floor: float) -> None:
    metric = DATA_WAIT.against([Figures(data_wait_s=1e-5, step_s_mean=step_s)])
    assert metric.floor == pytest.approx(floor)


def test_judges_data_wait_where_a_loader_was_seen() -> None:
    assert judged_metrics([Figures(), WAITED[0]], "cuda") == (*GATED, DATA_WAIT)
    assert judged_metrics([Figures()], "cuda") == GATED
    assert DATA_WAIT.against([Figures(), Figures(step_s_mean=1.0)]) is DATA_WAIT


def test_figures_of_spans_have_names_of_their_own() -> None:
    figures = Figures(tokens_per_s=1, spans_s={"save checkpoint": 2.0}, extra={"mine": 3.0})
    assert figures.by_name() == {"tokens_per_s": 1, "seconds of save checkpoint": 2, "mine": 3}
    assert Figures.of(figures.by_name()) == figures


def test_judges_every_span_but_cold_and_whole_ones() -> None:
    names = ["cold start-up: imports", "save checkpoint", "start-up", "start-up: imports"]
    figures = Figures(spans_s=dict.fromkeys(names, 1.0))
    of_spans = judged_metrics([figures], "cuda")[len(GATED) :]
    assert [metric.label for metric in of_spans] == ["save checkpoint", "start-up: imports"]
    assert find_metric("seconds of start-up: imports") == of_spans[-1]
