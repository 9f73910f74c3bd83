import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfsuite.report.html import charts
from perfsuite.report.html.charts import BUCKETS, Band, Scale, thin
from tests.samples import deterministic, make_figures, make_run, metric_check

BAND = Band(baseline_s=0.1, allowed_s=0.103)


def parts(svg: str, kind: str) -> list[dict[str, str]]:
    """Return the attributes of all elements with this class. The chart must be well-formed."""
    return [
        dict(element.attrib) for element in ElementTree.fromstring(svg).iter() if element.get("class") == kind
    ]


def description(svg: str) -> str:
    """Return the description of a chart, which a screen reader reads after the title."""
    chart = ElementTree.fromstring(svg)
    assert chart.get("role") == "img"
    by_id = {element.get("id"): element.text for element in chart.iter()}
    title, text = (by_id[key] for key in chart.attrib["aria-labelledby"].split())
    assert title
    return text or ""


def step_chart(step_s: tuple[float, ...], window: tuple[int, int], band: Band | None = BAND) -> str:
    run = make_run(step_s=step_s, window=window)
    range_s = charts.step_range([run], band)
    return charts.steps(run, key="k", title="Launch <1>", range_s=range_s, band=band)


@deterministic
@given(
    st.integers(2 * BUCKETS + 1, 5000),
    st.lists(st.tuples(st.integers(0, 4999), st.floats(2, 100)), min_size=1, max_size=5),
)
def test_thinning_keeps_lone_stalls_and_order(count: int, stalls: list[tuple[int, float]]) -> None:
    values = [1.0] * count
    for step, length in stalls:
        values[step % count] = length
    kept = thin(values)
    assert len(kept) <= 2 * BUCKETS
    assert kept == sorted(kept)
    assert all(values[step] == value for step, value in kept)
    assert {max(values), min(values)} <= {value for _, value in kept}


def test_thins_only_long_series_despite_nan() -> None:
    short = [float(value) for value in range(2 * BUCKETS)]
    assert thin(short) == list(enumerate(short))
    values = [math.nan if step % 2 else 1.0 + step for step in range(1000)]
    assert max(value for _, value in thin(values)) == 999.0
    assert all(math.isnan(value) for _, value in thin([math.nan] * 1000))


@deterministic
@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_clamp_to_the_scale(low: float, span: float) -> None:
    scale = Scale(low=low, high=low + span, start=100, end=0)
    if scale.high - scale.low < 1e-9 * abs(low):
        return  # both ends are almost the same float
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 6
    slack = 1e-6 * span + 1e-9
    assert low - slack <= ticks[0] <= ticks[-1] <= low + span + slack
    assert [scale(value) for value in (low - span, low, low + span, low + 3 * span)] == [100, 100, 0, 0]


def test_step_chart_marks_but_clips_stalls() -> None:
    run = make_run(step_s=(0.5, *[0.1] * 30, 0.25), window=(1, 32), figures=make_figures(step_s_p50=0.1))
    measured = "32 steps, measured from step 1 to 31: median 100.0 ms; longest 500.0 ms at step 0"
    drawn = charts.steps(run, key="k", title="T", range_s=(0, 1), band=BAND)
    assert description(drawn) == f"{measured}. Baseline 100.0 ms, allowed up to 103.0 ms."
    svg = step_chart((0.1,) * 40 + (9.0,) + (0.101,) * 20, (5, 61))
    [mark] = parts(svg, "off")
    [line] = parts(svg, "line")
    heights = [float(point.split(",")[1]) for point in line["points"].split()]
    assert min(heights) == charts.TOP
    assert max(heights) - sorted(heights)[1] > 3  # a change of 1% is visible
    peak = line["points"].split()[40].split(",")[0]
    assert mark["points"].endswith(f" {peak},{charts.TOP:.1f}")
    assert parts(step_chart((9.0, 3.0, *[0.1] * 40), (2, 42)), "off") == [], "warm-up has no marks"


def test_window_and_band_are_drawn_in_place() -> None:
    svg = step_chart((0.1,) * 101, (50, 101))
    [window], [band], [baseline] = (parts(svg, kind) for kind in ("window", "band", "baseline"))
    middle = charts.LEFT + (charts.WIDTH - charts.LEFT - charts.RIGHT) / 2
    assert float(window["x"]) == pytest.approx(middle)
    height = float(band["height"])
    assert 0 < height == pytest.approx(float(baseline["y1"]) - float(band["y"]), abs=0.2)


def test_a_step_off_the_chart_is_marked() -> None:
    bare = step_chart((0.1,) * 30 + (5.0,), (0, 0), band=None)
    assert [len(parts(bare, kind)) for kind in ("window", "band", "off")] == [0, 0, 1]


@pytest.mark.parametrize("step_s", [(math.nan,) * 5, (0.0,) * 5, (math.inf, 0.1, 0.1, math.nan, 0.1), (0.1,)])
def test_steps_without_a_finite_time_leave_a_gap(step_s: tuple[float, ...]) -> None:
    svg = step_chart(step_s, (0, len(step_s)), band=None)
    assert not re.search(r'="[^"]*(nan|inf)', svg)
    drawn = sum(len(set(line["points"].split())) for line in parts(svg, "line"))
    assert drawn == sum(map(math.isfinite, step_s))


