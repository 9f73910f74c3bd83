"""Draws docs/images/detection.svg: the share of nights on which the real engine finds a slowdown.

The shares are simulated, which takes minutes. They are kept in docs/images/detection.json with a digest of
the engine.
"""

import ast
import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import perfsuite.verdict.robust
import perfsuite.verdict.sequential
from tests.benchmarks import simulated_gate

FILE = Path(__file__).parents[2] / "docs" / "images" / "detection.json"
ENGINE = (perfsuite.verdict.sequential, perfsuite.verdict.robust, simulated_gate)
NOISES = (0.005, 0.01, 0.02)
FIXED = 0.01  # the noise for which the fixed threshold is drawn
SLOWDOWNS = (0.0, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.045, 0.05, 0.06)
TOLERANCE = 0.03
TRIALS = 4_000
WIDTH = 760
HEIGHT = 360
LEFT = 56
RIGHT = 16
TOP = 40
BOTTOM = 48


def engine() -> str:
    """Return a digest of the code that judges, without its comments and docstrings."""
    digest = hashlib.sha256()
    for module in ENGINE:
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [statement for statement in body if not _is_text(statement)]  # type: ignore[attr-defined]
        digest.update(_dumped(tree).encode())
    return digest.hexdigest()[:16]


def _dumped(value: object) -> str:
    """Return a syntax tree as text. Empty fields are left out, because each Python has other ones."""
    if isinstance(value, list):
        return f"[{', '.join(map(_dumped, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [f"{name}={_dumped(field)}" for name, field in ast.iter_fields(value) if field not in (None, [])]
    return f"{type(value).__name__}({', '.join(fields)})"


def _is_text(node: ast.AST) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)  # type: ignore[attr-defined]


def simulated(trials: int = TRIALS) -> dict[str, Any]:
    """Simulate nights at each noise, and return the shares of nights on which a slowdown is found."""
    tables = {
        noise: simulated_gate.simulate(sigma=noise, tolerance=TOLERANCE, drops=SLOWDOWNS, trials=trials)
        for noise in NOISES
    }
    fixed = [[row.true, row.fixed_5_percent] for row in tables[FIXED].rows]
    return {
        "engine": engine(),
        "trials": trials,
        "found": {
            f"{noise:g}": [[row.true, row.regressed] for row in table.rows] for noise, table in tables.items()
        },
        "fixed": fixed,
    }


def known() -> dict[str, Any]:
    """Return the stored shares. Raises OSError if there are none."""
    shares: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return shares


def update() -> None:
    """Simulate again if the engine has changed since the last simulation."""
    if not FILE.exists() or known()["engine"] != engine():
        FILE.write_text(json.dumps(simulated(), indent=1) + "\n", encoding="utf-8")


def picture() -> str:
    """Return the curves as an SVG, which follows the preferred colours."""
    shares = known()
    right = WIDTH - RIGHT
    foot = HEIGHT - BOTTOM
    most = SLOWDOWNS[-1]

    def across(slowdown: float) -> float:
        return LEFT + slowdown / most * (right - LEFT)

    def up(share: float) -> float:
        return foot - share * (foot - TOP)

    def line(kind: str, points: Sequence[Sequence[float]]) -> str:
        places = " ".join(f"{across(slowdown):.1f},{up(share):.1f}" for slowdown, share in points)
        return f'<polyline class="{kind}" points="{places}"/>'

    body = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        body.append(
            f'<line class="grid" x1="{LEFT}" y1="{up(share):.1f}" x2="{right}" y2="{up(share):.1f}"/>'
        )
        body.append(f'<text class="end" x="{LEFT - 8}" y="{up(share) + 4:.1f}">{share:.0%}</text>')
    for number in range(7):
        at = across(number / 100)
        body.append(f'<line class="axis" x1="{at:.1f}" y1="{foot}" x2="{at:.1f}" y2="{foot + 4}"/>')
        body.append(f'<text class="middle" x="{at:.1f}" y="{foot + 18}">{number}%</text>')
    at = across(TOLERANCE)
    body.append(f'<line class="allowed" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{foot}"/>')
    body.append(f'<text x="{at + 6:.1f}" y="{foot - 8}">allowed: {TOLERANCE:.0%}</text>')
    named = [("fixed", "one launch, fixed 5%", shares["fixed"])]
    named += [
        (f"curve n{number}", f"noise {float(noise):.1%}", points)
        for number, (noise, points) in enumerate(shares["found"].items())
    ]
    for number, (kind, name, points) in enumerate(reversed(named)):
        body.append(line(kind, points))
        y = TOP + 26 + number * 22
        body.append(f'<polyline class="{kind}" points="{LEFT + 12},{y} {LEFT + 36},{y}"/>')
        body.append(f'<text x="{LEFT + 44}" y="{y + 4}">{name}</text>')
    title = "How often a slowdown is found the same night"
    description = "; ".join(
        f"at {float(noise):.1%} noise "
        + ", ".join(f"{slowdown:.1%}: {share:.1%}" for slowdown, share in points)
        for noise, points in shares["found"].items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'aria-labelledby="t d"><title id="t">{title}</title><desc id="d">{escape(description)}</desc>'
        f"<style>{STYLE}</style>"
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>'
        f'<text class="heading" x="{LEFT}" y="18">'
        f"found the same night, of {shares['trials']:,} simulated</text>"
        + "\n".join(body)
        + f'<text class="end" x="{right}" y="{HEIGHT - 8}">'
        "true slowdown (time per token); noise is that between launches</text></svg>\n"
    )


STYLE = """
svg { --text: #1b1f24; --quiet: #57606a; --page: #fff; --edge: #d5dae0; --red: #a40e26;
  --n0: #14652b; --n1: #0b5cad; --n2: #7a4d00; font: 13px system-ui, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --text: #e6e9ed; --quiet: #a3acb8; --page: #11151a; --edge: #343c46; --red: #ffb3b8;
    --n0: #9be5ae; --n1: #7db8ff; --n2: #f7d27c; }
}
.page { fill: var(--page); }
text { fill: var(--quiet); }
.heading { fill: var(--text); font-weight: 600; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: var(--edge); } .axis { stroke: var(--quiet); }
.allowed { stroke: var(--quiet); stroke-dasharray: 3 3; }
polyline { fill: none; stroke-width: 2.5; stroke-linejoin: round; }
.fixed { stroke: var(--red); stroke-width: 1.5; stroke-dasharray: 6 4; }
.curve.n0 { stroke: var(--n0); } .curve.n1 { stroke: var(--n1); } .curve.n2 { stroke: var(--n2); }
"""
