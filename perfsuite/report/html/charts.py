"""Draw charts as inline SVG, which works offline, with screen readers, and in light and dark colours.

Each chart has a title and a description with its most important numbers. Colour is never the only
distinction.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import quantiles
from typing import NamedTuple

from markupsafe import Markup

from perfsuite.report.text import between, percent
from perfsuite.results.amounts import duration
from perfsuite.results.metric import described
from perfsuite.results.outcome import Check
from perfsuite.results.run import Run

WIDTH = 360
HEIGHT = 160
# Margins for the labels of the axes.
LEFT = 46
RIGHT = 8
TOP = 14
BOTTOM = 30
FOOT = HEIGHT - BOTTOM  # position of the horizontal axis
LITTLE = 0.25  # an axis does not begin at 0 if the lowest value is more than this share of the highest
CUT = 14  # space for the mark of an axis that does not begin at 0
CHANGE_SIZE = (300, 46)  # width and height of the chart of a change
CHANGE_FOOT = 29  # position of the axis in that chart
# Number of buckets into which a long series is divided. If a series has more than twice this many points,
# only the extremes of each bucket are drawn.
BUCKETS = 150
ROOM = 0.35
"""Free space above and below ordinary steps, as a share of their range. Longer steps are marked at the upper
edge: drawn to scale, they would flatten the curve of all other steps."""

Point = tuple[int, float]
Size = tuple[int, int]


class Figure(NamedTuple):
    """A chart and its caption."""

    chart: Markup
    caption: str


class Band(NamedTuple):
    """The baseline's step time and the longest step time within the tolerance, in seconds."""

    baseline_s: float
    allowed_s: float


class Scale(NamedTuple):
    """A mapping from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel of a value; values off the scale are drawn at its edge."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0), 1) * (self.end - self.start)

    def ticks(self, most: int = 4) -> list[float]:
        """Return round values on the scale, at most `most` + 1."""
        rough = (self.high - self.low) / most
        magnitude = 10 ** math.floor(math.log10(rough))
        step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= 0.999 * rough)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(tick * step, 12) for tick in range(first, last + 1)]


def thin(values: Sequence[float]) -> list[Point]:
    """Return a series as (index, value). A long series is reduced to its extremes, so that stalls remain."""
    points = list(enumerate(values))
    if len(points) <= 2 * BUCKETS:
        return points
    kept: list[Point] = []
    for number in range(BUCKETS):
        bucket = points[number * len(points) // BUCKETS : (number + 1) * len(points) // BUCKETS]
        finite = [point for point in bucket if math.isfinite(point[1])] or bucket[:1]
        kept += sorted({min(finite, key=itemgetter(1)), max(finite, key=itemgetter(1))})
    return kept


def step_range(runs: Sequence[Run], band: Band | None) -> tuple[float, float]:
    """Return the range of step times, in seconds, that is drawn to scale for a case's launches."""
    measured = [step for run in runs for step in run.measured_steps if math.isfinite(step)]
    step_times = measured or [step for run in runs for step in run.step_s if math.isfinite(step)]
    ordinary = quantiles(step_times, n=20, method="inclusive") if len(step_times) > 1 else step_times or [1.0]
    marks = [band.baseline_s, band.allowed_s] if band is not None else []
    low = min([*step_times, *marks], default=0)
    high = max([ordinary[-1], *marks, 1e-6])
    room = max(high - low, 0.05 * high)
    return max(0.0, low - room * ROOM), high + room * ROOM


