"""Describe in words how the counts of a step changed. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from perfsuite.results import quantities
from perfsuite.results.amounts import arrow, signed
from perfsuite.results.counts import Collective, Counts, KeptObjects, other_inputs
from perfsuite.results.quantities import Change, Group, Quantity, Unit

MOST_NAMED = 4  # maximum number of operators, parts of memory or reasons in a sentence, largest change first


def sentence(quantity: Quantity, changes: list[Change], before: Counts, now: Counts) -> str:
    """Describe the change of one quantity. `changes` has one or more fields that differ."""
    # pragma: no mutate [0] to [-1]: only Python calls change in several fields, which are all of steps
    change = changes[0]
    if isinstance(quantity, Group):
        return _group(quantity, change, before, now)
    if quantity is quantities.GRAPHS and not change.now:
        return f"nothing is compiled any more (before: {change.before} graphs)"
    if quantity is quantities.FLOPS:
        changes = [change._replace(field=change.field.removeprefix("FLOPs in ")) for change in changes]
    first, *others = (
        f"{change.field}: {arrow(change.before, change.now, change.unit)}" for change in changes
    )
    fields = ", ".join([first, *(other.removeprefix(quantity.name).lstrip() for other in others)])
    of_no_step = quantity in quantities.COMPILED or quantity in quantities.OF_SPANS or quantity.of_worker
    is_outside_of_steps = quantity.is_python and change.field == quantity.name
    in_a_step = quantity.unit == "calls" and not (of_no_step or is_outside_of_steps)
    return fields + (" a step" if in_a_step else "") + _because(quantity, before, now)


def _because(quantity: Quantity, before: Counts, now: Counts) -> str:
    """Return the parts that explain a change, such as ` (kept +3.5 MiB)`; empty if they are unknown."""
    then = quantity.parts(before)
    today = quantity.parts(now)
    if then is not None and today is not None:
        return _parts(then, today, quantity.unit)
    if quantity is quantities.FLOPS:
        inputs = other_inputs(before, now)
        return f" (input: {inputs})" if inputs else ""
    if quantity is quantities.PEAK and before.memory is not None and now.memory is not None:
        return _parts(before.memory.at_peak, now.memory.at_peak, "bytes")
    if quantity is quantities.BREAKS and before.compiled is not None and now.compiled is not None:
        return _parts(before.compiled.breaks, now.compiled.breaks, "calls")
    if quantity in (quantities.KEPT_GRAPHS, quantities.GRAPHS_LEFT) and now.kept is not None:
        return held_by(now.kept.graph_holders)
    if quantity is quantities.IN_CYCLES and now.memory is not None and now.memory.in_cycles is not None:
        return held_by(now.memory.in_cycles.holders)
    if quantity is quantities.KEPT:
        return _kept(before.kept, now.kept)
    if quantity is quantities.WORKER_KEPT:
        return _kept(quantities.kept_by_worker(before), quantities.kept_by_worker(now))
    return ""


def _kept(before: KeptObjects | None, now: KeptObjects | None) -> str:
    """Return the types and the holders of kept objects; empty if they are unknown."""
    if before is None or now is None:
        return ""
    return _parts(before.by_type, now.by_type, "objects") + held_by(now.holders)


def held_by(holders: Sequence[str]) -> str:
    """Return the holders of kept objects, such as ", held by `dispatch._cache`"; empty if unknown."""
    return f", held by {' and '.join(holders)}" if holders else ""


def _parts(before: Mapping[str, int], now: Mapping[str, int], unit: Unit) -> str:
    by = _largest_first({name: now.get(name, 0) - before.get(name, 0) for name in {**before, **now}})
    named = ", ".join(f"{name} {signed(by[name], unit)}" for name in list(by)[:MOST_NAMED])
    return f" ({named}{', ...' if len(by) > MOST_NAMED else ''})" if by else ""


def _largest_first(by: Mapping[str, int]) -> dict[str, int]:
    return {name: by[name] for name in sorted(by, key=lambda name: -abs(by[name])) if by[name]}


def _group(group: Group, change: Change, before: Counts, now: Counts) -> str:
    """Describe how the bytes of a group of collectives changed.

    If the bytes are equal, describe how the number of calls changed.
    """
    then = group.rows(before)
    today = group.rows(now)
    if change.unit == "calls":
        equal = "" if group.unit == "calls" else ", with the same bytes"
        return f"{group.name}: {arrow(change.before, change.now, 'calls')} calls a step{equal}"
    more_calls = group.calls(now) - group.calls(before)
    where = _where(then, today)
    dtype = _other_dtype(then, today)
    if dtype or not more_calls:
        because = f": {dtype}" if dtype else ""
        return f"{group.name}: {arrow(change.before, change.now, 'bytes')} a step{where}{because}"
    calls = f"{abs(more_calls):,} {'more' if more_calls > 0 else 'fewer'} call{'s' * (abs(more_calls) != 1)}"
    return f"{group.name}: {calls} a step{where} ({signed(change.now - change.before, 'bytes')})"


def _other_dtype(before: list[Collective], now: list[Collective]) -> str:
    """Return `float32 instead of bfloat16` if one dtype replaced another; empty if not.

    One dtype replaced another if the number of calls is the same, or if no call uses the old dtype any more.
    """
    by = _moved("bytes", "dtype", before, now)
    is_replaced = sum(row.count for row in before) == sum(row.count for row in now)
    is_gone = all(by.get(row.dtype, 0) >= 0 for row in now)
    # pragma: no mutate > 0 to > -1: a dtype whose bytes did not change is not in `by`
    # pragma: no mutate > 0 to >= 0: a dtype whose bytes did not change is not in `by`
    new, old = ([name for name in by if (by[name] > 0) == is_new] for is_new in (True, False))
    is_told = (is_replaced or is_gone) and new and old
    return f"{' and '.join(new)} instead of {' and '.join(old)}" if is_told else ""


def _where(before: list[Collective], now: list[Collective]) -> str:
    """Return the only phase that changed, such as ` in backward`; empty if several phases changed.

    A phase counts as changed if its number of calls changed. If no phase has another number of calls, the
    bytes of each phase are compared instead.
    """
    phases = _moved("count", "phase", before, now) or _moved("bytes", "phase", before, now)
    return f" in {next(iter(phases))}" if len(phases) == 1 else ""


def _moved(
    amount: Literal["bytes", "count"],
    by: Literal["dtype", "phase"],
    before: list[Collective],
    now: list[Collective],
) -> dict[str, int]:
    sums = Counter[str]()
    for sign, row in [*((-1, row) for row in before), *((1, row) for row in now)]:
        sums[getattr(row, by)] += sign * getattr(row, amount)
    return _largest_first(sums)
