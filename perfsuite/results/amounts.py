"""Format amounts with their units. Each unit has its own number of digits. Pure."""

from collections.abc import Callable, Mapping

_SCALES: Mapping[str, tuple[tuple[float, str], ...]] = {  # scaled units of counts, largest first
    "bytes": ((2**40, " TiB"), (2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (1, " bytes")),
    "FLOP": ((1e15, " PFLOP"), (1e12, " TFLOP"), (1e9, " GFLOP"), (1e6, " MFLOP"), (1, " FLOP")),
    "calls": ((1, ""),),
    "objects": ((1, ""),),
    "modules": ((1, ""),),
}


def amount(value: float | None, unit: str) -> str:
    """Format a value with its unit: `7.00 MiB`, `12.3 ms`.

    Speeds in tokens/s or samples/s are formatted without the unit.
    """
    if value is None:
        return "not measured"
    if unit in _SCALES:
        factor, name = _scale(abs(value), unit)
        return f"{_number(value, factor, 2 if abs(value) < 10 * factor else 1)}{name}"
    return _FORMATS[unit](value) if unit in _FORMATS else f"{rate(value)} {unit}"


def signed(value: float, unit: str) -> str:
    """Format a difference with its sign: `+3.50 MiB`, `-1`."""
    return f"{'+' if value > 0 else ''}{amount(value, unit)}"


def arrow(before: int, now: int, unit: str) -> str:
    """Format a change from one amount to another, with enough digits to show it: `29.9 -> 59.8 GiB`."""
    factor, name = _scale(max(abs(before), abs(now)), unit)
    digits = next((digits for digits in (1, 2) if _tells(before, now, factor, digits)), 3)
    then = _number(before, factor, digits)
    today = _number(now, factor, digits)
    if then == today or (before and not round(before / factor, 1)) or (now and not round(now / factor, 1)):
        then = f"{before:,}"
        today = f"{now:,}"
        name = _SCALES[unit][-1][1]
    return f"{then}{name} -> 0" if now == 0 else f"{then} -> {today}{name}"


def _scale(value: float, unit: str) -> tuple[float, str]:
    return next((scale for scale in _SCALES[unit] if value >= scale[0]), _SCALES[unit][-1])


def _tells(before: int, now: int, factor: float, digits: int) -> bool:
    """Return whether rounding two amounts to `digits` decimal places changes their ratio by at most 1%.

    Always True if the rounded amounts are equal, or if one of them is 0.
    """
    then = round(before / factor, digits)
    today = round(now / factor, digits)
    if then == today or not then or not today:
        return True
    return abs(today / then * before / now - 1) <= 0.01


def _number(value: float, factor: float, digits: int) -> str:
    return f"{value:,.0f}" if factor == 1 or value == 0 else f"{value / factor:,.{digits}f}"


def rate(value: float) -> str:
    """Format a number to at least three digits, with commas for thousands: `0.123`, `12.3`, `1,234`."""
    # pragma: no mutate < 100 to <= 100: 100 reads the same in both forms
    # pragma: no mutate < 100 to < 101: below 101 too, both forms read the same
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Format a time, in ms below 10 s and otherwise in s."""
    return f"{seconds:,.2f} s" if seconds >= 10 else f"{1e3 * seconds:,.1f} ms"


# Formats of the other units. A unit that is not listed is written after its number.
_FORMATS: Mapping[str, Callable[[float], str]] = {
    "tokens/s": rate,
    "samples/s": rate,
    "s": duration,
    "share": "{:.1%}".format,
    "%": "{:.0f}%".format,
    "ratio": "{:.2f}".format,
    "": "{:,.2f}".format,
    "TFLOP/s": "{:.2f}".format,
    "J per token": lambda joules: f"{1e3 * joules:.2f} mJ per token",
    "J per sample": lambda joules: f"{1e3 * joules:.2f} mJ per sample",
}