def steps(run: Run, *, key: str, title: str, range_s: tuple[float, float], band: Band | None) -> Markup:
    """Draw every step of a launch, the measured window, the baseline and the tolerance."""
    unit, factor = ("s", 1.0) if range_s[1] >= 10 else ("ms", 1e3)
    x = _across(len(run.step_s))
    y = _up(range_s[0] * factor, range_s[1] * factor)
    start, stop = run.window
    body = []
    if start < stop:
        left = x(start)
        body.append(_rect("window", left, TOP, x(stop - 1) - left, FOOT - TOP))
        body.append(_text("note", left + 3, TOP - 4, "measured"))
        if left - LEFT > 50:
            body.append(_text("note", LEFT + 3, TOP - 4, "warm-up"))
    if band is not None:
        upper = y(band.allowed_s * factor)
        lower = y(band.baseline_s * factor)
        body.append(_rect("band", LEFT, upper, x.end - LEFT, lower - upper))
        body.append(_line("baseline", LEFT, lower, x.end, lower))
    body += [*_axes(x, y, unit), *_curve([step * factor for step in run.step_s], x, y)]
    for step in beyond(run, range_s[1]):
        at = x(step)
        points = f"{at - 4:.1f},{y.end + 7:.1f} {at + 4:.1f},{y.end + 7:.1f} {at:.1f},{y.end:.1f}"
        body.append(Markup('<polygon class="off" points="{}"/>').format(points))
    return _image(key, title, _description(run, band), body)


def beyond(run: Run, highest_s: float) -> list[int]:
    """Return the measured steps that are off the scale. Without a measured window, all steps are searched."""
    start, stop = run.window if run.measured_steps else (0, len(run.step_s))
    return [step for step in range(start, stop) if highest_s < run.step_s[step] < math.inf]


def _description(run: Run, band: Band | None) -> str:
    figures = run.figures
    start, stop = run.window
    description = f"{len(run.step_s)} steps"
    if start < stop:
        description += f", measured from step {start} to {stop - 1}"
    if figures.step_s_p50 is not None:
        description += f": median {duration(figures.step_s_p50)}"
    finite = [(value, step) for step, value in enumerate(run.step_s) if math.isfinite(value)]
    if finite:
        value, step = max(finite)
        description += f"; longest {duration(value)} at step {step}"
    if band is not None:
        description += f". Baseline {duration(band.baseline_s)}, allowed up to {duration(band.allowed_s)}"
    return description + "."


def losses(runs: Sequence[Run], *, key: str) -> Markup | None:
    """Draw the loss curves of all launches in one chart; None without a finite loss."""
    curves = {number: run.loss for number, run in enumerate(runs, 1) if run.loss}
    finite = [loss for curve in curves.values() for loss in curve if math.isfinite(loss)]
    if not finite:
        return None
    low = min(finite)
    high = max(finite)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    x = _across(max(map(len, curves.values())))
    y = _up(low - room, high + room)
    body = [*_axes(x, y), *(part for curve in curves.values() for part in _curve(curve, x, y))]
    descriptions = [
        f"launch {number}: from {curve[0]:.4f} to {curve[-1]:.4f}" for number, curve in curves.items()
    ]
    return _image(key, "Loss of each launch by step", f"{'; '.join(descriptions)}.", body)


def interval(check: Check, *, key: str) -> Markup | None:
    """Draw a metric's change with its 99% interval on an axis in percent, with zero and the tolerance."""
    if check.change is None or not math.isfinite(check.change):
        return None
    low, high = check.interval or (check.change, check.change)
    allowed = -check.allowed if described(check.metric).better == "higher" else check.allowed
    width, height = CHANGE_SIZE
    x = Scale(*_change_range((0, allowed, check.change), (low, high)), 12, width - 12)
    middle = CHANGE_FOOT / 2
    body = [_line("grid", 0, CHANGE_FOOT, width, CHANGE_FOOT)]
    for tick in Scale(100 * x.low, 100 * x.high, 0, 1).ticks():
        at = x(tick / 100)
        body.append(_line("grid", at, CHANGE_FOOT, at, CHANGE_FOOT + 4))
        body.append(_text("tick middle", at, height - 3, f"{tick:+,g}%" if tick else "0"))
    body += [
        _line("axis", x(0), 0, x(0), CHANGE_FOOT),
        _line("allowed", x(allowed), 0, x(allowed), CHANGE_FOOT),
        _rect("interval", x(low), middle - 5, x(high) - x(low), 10),
        _end(x, low, middle),
        _end(x, high, middle),
        Markup('<circle class="estimate" cx="{:.1f}" cy="{:.1f}" r="3"/>').format(x(check.change), middle),
    ]
    description = (
        f"{percent(check.change)}, 99% interval {between((low, high))}, {check.allowed:.1%} allowed."
    )
    return _image(key, f"Change of {check.label}", description, body, CHANGE_SIZE)


