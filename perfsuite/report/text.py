"""Format checks, changes, lines and tables for all reports; `results.amounts` formats numbers. Pure."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perfsuite.results.amounts import amount
from perfsuite.results.metric import PartOfStep, described
from perfsuite.results.outcome import AgainstReference, Check

NONE = "\N{EN DASH}"  # stands for an unknown value
SPEEDS = ("tokens/s", "samples/s")  # countable units: "fewer" rather than "less"
# An interval is not shown if it contains -90% (a tenth of the value) or +900% (ten times the value).
UNKNOWN = (-0.9, 9.0)

WIDTH = 100  # width of prose in reports, on a terminal and in a log, in characters


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of text or, on the HTML page, charts. The first column names the rows.

    A table without rows is false.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""  # a description; empty if a heading above the table describes it
    text_columns: int = 1  # number of leading columns that hold text
    # Number of trailing columns that hold text or charts. The columns in between hold numbers.
    last_text_columns: int = 0

    def __bool__(self) -> bool:
        return bool(self.rows)

    def is_figure(self, column: int) -> bool:
        """Return whether a column, counted from 0, holds numbers, which are aligned to the right."""
        return self.text_columns <= column < len(self.headers) - self.last_text_columns


def sentence(check: Check, against: str | None = None) -> str:
    """Describe a check with its interval and tolerance. `against` is `arm A`, or None for the baseline."""
    text = f"{check.label}: {amount(check.measured, check.unit)}"
    if check.baseline is not None:
        text += f", {against or 'baseline'} {amount(check.baseline, check.unit)}"
    change = check.judged_change
    if check.change is not None and change is not None:
        less = "fewer" if check.unit in SPEEDS else "less"
        of_a_step = " of a step" if isinstance(described(check.metric), PartOfStep) else ""
        text += f": {abs(check.change):.1%}{of_a_step} {less if round(check.change, 3) < 0 else 'more'}"
        if check.interval is not None:
            text += f" (99% interval {between(check.interval)})"
        if check.against_reference is not None:
            text += f"; {beside(check.against_reference, less)}"
        text += f", {check.allowed:.1%} allowed: {check.outcome}"
        if check.outcome == "regressed" and abs(change) <= check.allowed:
            text += " (certainly worse, and possibly by more than the tolerance)"
        if check.outcome == "passed" and abs(change) > check.allowed:
            text += " (a regression beyond the tolerance is ruled out; the improvement is not certain)"
    elif check.outcome == "failed" or check.outcome == "inconclusive":
        text += f": {check.outcome}"
    if check.blind:
        least = detectable(check)
        finds = "no change" if least is None else f"only changes of {least} or more"
        text += f"; blind: this gate finds {finds} reliably"
    if check.probe_exponent is not None:
        power = f"by the probe's time to the power of {check.probe_exponent:.2f}"
        text += f"; corrected for the machine's own speed ({power})"
    return f"{text}; {check.note}" if check.note else text


def beside(against: AgainstReference, less: str) -> str:
    """Describe a change against the session's reference. `less` is the word for a decrease."""
    direction = less if round(against.change, 3) < 0 else "more"
    interval = between(against.interval)
    return f"{abs(against.change):.1%} {direction} than tonight's reference (99% interval {interval})"


def between(interval: tuple[float, float]) -> str:
    """Format the interval of a change, such as `-27.0% to -8.0%`, or as `not known` if it is too wide."""
    low, high = interval
    return f"{percent(low)} to {percent(high)}" if UNKNOWN[0] < low and high < UNKNOWN[1] else "not known"


def detectable(check: Check) -> str | None:
    """Return the smallest change that a gate can find, as text; None if it is unknown or too large."""
    least = check.minimum_detectable
    beyond = -UNKNOWN[0] if described(check.metric).better == "higher" else UNKNOWN[1]
    return None if least is None or not least < beyond else f"{least:.1%}"


def percent(change: float) -> str:
    """Format a relative change with its sign, never as `-0.0%`."""
    return f"{round(change, 3) + 0.0:+.1%}"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun, such as `1 launch`, `2 launches` or `2 cases`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def cut(lines: Sequence[str], most: int) -> list[str]:
    """Return the first `most` lines, and a line with the number of the remaining lines, if any."""
    left = len(lines) - most
    return [*lines[:most], *([f"and {left} more"] if left > 0 else [])]


def wrapped(text: str, *, indent: str = "  ", most: int | None = None) -> list[str]:
    """Wrap text into lines of at most `WIDTH` columns. Paths and other long words are not broken.

    If there are more than `most` lines, the rest is left out, and the last line ends in an ellipsis.
    """
    made = textwrap.TextWrapper(WIDTH, indent, f"{indent}  ", break_long_words=False, break_on_hyphens=False)
    lines = [line for paragraph in text.splitlines() for line in made.wrap(paragraph)]
    if most is not None and len(lines) > most:
        lines = [*lines[: most - 1], f"{lines[most - 1][: WIDTH - 2]} …"]
    return lines


def relative(text: str, root: Path) -> str:
    """Make all paths below `root` in a text relative to `root`."""
    return re.sub(rf"(?<![\w./-]){re.escape(str(root))}/", "", text) if root != Path("/") else text
