"""The quantities of a step's counts. `exact` judges them, and `count_sentences` describes them."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import starmap
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from perfsuite.results.counts import (
    OUTSIDE_OF_STEPS,
    PHASES,
    READS_OF_THE_HOST,
    Collective,
    Compiled,
    Counts,
    KeptObjects,
    Phase,
    PythonCalls,
    StepMemory,
    collective_name,
    step_name,
)

Unit = Literal["bytes", "FLOP", "calls", "objects", "modules"]

FLOOR = 64 * 2**10  # bytes by which memory may differ without being judged: a few small tensors
COLLECTIVE_SHARE = 0.01
"""Share by which the bytes of a group may differ without being judged, if the number of calls is equal. The
difference is limited to `FLOOR`: 64 KiB take 3 us at 25 GB/s, whereas NCCL needs 10 us for an all-reduce of
any size. A different number of calls is judged, however few bytes the calls send."""
FLOPS_FLOOR = 0.001  # share by which a step's FLOPs may differ without being judged
PYTHON_FLOOR = 1000
PYTHON_SHARE = 0.2
"""Number and share by which the Python calls of a step may differ without being judged. The number of calls
varies between releases of a library, and 1,000 calls take less than a millisecond."""
MODULES_FLOOR = 50
"""Number by which imported modules may differ without being judged. The number of modules varies between
releases of a library, and an import takes only a millisecond or two."""
GRAPHS_FLOOR = 2
"""Number by which tensors with an autograd graph may differ without being judged. A training loop's own
variables often hold the loss and the output of the last step, whose graph takes no memory after backward."""
# Share by which Python calls vary between launches, for example because progress bars are redrawn by time.
PYTHON_LOOSE = 0.02
# Difference in calls that is always allowed. In a span with few calls, `PYTHON_LOOSE` allows almost none.
PYTHON_FEW = 20
OF_A_WORKER = "of a loader's worker per batch"
LOOSE = 0.005  # share by which memory varies between launches: threads free memory at any time


class Change(NamedTuple):
    """A field that differs between two counts."""

    field: str
    unit: Unit
    before: int
    now: int


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A kind of work in a step. The sum of its fields is judged: more is worse."""

    name: str
    unit: Unit
    read: Callable[[Counts], Mapping[str, int] | None]  # returns its fields by name; None: unknown
    # Returns the largest difference from the given counts, in `unit`, that asynchronous work can cause.
    allowed: Callable[[Counts], float] = lambda _: 0
    # Returns the largest difference from the given counts, in `unit`, that is too small to be judged. Such a
    # difference is only listed.
    floor: Callable[[Counts], float] = lambda _: 0
    # Whether it counts Python calls. Launches whose values differ by up to `floor` do not make it unsteady.
    is_python: bool = False
    # Returns the parts that explain a change, such as the called functions, by name; None: unknown.
    parts: Callable[[Counts], Mapping[str, int] | None] = lambda _: None
    of_worker: bool = False  # whether it was counted for one batch in a worker process

    @property
    def family(self) -> str:
        """The name of its family of quantities. Changes are sorted by their share of the family's total."""
        return self.name

    def value(self, counts: Counts, leave_out: Collection[str] = ()) -> int | None:
        """Return the sum of all fields except those in `leave_out`; None if the counts lack this quantity."""
        fields = self.read(counts)
        if fields is None:
            return None
        return sum(value for field, value in fields.items() if field not in leave_out)

    def changes(self, before: Counts, now: Counts) -> list[Change]:
        """Return the fields that differ."""
        then = self.read(before) or {}
        today = self.read(now) or {}
        return [
            Change(field, self.unit, then.get(field, 0), today.get(field, 0))
            for field in {**then, **today}
            if then.get(field, 0) != today.get(field, 0)
        ]