def _end(x: Scale, value: float, middle: float) -> Markup:
    """Draw one end of an interval: a cap, or an arrowhead at the edge if the end is off the scale."""
    at = x(value)
    if x.low <= value <= x.high:
        return _line("end", at, middle - 8, at, middle + 8)
    tip = at - 8 if value < x.low else at + 8
    points = f"{at:.1f},{middle - 8:.1f} {at:.1f},{middle + 8:.1f} {tip:.1f},{middle:.1f}"
    return Markup('<polygon class="beyond" points="{}"/>').format(points)


def _change_range(marks: Sequence[float], ends: tuple[float, float]) -> tuple[float, float]:
    """Return the range of changes to draw. An interval that is much wider than the marks is cut."""
    span = max(marks) - min(marks) or 0.01
    low = max(min(*marks, ends[0]), min(marks) - span)
    high = min(max(*marks, ends[1]), max(marks) + span)
    room = 0.1 * (high - low)
    return low - room, high + room


def _image(
    key: str, title: str, description: str, body: Sequence[Markup], size: Size = (WIDTH, HEIGHT)
) -> Markup:
    return Markup(
        '<svg class="chart" role="img" viewBox="0 0 {size[0]} {size[1]}" aria-labelledby="{key}-t {key}-d">'
        '<title id="{key}-t">{title}</title><desc id="{key}-d">{description}</desc>{body}</svg>'
    ).format(key=key, title=title, description=description, size=size, body=Markup("").join(body))


def _across(steps: int) -> Scale:
    return Scale(0, max(steps - 1, 1), LEFT, WIDTH - RIGHT)


def _up(low: float, high: float) -> Scale:
    """Return the vertical scale: from 0 if that takes little space, otherwise with a broken axis."""
    low = 0.0 if 0 < low < LITTLE * high else low
    return Scale(low, high, FOOT - CUT if low > 0 else FOOT, TOP)


def _axes(x: Scale, y: Scale, unit: str = "") -> Iterator[Markup]:
    yield from _cut(x, y) if y.low > 0 else ()
    for tick in y.ticks():
        yield _line("grid", x.start, y(tick), x.end, y(tick))
        yield _text("tick end", x.start - 5, y(tick) + 3.5, f"{tick:,g}")
    for tick in x.ticks(5):
        yield _text("tick middle", x(tick), FOOT + 14, f"{tick:,g}")
    yield _line("axis", x.start, FOOT, x.end, FOOT)
    yield _text("note", 2, TOP - 4, unit)
    yield _text("note end", x.end, FOOT + 27, "step")


def _cut(x: Scale, y: Scale) -> Iterator[Markup]:
    """Draw a broken axis: a line below the drawn values, a zigzag, and 0 at the foot."""
    places = [(0, TOP), (0, y.start), (-4, y.start + 3), (4, y.start + 8), (0, y.start + 11), (0, FOOT)]
    points = " ".join(f"{x.start + shift:.1f},{at:.1f}" for shift, at in places)
    yield Markup('<polyline class="cut" points="{}"/>').format(points)
    yield _text("tick end", x.start - 5, FOOT + 3.5, "0")


def _curve(values: Sequence[float], x: Scale, y: Scale) -> Iterator[Markup]:
    """Yield lines through the finite points, with gaps at points that are not finite."""
    for is_finite, group in groupby(thin(values), key=lambda point: math.isfinite(point[1])):
        if is_finite:
            path = [f"{x(at):.1f},{y(value):.1f}" for at, value in group]
            path = path if len(path) > 1 else path * 2  # a single point becomes a dot
            yield Markup('<polyline class="line" points="{}"/>').format(" ".join(path))


def _rect(kind: str, x: float, y: float, width: float, height: float) -> Markup:
    element = Markup('<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"/>')
    return element.format(kind, x, y, max(width, 0), max(height, 0))


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    element = Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>')
    return element.format(kind, x1, y1, x2, y2)


def _text(kind: str, x: float, y: float, text: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(kind, x, y, text)
