"""Draw the values, levels and changes of one series as a small inline SVG. Pure."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from markupsafe import Markup

from perfsuite.report.html.charts import thin

WIDTH = 340
HEIGHT = 58
RIGHT = 64  # margin on the right, for the labels of the highest and the lowest value
EDGE = 8  # margin above and below the chart
LEAST_RANGE = 0.04  # smallest range of a chart, as a fraction of the median: noise must not look large
DOTS = 60  # maximum number of values that are drawn as dots; with more values, only a line is drawn


class Mark(NamedTuple):
    """A change of level."""

    first: int  # index of the first value of the new level
    kind: str  # the class in the style sheet: `worse`, `better`, `past` or `machine`
    text: str


def sparkline(
    values: Sequence[float],
    marks: Sequence[Mark],
    *,
    key: str,
    title: str,
    description: str,
    labels: tuple[str, str],
) -> Markup:
    """Draw a series with its marks. `labels` are the texts for `limits`. `key` must be unique on the page."""
    low, high = drawn_range(values)
    right = WIDTH - RIGHT
    across = (right - 4) / max(len(values) - 1, 1)
    down = (HEIGHT - 2 * EDGE) / (high - low)

    def place(index: float, value: float) -> str:
        return f"{4 + index * across:.1f},{HEIGHT - EDGE - (value - low) * down:.1f}"

    body = []
    for mark in marks:
        at = 4 + (mark.first - 0.5) * across
        line = Markup(
            '<line class="change {}" x1="{:.1f}" y1="2" x2="{:.1f}" y2="{}"><title>{}</title></line>'
        )
        body.append(line.format(mark.kind, at, at, HEIGHT - 2, mark.text))
    points = [place(index, value) for index, value in thin(values)]
    body.append(Markup('<polyline class="values" points="{}"/>').format(" ".join(points)))
    if len(values) <= DOTS:
        dot = Markup('<circle class="value" cx="{}" cy="{}" r="1.6"/>')
        body += [dot.format(*point.split(",")) for point in points]
    for start, end in pairwise([0, *(mark.first for mark in marks), len(values)]):
        level = median(values[start:end])
        # Draw a level from shortly before its first session to shortly after its last, but inside the chart.
        first = max(start - 0.3, 0)
        last = min(end - 0.7, len(values) - 1)
        ends = f"{place(first, level)} {place(last, level)}"
        body.append(Markup('<polyline class="level" points="{}"/>').format(ends))
    text = Markup('<text x="{}" y="{}">{}</text>')
    bottom, top = (HEIGHT - EDGE - (value - low) * down + 4 for value in limits(values))
    # Keep the labels from overlapping.
    apart = max(0.0, 6 - (bottom - top) / 2) if labels[0] != labels[1] else 0.0
    body.append(text.format(right + 8, f"{bottom + apart:.1f}", labels[0]))
    if labels[1] != labels[0]:
        body.append(text.format(right + 8, f"{top - apart:.1f}", labels[1]))
    return Markup(
        '<svg class="spark" role="img" viewBox="0 0 {} {}" aria-labelledby="{key}-t {key}-d">'
        '<title id="{key}-t">{}</title><desc id="{key}-d">{}</desc>{}</svg>'
    ).format(WIDTH, HEIGHT, title, description, Markup("").join(body), key=key)


def limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value. Only these values have labels."""
    return min(values), max(values)


def drawn_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of the chart: the range of the values, but at least `LEAST_RANGE` of the median."""
    low, high = limits(values)
    least = LEAST_RANGE * abs(median(values)) or 1.0
    room = max(0.0, (least - (high - low)) / 2)
    return low - room, high + room