@dataclass(frozen=True, kw_only=True)
class Group(Quantity):
    """The collectives of one kind in groups of one shape, judged by bytes. Barriers are judged by calls.

    Groups of one rank send nothing, so their calls are listed but never judged.
    """

    rows: Callable[[Counts], list[Collective]]  # returns its calls by dtype and phase
    ranks: int  # number of ranks in each group

    @property
    def family(self) -> str:
        """The name of the family. All barriers form one family, and all other collectives another."""
        return "barriers" if self.unit == "calls" else "collectives"

    def calls(self, counts: Counts) -> int:
        """Return the number of calls."""
        return sum(row.count for row in self.rows(counts))

    def changes(self, before: Counts, now: Counts) -> list[Change]:
        """Return the changed fields or, if there are none, the change in the number of calls."""
        changes = super().changes(before, now)
        if changes:
            return changes
        calls = self.calls(before), self.calls(now)
        return [] if calls[0] == calls[1] else [Change(f"{self.name}: calls", "calls", *calls)]


_shape = attrgetter("kind", "ranks", "apart")


def _of_group(counts: Counts, *shape: Any) -> list[Collective]:
    return [row for row in counts.collectives if _shape(row) == shape]


def _empty(kind: str, ranks: int, apart: int) -> Quantity:
    """Return the `Quantity` of collectives on empty tensors. Each of these still sends a message."""
    name = f"empty {collective_name(kind, ranks, apart)}"

    def read(counts: Counts) -> Mapping[str, int]:
        return {name: sum(row.count for row in _of_group(counts, kind, ranks, apart) if not row.bytes)}

    def floor(_: Counts) -> float:
        return math.inf if ranks == 1 else 0

    return Quantity(name=name, unit="calls", read=read, floor=floor)


def _python(version: str) -> Quantity:
    """Return the `Quantity` of Python calls under one Python version.

    Counts from other versions are treated as unknown, because other versions make different calls.
    """
    name = f"Python {version} calls"

    def read(counts: Counts) -> Mapping[str, int] | None:
        if counts.python is None or counts.python.version != version:
            return None
        calls = counts.python.calls
        if OUTSIDE_OF_STEPS in calls:
            return {name: calls[OUTSIDE_OF_STEPS]}
        return {f"{name} in {phase}": calls.get(phase, 0) for phase in PHASES}

    return _of_python(name, read, lambda counts: counts.python)


def _worker_python(version: str) -> Quantity:
    name = f"Python {version} calls {OF_A_WORKER}"

    def read(counts: Counts) -> Mapping[str, int] | None:
        if counts.worker_batch is None or counts.worker_batch.python.version != version:
            return None
        return {name: counts.worker_batch.python.total}

    def python(counts: Counts) -> PythonCalls | None:
        return None if counts.worker_batch is None else counts.worker_batch.python

    quantity = _of_python(name, read, python)
    return replace(quantity, of_worker=True)


def _of_python(
    name: str,
    read: Callable[[Counts], Mapping[str, int] | None],
    python: Callable[[Counts], PythonCalls | None],
) -> Quantity:
    def size(counts: Counts) -> int:
        return sum((read(counts) or {}).values())

    def functions(counts: Counts) -> Mapping[str, int] | None:
        calls = python(counts)
        return None if calls is None else calls.functions

    return Quantity(
        name=name,
        unit="calls",
        read=read,
        allowed=lambda counts: PYTHON_LOOSE * size(counts),
        floor=lambda counts: max(PYTHON_FLOOR, PYTHON_SHARE * size(counts)),
        is_python=True,
        parts=functions,
    )


def _group(kind: str, ranks: int, apart: int) -> Group:
    name = collective_name(kind, ranks, apart)
    unit: Unit = "calls" if kind == "barrier" else "bytes"

    def rows(counts: Counts) -> list[Collective]:
        return [row for row in _of_group(counts, kind, ranks, apart) if row.bytes or unit == "calls"]

    def read(counts: Counts) -> Mapping[str, int]:
        return {f"{name}: {unit}": sum(row.count if unit == "calls" else row.bytes for row in rows(counts))}

    def floor(counts: Counts) -> float:
        if ranks == 1:
            return math.inf
        return min(FLOOR, COLLECTIVE_SHARE * sum(row.bytes for row in rows(counts)))

    return Group(name=name, unit=unit, read=read, floor=floor, rows=rows, ranks=ranks)


