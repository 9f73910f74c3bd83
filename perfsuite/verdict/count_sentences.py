"""Says in words what changed in the counts of a step. Pure; imports neither torch nor pytest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from perfsuite.results.counts import Collective, Counts
from perfsuite.results.quantities import (
    BREAKS,
    COPIES,
    FLOPS,
    GRAPHS,
    HOST_READS,
    KERNELS,
    PEAK,
    Change,
    Group,
    Quantity,
    Unit,
)

MOST_NAMED = 4
"""Operators, parts of memory or reasons that a sentence names: those that changed most."""
_IN_A_STEP = (HOST_READS, COPIES, KERNELS)
"""What is counted in a step: compiled graphs are those of the whole launch."""
_SCALES: Mapping[Unit, tuple[tuple[float, str], ...]] = {
    "bytes": ((2**40, " TiB"), (2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB")),
    "FLOP": ((1e15, " PFLOP"), (1e12, " TFLOP"), (1e9, " GFLOP"), (1e6, " MFLOP")),
    "calls": (),
}
_EXACT: Mapping[Unit, str] = {"bytes": " bytes", "FLOP": " FLOP", "calls": ""}


def sentence(quantity: Quantity, changes: list[Change], before: Counts, now: Counts) -> str:
    """What changed in one quantity. `changes` are its fields that differ, at least one."""
    if isinstance(quantity, Group):
        return _group(quantity, changes[0], before, now)
    if quantity is GRAPHS and not changes[0].now:
        return f"nothing is compiled any more, {changes[0].before} graphs before"
    if quantity is FLOPS:
        changes = [change._replace(field=change.field.removeprefix("FLOPs in ")) for change in changes]
    first, *others = (
        f"{change.field}: {arrow(change.before, change.now, change.unit)}" for change in changes
    )
    fields = ", ".join([first, *(other.removeprefix(quantity.name).lstrip() for other in others)])
    return fields + (" a step" if quantity in _IN_A_STEP else "") + _because(quantity, before, now)


def _because(quantity: Quantity, before: Counts, now: Counts) -> str:
    """The parts of a quantity that explain its change, as ` (kept +3.5 MiB)`; nothing where none is known."""
    if quantity is KERNELS:
        return _parts(before.ops, now.ops, "calls")
    if quantity is PEAK and before.memory is not None and now.memory is not None:
        return _parts(before.memory.at_peak, now.memory.at_peak, "bytes")
    if quantity is BREAKS and before.compiled is not None and now.compiled is not None:
        return _parts(before.compiled.breaks, now.compiled.breaks, "calls")
    return ""


def _parts(before: Mapping[str, int], now: Mapping[str, int], unit: Unit) -> str:
    grown = _differences(before, now)
    if not grown:
        return ""
    named = [f"{name} {signed(by, unit)}" for name, by in grown.items()]
    return f" ({', '.join(named[:MOST_NAMED])}{', ...' if len(named) > MOST_NAMED else ''})"


def _differences(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """By how much each value differs, without those that do not: the largest difference first."""
    by = {name: now.get(name, 0) - before.get(name, 0) for name in {**before, **now}}
    return {name: by[name] for name in sorted(by, key=lambda name: -abs(by[name])) if by[name]}


def _group(group: Group, change: Change, before: Counts, now: Counts) -> str:
    """What changed in the collectives of a group: their bytes, else their calls, else how they are split."""
    then, today = group.rows(before), group.rows(now)
    if change.unit == "calls":
        equal = "" if group.unit == "calls" else ", the same bytes"
        return f"{group.name}: {arrow(change.before, change.now, 'calls')} calls a step{equal}"
    if change.before == change.now:
        split = _other_dtype(then, today) or _other_phase(then, today) or "otherwise split"
        return f"{group.name}: the same bytes, {split}"
    more_calls = group.calls(now) - group.calls(before)
    where, dtype = _where(then, today), _other_dtype(then, today)
    if dtype or not more_calls:
        because = f": {dtype}" if dtype else ""
        return f"{group.name}: {arrow(change.before, change.now, 'bytes')} a step{where}{because}"
    calls = f"{abs(more_calls):,} {'more' if more_calls > 0 else 'fewer'} call{'s' * (abs(more_calls) != 1)}"
    return f"{group.name}: {calls} a step{where} ({signed(change.now - change.before, 'bytes')})"


def _other_dtype(before: list[Collective], now: list[Collective]) -> str:
    """`float32 instead of bfloat16`, where as many calls are made in it, or none in the other any more."""
    new, old = _grown_and_shrunk(_bytes_by("dtype", before), _bytes_by("dtype", now))
    is_replaced = sum(row.count for row in before) == sum(row.count for row in now)
    is_gone = not {row.dtype for row in now} & set(old)
    return (
        f"{' and '.join(new)} instead of {' and '.join(old)}"
        if new and old and (is_replaced or is_gone)
        else ""
    )


def _other_phase(before: list[Collective], now: list[Collective]) -> str:
    """`in forward instead of backward`."""
    new, old = _grown_and_shrunk(_bytes_by("phase", before), _bytes_by("phase", now))
    return f"in {' and '.join(new)} instead of {' and '.join(old)}" if new and old else ""


def _where(before: list[Collective], now: list[Collective]) -> str:
    """` in backward`, if that is the only phase in which calls, or else bytes, differ."""
    calls = _differences(_calls_by_phase(before), _calls_by_phase(now))
    phases = calls or _differences(_bytes_by("phase", before), _bytes_by("phase", now))
    return f" in {next(iter(phases))}" if len(phases) == 1 else ""


def _bytes_by(key: str, rows: list[Collective]) -> Mapping[str, int]:
    return _sums((getattr(row, key), row.bytes) for row in rows)


def _calls_by_phase(rows: list[Collective]) -> Mapping[str, int]:
    return _sums((row.phase, row.count) for row in rows)


def _sums(items: Iterable[tuple[str, int]]) -> Mapping[str, int]:
    sums = Counter[str]()
    for key, value in items:
        sums[key] += value
    return sums


def _grown_and_shrunk(before: Mapping[str, int], now: Mapping[str, int]) -> tuple[list[str], list[str]]:
    by = _differences(before, now)
    return [key for key in by if by[key] > 0], [key for key in by if by[key] < 0]


def arrow(before: int, now: int, unit: Unit) -> str:
    """Two amounts in one unit: `29.9 -> 59.8 GiB`, `335.5 MFLOP -> 0`. With more digits where one would tell
    another change, and exact where they would round to the same, or to none."""
    factor, name = _scale(max(abs(before), abs(now)), unit)
    digits = next((digits for digits in (1, 2) if _tells(before, now, factor, digits)), 3)
    then, today = _number(before, factor, digits), _number(now, factor, digits)
    if then == today or (before and not round(before / factor, 1)) or (now and not round(now / factor, 1)):
        (then, today), name = (f"{before:,}", f"{now:,}"), _EXACT[unit]
    return f"{then}{name} -> 0" if now == 0 else f"{then} -> {today}{name}"


def amount(value: int, unit: Unit) -> str:
    """An amount with its unit: `7.0 MiB`, `335.5 MFLOP`, `1,234`."""
    factor, name = _scale(abs(value), unit)
    return f"{_number(value, factor)}{name}"


def signed(value: int, unit: Unit) -> str:
    """A difference: `+3.5 MiB`, `-1`."""
    return f"{'+' if value > 0 else ''}{amount(value, unit)}"


def _scale(value: int, unit: Unit) -> tuple[float, str]:
    return next((scale for scale in _SCALES[unit] if value >= scale[0]), (1, _EXACT[unit]))


def _tells(before: int, now: int, factor: float, digits: int) -> bool:
    """Whether two amounts, rounded to so many digits, tell their ratio to within 1 %. 0 has none."""
    then, today = round(before / factor, digits), round(now / factor, digits)
    if then == today or not then or not today:
        return True
    return abs(today / then * before / now - 1) <= 0.01


def _number(value: int, factor: float, digits: int = 1) -> str:
    return f"{value:,}" if factor == 1 or value == 0 else f"{value / factor:,.{digits}f}"