def test_the_caption_lists_losses_by_launch() -> None:
    runs = [make_run(loss=(3.0, 2.5, 2.0)), make_run(loss=()), make_run(loss=(3.0, math.nan, 1.0, 0.5))]
    svg = charts.losses(runs, key="k")
    assert svg is not None
    assert description(svg) == "launch 1: from 3.0000 to 2.0000; launch 3: from 3.0000 to 0.5000."
    assert len(parts(svg, "line")) == 3  # the second curve has two pieces


@pytest.mark.parametrize(
    ("loss", "is_drawn"),
    [((), False), ((math.nan, math.inf), False), ((0.0, 0.0), True), ((1e30, 1e30), True), ((2.0,), True)],
    ids=["none", "not finite", "0", "huge", "one"],
)
def test_only_finite_losses_are_drawn(loss: tuple[float, ...], is_drawn: bool) -> None:
    assert (charts.losses([make_run(loss=loss)], key="k") is not None) is is_drawn


def interval(**changes: object) -> str:
    values = {"allowed": 0.03, "change": -0.1, "interval": (-0.12, -0.08), **changes}
    svg = charts.interval(metric_check(**values), key="k")
    assert svg is not None
    return svg


def labels(svg: str) -> list[str]:
    texts = ElementTree.fromstring(svg).iter("text")
    return [element.text or "" for element in texts if (element.get("class") or "").startswith("tick")]


def test_a_change_is_drawn_between_zero_and_limit() -> None:
    svg = interval()
    assert description(svg) == "-10.0%, 99% interval -12.0% to -8.0%, 3.0% allowed."
    [zero], [allowed], [bar], [dot] = (
        parts(svg, kind) for kind in ("axis", "allowed", "interval", "estimate")
    )
    places = [float(place) for place in (bar["x"], dot["cx"], allowed["x1"], zero["x1"])]
    assert sorted(places) == places


def test_more_memory_is_drawn_on_the_other_side() -> None:
    more_memory = interval(metric="peak_memory_bytes", unit="bytes", change=0.1, interval=None)
    [zero], [allowed], [dot] = (parts(more_memory, kind) for kind in ("axis", "allowed", "estimate"))
    assert float(zero["x1"]) < float(allowed["x1"]) < float(dot["cx"]), "on the other side"


def test_the_axis_of_a_change_has_percent_and_zero() -> None:
    assert labels(interval()) == ["-10%", "-5%", "0"]
    assert labels(interval(change=-0.001, interval=(-0.002, 0.001))) == ["-3%", "-2%", "-1%", "0"]


def test_a_narrow_interval_shows_around_its_dot() -> None:
    svg = interval(change=-0.2, interval=(-0.21, -0.19), allowed=0.13)
    [bar], [dot] = parts(svg, "interval"), parts(svg, "estimate")
    assert float(bar["width"]) > 2 * float(dot["r"])
    assert len(parts(svg, "end")) == 2


def test_open_intervals_reach_the_edges() -> None:
    [bar] = parts(interval(interval=(-1.0, math.inf)), "interval")
    assert (float(bar["x"]), float(bar["width"])) == pytest.approx((34, 276), abs=22)


@pytest.mark.parametrize(
    ("ends", "caps"),
    [((-0.12, -0.08), 2), ((-1.0, -0.08), 1), ((-0.12, math.inf), 1), ((-1.0, math.inf), 0)],
)
def test_only_ends_on_the_axis_have_caps(ends: tuple[float, float], caps: int) -> None:
    svg = interval(interval=ends)
    assert len(parts(svg, "end")) == caps
    assert len(parts(svg, "beyond")) == 2 - caps


def test_an_arrowhead_shows_on_which_side_an_end_is() -> None:
    [arrow] = parts(interval(interval=(-1.0, -0.08)), "beyond")
    assert arrow["points"] == "12.0,6.5 12.0,22.5 4.0,14.5"
    [arrow] = parts(interval(interval=(-0.12, math.inf)), "beyond")
    assert arrow["points"] == "288.0,6.5 288.0,22.5 296.0,14.5"


@pytest.mark.parametrize("change", [None, math.nan])
def test_unknown_changes_have_no_chart(change: float | None) -> None:
    assert charts.interval(metric_check(change=change, interval=None), key="k") is None


def test_an_axis_that_leaves_out_values_is_broken() -> None:
    cut = step_chart((0.1,) * 20, (0, 20))
    assert len(parts(cut, "cut")) == 1
    assert labels(cut)[0] == "0"
    whole = charts.steps(make_run(), key="k", title="T", range_s=(0.0, 1.0), band=None)
    assert parts(whole, "cut") == []
    nearly = charts.steps(make_run(), key="k", title="T", range_s=(0.1, 1.0), band=None)
    assert parts(nearly, "cut") == []
    assert labels(nearly)[0] == "0"