def _phased(name: str, unit: Unit, read: Callable[[Counts], Mapping[Phase, int] | None]) -> Quantity:
    def fields(counts: Counts) -> Mapping[str, int] | None:
        by_phase = read(counts)
        if by_phase is None:
            return None
        return {f"{name} in {phase}": by_phase.get(phase, 0) for phase in PHASES}

    return Quantity(name=name, unit=unit, read=fields)


def _of_memory(name: str, read: Callable[[StepMemory], int], share_of: str, floor: int) -> Quantity:
    return Quantity(
        name=name,
        unit="bytes",
        read=lambda counts: None if counts.memory is None else {name: read(counts.memory)},
        # pragma: no mutate 0 if: without counts of memory nothing is judged, so this value is not used
        allowed=lambda counts: 0 if counts.memory is None else LOOSE * getattr(counts.memory, share_of),
        floor=lambda _: floor,
    )


def _of_kept(
    name: str,
    read: Callable[[KeptObjects], int | None],
    kept_of: Callable[[Counts], KeptObjects | None] = attrgetter("kept"),
) -> Quantity:
    def fields(counts: Counts) -> Mapping[str, int] | None:
        kept = kept_of(counts)
        number = None if kept is None else read(kept)
        return None if number is None else {name: number}

    return Quantity(name=name, unit="objects", read=fields)


def kept_by_worker(counts: Counts) -> KeptObjects | None:
    """Return the objects that a loader's worker keeps per batch; None if they are unknown."""
    return None if counts.worker_batch is None else counts.worker_batch.kept


def _of_compiled(name: str, read: Callable[[Compiled], int | None]) -> Quantity:
    def fields(counts: Counts) -> Mapping[str, int] | None:
        number = None if counts.compiled is None else read(counts.compiled)
        return None if number is None else {name: number}

    return Quantity(name=name, unit="calls", read=fields)


FLOPS = replace(
    _phased("FLOPs", "FLOP", lambda counts: counts.flops),
    floor=lambda counts: FLOPS_FLOOR * sum(counts.flops.values()),
)


def _host_reads(counts: Counts) -> Mapping[Phase, int] | None:
    """Return the host reads; None if they are not comparable.

    The previous counting method also counted other reads, so its host reads are comparable only if it counted
    no reads at all.
    """
    is_known = counts.method != READS_OF_THE_HOST or not counts.host_reads
    return counts.host_reads if is_known else None


HOST_READS = _phased("host reads", "calls", _host_reads)
COPIES = Quantity(
    name="copies between devices",
    unit="calls",
    read=lambda counts: {f"copies {way}": count for way, count in sorted(counts.device_copies.items())},
)


def _waits(counts: Counts) -> Mapping[str, int] | None:
    # Older counts lack `blocking_copies`. If there were no copies at all, none of them was blocking.
    copies = counts.blocking_copies if counts.device_copies else {}
    return None if copies is None else {f"blocking copies {way}": copies[way] for way in sorted(copies)}


BLOCKING = Quantity(name="blocking copies between devices", unit="calls", read=_waits)
STALLS = Quantity(
    name="stalling calls",
    unit="calls",
    read=lambda counts: counts.stalls and {f"calls of {name}": n for name, n in counts.stalls.items()},
)
KERNELS = replace(_phased("kernels", "calls", lambda counts: counts.kernels), parts=lambda counts: counts.ops)


def _worker_ops(counts: Counts) -> Mapping[str, int] | None:
    return None if counts.worker_batch is None else counts.worker_batch.ops


def _worker_kernels(counts: Counts) -> Mapping[str, int] | None:
    ops = _worker_ops(counts)
    return None if ops is None else {f"kernels {OF_A_WORKER}": sum(ops.values())}


