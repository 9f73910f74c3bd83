"""Draws docs/images/architecture.svg: the processes of a launch, and the files between them."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH = 900
HEIGHT = 440
BOX_HEIGHT = 116
LINE = 17  # pixels between lines of text


class Box(NamedTuple):
    """A box for a process, or for a place with files."""

    left: int
    top: int
    width: int
    kind: str  # `process` or `files`
    name: str
    lines: Sequence[str]


class Arrow(NamedTuple):
    """An arrow for something that goes from one box to another."""

    points: Sequence[tuple[int, int]]
    label: str
    at: tuple[int, int]  # the middle of the label


BOXES = (
    Box(
        20,
        40,
        250,
        "process",
        "driver",
        (
            "pytest or perfsuite, without torch:",
            "launches, collects, judges, and",
            "reports (terminal, HTML, GitHub)",
        ),
    ),
    Box(
        350,
        40,
        200,
        "process",
        "agent",
        ("one on each node:", "starts the ranks, watches", "the node's health"),
    ),
    Box(
        640,
        40,
        240,
        "process",
        "rank",
        (
            "one on each device: the training",
            "itself, with a clock of its steps",
            "and counts of what they do",
        ),
    ),
    Box(
        20,
        270,
        250,
        "files",
        "baselines/",
        ("in your repository, reviewed:", "what a case reached, and", "what its step did"),
    ),
    Box(
        350,
        270,
        200,
        "files",
        "history",
        ("a branch or a directory:", "each night's numbers, to", "find slow changes"),
    ),
    Box(
        640,
        270,
        240,
        "files",
        "store (.perfsuite/)",
        ("on this machine: logs, reports", "of all ranks, results.json", "of each session"),
    ),
)
ARROWS = (
    Arrow(((270, 85), (350, 85)), "case.json", (310, 78)),
    Arrow(((550, 85), (640, 85)), "starts", (595, 78)),
    Arrow(((760, 156), (760, 270)), "rank-N.json", (806, 216)),
    Arrow(((640, 278), (270, 150)), "collects", (490, 200)),
    Arrow(((145, 270), (145, 156)), "judges by", (108, 216)),
    Arrow(((640, 335), (550, 335)), "history add", (595, 328)),
    Arrow(((760, 386), (760, 412), (145, 412), (145, 386)), "baseline accept", (450, 430)),
)
STYLE = """
svg { --text: #1b1f24; --quiet: #57606a; --page: #fff; --card: #f6f8fa; --edge: #d5dae0; --line: #0b5cad;
  font: 13px system-ui, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --text: #e6e9ed; --quiet: #a3acb8; --page: #11151a; --card: #1a2027; --edge: #343c46;
    --line: #7db8ff; }
}
.page { fill: var(--page); }
text { fill: var(--quiet); }
.name { fill: var(--text); font-weight: 600; font-size: 15px; }
.label { text-anchor: middle; fill: var(--line); }
.process { fill: var(--card); stroke: var(--line); stroke-width: 1.5; }
.files { fill: var(--card); stroke: var(--edge); stroke-width: 1.5; stroke-dasharray: 5 3; }
.arrow { fill: none; stroke: var(--line); stroke-width: 1.5; marker-end: url(#head); }
.head { fill: var(--line); }
"""


def picture() -> str:
    """Return the diagram as an SVG, which follows the preferred colours."""
    body = []
    for box in BOXES:
        body.append(
            f'<rect class="{box.kind}" x="{box.left}" y="{box.top}" width="{box.width}" '
            f'height="{BOX_HEIGHT}" rx="8"/>'
        )
        texts = [("name", box.name), *(("line", line) for line in box.lines)]
        for number, (kind, text) in enumerate(texts):
            top = box.top + 30 + number * LINE + (6 if number else 0)
            body.append(f'<text class="{kind}" x="{box.left + 16}" y="{top}">{escape(text)}</text>')
    for arrow in ARROWS:
        points = " ".join(f"{x},{y}" for x, y in arrow.points)
        body.append(f'<polyline class="arrow" points="{points}"/>')
        x, y = arrow.at
        body.append(f'<text class="label" x="{x}" y="{y}">{escape(arrow.label)}</text>')
    description = "; ".join(f"{box.name}: {' '.join(box.lines)}" for box in BOXES)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'aria-labelledby="t d">'
        '<title id="t">The processes of a launch and the files between them</title>'
        f'<desc id="d">{escape(description)}</desc><style>{STYLE}</style>'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker></defs>'
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>' + "\n".join(body) + "</svg>\n"
    )
