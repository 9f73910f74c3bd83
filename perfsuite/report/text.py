"""Figures and sentences as text, for every report."""

from __future__ import annotations

import re
from pathlib import Path

from perfsuite.results.metric import SPEEDS
from perfsuite.results.outcome import Check


def sentence(check: Check) -> str:
    """A check in words: what was measured, against what, by how much, allowed how much, how sure."""
    text = f"{check.label}: {amount(check.measured, check.unit)}"
    if check.baseline is not None:
        text += f", baseline {amount(check.baseline, check.unit)}"
    if check.worsening is not None:
        text += f": {_change(check, check.worsening)}"
        if check.interval is not None:
            low, high = check.interval
            text += f" (99 % interval {low:+.1%} to {high:+.1%})"
        text += f", {check.tolerance:.1%} allowed: {check.outcome}"
        if check.outcome == "regressed" and check.worsening <= check.tolerance:
            text += " (surely worse, and the tolerance is not ruled out)"
    elif check.outcome == "failed" or check.outcome == "inconclusive":
        text += f": {check.outcome}"
    if check.blind:
        text += f"; blind: this gate finds only {check.minimum_detectable:.1%} or more reliably"
    if check.probe_exponent is not None:
        text += f"; corrected for the machine's own speed (probe, exponent {check.probe_exponent:.2f})"
    return f"{text}; {check.note}" if check.note else text


def _change(check: Check, worsening: float) -> str:
    more = "more" if worsening >= 0 else "less"
    what = f"{more} time per {SPEEDS[check.unit]}" if check.unit in SPEEDS else more
    return f"{abs(worsening):.1%} {what}"


def amount(value: float | None, unit: str) -> str:
    """A figure for people: bytes in binary units, speeds as `rate` tells them."""
    if value is None:
        return "not measured"
    if unit == "bytes":
        size, name = (2**30, "GiB") if value >= 2**30 else (2**20, "MiB")
        return f"{value / size:.2f} {name}" if name == "GiB" else f"{value / size:.1f} {name}"
    return rate(value) if unit else f"{value:.2f}"


def rate(value: float) -> str:
    """So many per second, to three digits at the least."""
    return f"{value:.3g}" if 0 < value < 100 else f"{value:,.0f}"


def percent(change: float) -> str:
    """A relative change, signed; never `-0.0%`."""
    return f"{round(change, 3) + 0.0:+.1%}"


def plural(count: int, noun: str) -> str:
    """`1 launch`, `2 launches`, `2 cases`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


def relative(text: str, root: Path) -> str:
    """The same text with paths below `root` as they are from there."""
    return re.sub(rf"(?<![\w./-]){re.escape(str(root))}/", "", text) if root != Path("/") else text