WORKER_KERNELS = Quantity(
    name=f"kernels {OF_A_WORKER}",
    unit="calls",
    read=_worker_kernels,
    floor=lambda counts: PYTHON_SHARE * sum((_worker_ops(counts) or {}).values()),
    parts=_worker_ops,
    of_worker=True,
)
"""These kernels have a floor, because samples that are drawn or augmented at random differ between
launches."""
_ANY_PEAK = _of_memory("peak of live tensors", attrgetter("peak"), "peak", FLOOR)
PEAK = replace(_ANY_PEAK, read=lambda counts: None if counts.kernels is None else _ANY_PEAK.read(counts))
"""The peak of compiled code depends on fusion, so it is unknown in a dry run."""
SAVED = _of_memory("saved for backward", attrgetter("saved_for_backward"), "saved_for_backward", FLOOR)
# pragma: no mutate "peak", 0 to "peak", -1: the allowed noise, at least 0, is then larger
GROWTH = _of_memory("growth in a step", lambda memory: max(memory.growth, 0), "peak", 0)
"""Negative growth counts as 0, because it is not an improvement: a step that frees more than it allocates
only frees what an earlier step kept too long. Growth has no floor, because it adds up over thousands of
steps."""
IN_CYCLES = Quantity(
    name="tensors in reference cycles",
    unit="bytes",
    read=lambda counts: (
        None
        if counts.memory is None or counts.memory.in_cycles is None
        else {"tensors in reference cycles": counts.memory.in_cycles.bytes}
    ),
    floor=lambda _: FLOOR,
)
"""The memory of these tensors stays allocated until Python's garbage collector runs, which can be many steps
later."""
KEPT = _of_kept("objects kept per step", attrgetter("total"))
"""Kept objects have no floor: even one object per step adds up, and makes garbage collection slower."""
KEPT_GRAPHS = _of_kept("tensors with an autograd graph kept per step", attrgetter("graphs"))
"""A graph takes more memory than the tensor that keeps it, because the graph keeps activations."""
GRAPHS_LEFT = replace(
    _of_kept("tensors with an autograd graph after a step", attrgetter("graphs_left")),
    floor=lambda _: GRAPHS_FLOOR,
)
WORKER_KEPT = replace(
    _of_kept("objects kept by a loader's worker per batch", attrgetter("total"), kept_by_worker),
    of_worker=True,
)
"""Counted only if nothing is timed."""
MODULES = Quantity(
    name="modules imported",
    unit="modules",
    read=lambda counts: (
        None if counts.modules is None else {"modules imported": sum(counts.modules.values())}
    ),
    floor=lambda _: MODULES_FLOOR,
    parts=lambda counts: counts.modules,
)
"""Counted only in the start-up."""
# Share by which the number of occurrences of a phase can vary by chance, for example if the phase runs once
# for each answer that a model generates.
OCCURRENCES_LOOSE = 0.02
OCCURRENCES = Quantity(
    name="occurrences",
    unit="calls",
    read=lambda counts: None if counts.occurrences is None else {"occurrences": counts.occurrences},
    allowed=lambda counts: OCCURRENCES_LOOSE * (counts.occurrences or 0),
)
WRITTEN_LOOSE = 4096
"""Number of bytes by which files can differ between launches by chance: they contain paths, dates and
numbers."""
WRITTEN = Quantity(
    name="bytes written",
    unit="bytes",
    read=lambda counts: None if counts.bytes_written is None else {"bytes written": counts.bytes_written},
    allowed=lambda _: WRITTEN_LOOSE,
    floor=lambda _: FLOOR,
)
BEGUN = Quantity(
    name="collectives begun",
    unit="calls",
    read=lambda counts: (
        None if counts.collectives_begun is None else {"collectives begun": counts.collectives_begun}
    ),
)
ALLOCATOR_PEAK = Quantity(
    name="allocator's peak",
    unit="bytes",
    read=lambda counts: (
        None if counts.allocator_peak is None else {"allocator's peak": counts.allocator_peak}
    ),
    allowed=lambda counts: LOOSE * (counts.allocator_peak or 0),
    floor=lambda _: FLOOR,
)
OF_SPANS = (
    OCCURRENCES,
    WRITTEN,
    BEGUN,
    ALLOCATOR_PEAK,
)  # quantities that are counted in events and phases only
# A change to 0 graphs is a regression, because nothing is compiled any more. Otherwise, more is worse.
GRAPHS = Quantity(
    name="compiled graphs",
    unit="calls",
    read=lambda counts: {"compiled graphs": counts.compiled.graphs if counts.compiled else 0},
)
BREAKS = _of_compiled("graph breaks", lambda compiled: sum(compiled.breaks.values()))
COMPILED = (  # quantities that are counted over the whole launch
    *(GRAPHS, BREAKS),
    _of_compiled("recompilations", attrgetter("recompilations")),
    _of_compiled("generated kernels", attrgetter("kernels")),
    _of_compiled("extern calls of compiled code", attrgetter("extern_calls")),
)
_OTHERS = (
    *(FLOPS, HOST_READS, BLOCKING, COPIES, STALLS, KERNELS, PEAK, SAVED, GROWTH, IN_CYCLES),
    *(KEPT, KEPT_GRAPHS, GRAPHS_LEFT),
    MODULES,
    *COMPILED,
    WORKER_KERNELS,
    WORKER_KEPT,
    *OF_SPANS,
)


def quantities(all_counts: Iterable[Counts]) -> list[Quantity]:
    """Return all quantities that these counts can have, collectives first."""
    all_counts = list(all_counts)
    rows = [row for counts in all_counts for row in counts.collectives]
    groups = starmap(_group, dict.fromkeys(map(_shape, rows)))
    without_bytes = (row for row in rows if not row.bytes and row.kind != "barrier")
    empty = starmap(_empty, dict.fromkeys(map(_shape, without_bytes)))
    versions = dict.fromkeys(counts.python.version for counts in all_counts if counts.python is not None)
    batches = [counts.worker_batch for counts in all_counts if counts.worker_batch is not None]
    of_workers = dict.fromkeys(batch.python.version for batch in batches)
    return [*groups, *empty, *_OTHERS, *map(_python, versions), *map(_worker_python, of_workers)]


def differing(launches: Iterable[Counts]) -> dict[str, int]:
    """Return the fields that differ by more than is allowed between these counts of one rank.

    Each field is mapped to its largest value in all launches. Fields of spans other than the reported step
    begin with the span's name: `step 10: kernels in forward`.
    """
    first, *others = launches
    largest = dict[str, int]()
    for launch in others:
        changes = [*_differing(first, launch)]
        for name in first.spans.keys() | launch.spans.keys():
            then, now = (_of_span(counts, name) for counts in (first, launch))
            if then is not None and now is not None:
                changes += [
                    change._replace(field=f"{name}: {change.field}") for change in _differing(then, now)
                ]
        for change in changes:
            largest[change.field] = max(largest.get(change.field, 0), change.before, change.now)
    return largest


def _of_span(counts: Counts, name: str) -> Counts | None:
    steps = {step_name(step): step for step in counts.also_counted}
    return counts.in_step(steps[name]) if name in steps else counts.spans.get(name)


def _differing(first: Counts, second: Counts) -> Iterator[Change]:
    """Yield the changes beyond what is allowed, except those of quantities that are unknown on one side."""
    for quantity in quantities((first, second)):
        if quantity.value(first) is None or quantity.value(second) is None:
            continue
        bound = (quantity.floor if quantity.is_python else quantity.allowed)(first)
        for change in quantity.changes(first, second):
            if abs(change.now - change.before) > bound:
                yield change


def python_unless_alike(python: PythonCalls | None, usual: PythonCalls | None) -> PythonCalls | None:
    """Return the Python calls of a span, or `usual` if they differ from it only by chance."""
    if python is None or usual is None:
        return python
    return usual if differ_by_chance(python.total, usual.total) else python


def differ_by_chance(calls: int, usual: int) -> bool:
    """Return whether the difference between two numbers of Python calls is small enough to be chance."""
    return abs(calls - usual) <= max(PYTHON_LOOSE * usual, PYTHON_FEW)


def unsteady_in(span: str, unsteady: Iterable[str]) -> set[str]:
    """Return the fields that count as unsteady in a span: they vary in the span or in the reported step."""
    return {field.removeprefix(f"{span}: ") for field in unsteady}
