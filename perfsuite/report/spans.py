"""Show the spans of a run in one table: start-up, steps, the wait for data, events and phases. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from statistics import median
from typing import Any

from perfsuite.case.phases import DATA_WAIT, MEASURED_STEPS
from perfsuite.report import counts as report_counts
from perfsuite.report.text import NONE, Table
from perfsuite.results.amounts import amount, duration
from perfsuite.results.counts import Counts, RankCounts, grouped, inputs_in_words, step_name
from perfsuite.results.quantities import Unit, differ_by_chance
from perfsuite.results.rank_report import COLD, START_UP, START_UPS, SpanTimes, is_of_start_up
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement
from perfsuite.verdict.counted_spans import when
from perfsuite.worker.clock.startup_clock import (
    BUILD,
    BUILD_AND_FIRST_STEP,
    DATA,
    FIRST_STEP,
    IMPORTS,
    PROCESS_GROUP,
)

PARTS = (IMPORTS, PROCESS_GROUP, BUILD, DATA, FIRST_STEP, BUILD_AND_FIRST_STEP)
WORKER_BATCH = "batch of a loader's worker"
CAPTION = (
    "A dash means unknown, not 0. Shares are of the time from the start of the processes to the last step, "
    "or of all steps if the start-up is unknown. Events and waits are part of the steps that contain them. "
    "Counting makes a step or a start-up take longer. A counted step that is not listed did the same work "
    "as the first. Python: calls of Python functions. Each count is from the first step that contains the "
    "span, on the rank where it is highest. Bytes written are the sum over all ranks. The peak of a step is "
    "that of live tensors, and the peak of an event is that of the GPU's allocator."
)
HELD = 0.1  # an event within a step is named if it takes more than this share of a usual step


@dataclass(frozen=True, kw_only=True)
class SpanRow:
    """One span of a launch, on one side of a comparison. A field is None if it is unknown.

    Each count is from the first step that contains the span, on the rank where it is highest.
    """

    name: str
    arm: str = ""
    """`A` or `B` if two arms are compared; otherwise empty."""
    times: int | None = None
    """Number of occurrences in the launch. For counted steps, the number of steps with these amounts."""
    median_s: float | None = None
    """Median seconds of one occurrence. For an event, the seconds are those of the rank that waited longest.
    For a step, they are those of the whole job. If training later waited for background work of an event,
    this field has the mean instead of the median."""
    share: float | None = None
    """Total seconds of all occurrences, as a share (0 to 1) of the start-up and all steps."""
    input: str | None = None
    """The input of a step, such as `2 x int64[4, 1024]`, on the first rank that has one."""
    kernels: int | None = None
    """Calls of kernels."""
    host_reads: int | None = None
    """Reads of device values for which the host waited."""
    python_calls: int | None = None
    """Calls of Python functions."""
    collectives: int | None = None
    """Calls of collectives."""
    collective_bytes: int | None = None
    """Bytes of the messages of collectives."""
    bytes_written: int | None = None
    """Bytes that all ranks together wrote into files."""
    peak_bytes: int | None = None
    """Peak memory in bytes: of live tensors in a step, or of the allocator in an event on a GPU."""
    modules: int | None = None
    """Modules that were imported."""


Amounts = Mapping[str, Any]
"""The counts of a `SpanRow`, by the names of its fields."""


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """The facts about one launch. A dry run or a baseline has only counts."""

    counts: Sequence[RankCounts] = ()
    step_s: Sequence[float] = ()
    window: tuple[int, int] = (0, 0)
    data_wait_s: Sequence[float] = ()
    spans: Mapping[str, SpanTimes] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> _Launch:
        """Return the facts about a launch. The meaningless times of a dry run are left out."""
        if run.dry:
            return cls(counts=run.counts)
        return cls(
            counts=run.counts,
            step_s=run.step_s,
            window=run.window,
            data_wait_s=run.data_wait_s,
            spans=run.spans,
        )

    @property
    def seen_s(self) -> float:
        """Seconds of the start-up and all steps. If the start-up is unknown, seconds of the steps only."""
        start_up_s = sum(_finite(s for name in START_UPS & {*self.spans} for s in self.spans[name].seconds))
        steps_s = sum(
            _finite(self.step_s[1:] if start_up_s else self.step_s)
        )  # the start-up ends with the first step
        return start_up_s + steps_s

    @property
    def counted_steps(self) -> set[int]:
        """The numbers (from 1) of the steps that any rank counted."""
        return {step for entry in self.counts for step in (entry.counts.step, *entry.counts.also_counted)}

    @property
    def span_names(self) -> list[str]:
        """The names of spans that are not steps."""
        of_counts = (name for entry in self.counts for name in entry.counts.spans)
        of_steps = set(map(step_name, self.counted_steps))
        return [name for name in dict.fromkeys((*self.spans, *of_counts)) if name not in of_steps]

    @property
    def measured_s(self) -> Sequence[float]:
        """Seconds of each step in the window."""
        return self.step_s[slice(*self.window)]

    @property
    def measured_wait_s(self) -> Sequence[float]:
        """Seconds that each step in the window waited for batches; empty if no loader was seen."""
        waits = self.data_wait_s[slice(*self.window)]
        return waits if any(waits) else ()

    @property
    def worker_batches(self) -> list[Amounts]:
        """The counts of one batch in a data loader's worker, for each rank that has one."""
        batches = [entry.counts.worker_batch for entry in self.counts]
        return [
            {"kernels": sum(batch.ops.values()), "python_calls": batch.python.total}
            for batch in batches
            if batch is not None
        ]

    def in_step(self, step: int) -> Amounts:
        """Return the input of a step, and the maximum of each count over the ranks.

        Kernels in compiled code are not seen, so the number of kernels is unknown if there is such code.
        """
        of_ranks = (entry.counts.in_step(step) for entry in self.counts)
        amounts = _most(_in_step(counts) for counts in of_ranks if counts is not None)
        amounts = {**amounts, "input": self.input_of(step)}
        is_compiled = any(entry.counts.compiled is not None for entry in self.counts)
        return {**amounts, "kernels": None} if is_compiled else amounts

    def row(self, name: str, seconds: Sequence[float] = (), amounts: Amounts | None = None) -> SpanRow:
        """Return the row of a span. `seconds` has the duration of each occurrence; empty: unknown."""
        known_s = _finite(seconds)
        return SpanRow(
            name=name,
            times=len(seconds) or None,
            median_s=median(known_s) if known_s else None,
            share=sum(known_s) / self.seen_s if known_s and self.seen_s else None,
            **(amounts or {}),
        )

    def steps(self, name: str, steps: Sequence[int]) -> SpanRow:
        """Return the row of steps with equal counts. Only steps that this launch counted are included."""
        counted = [step for step in steps if step in self.counted_steps]
        if not counted:
            return SpanRow(name=name)
        seconds = [self.step_s[step - 1] for step in counted if step <= len(self.step_s)]
        return replace(self.row(name, seconds, self.in_step(counted[0])), times=len(counted))

    def input_of(self, step: int) -> str | None:
        """Return the input of a step, on the first rank that has one; None if no rank has one."""
        of_ranks = (entry.counts.in_step(step) for entry in self.counts)
        inputs = next((counts.inputs for counts in of_ranks if counts is not None and counts.inputs), {})
        return inputs_in_words(inputs) or None

    def span(self, name: str) -> SpanRow:
        """Return the row of a span that is not a step."""
        times = self.spans.get(name, SpanTimes(seconds=()))
        of_ranks = [
            (len(entry.ranks), entry.counts.spans[name])
            for entry in self.counts
            if name in entry.counts.spans
        ]
        written = [ranks * span.bytes_written for ranks, span in of_ranks if span.bytes_written is not None]
        amounts = _most(_in_event(span) for _, span in of_ranks)
        row = self.row(name, times.seconds, {**amounts, "bytes_written": sum(written) if written else None})
        # It is unknown to which occurrence a wait belongs, so show the mean instead of the median.
        return replace(row, times=times.occurrences, median_s=times.mean_s) if times.waits else row


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The launches on one side of a comparison, newest first. There is at least one."""

    arm: str = ""
    launches: Sequence[_Launch]

    @property
    def newest(self) -> _Launch:
        """The newest counted launch, or the newest launch if none was counted."""
        return next((launch for launch in self.launches if launch.counts), self.launches[0])

    @property
    def span_names(self) -> list[str]:
        """The names of the spans that are not steps, from all launches."""
        return [name for launch in (self.newest, *self.launches) for name in launch.span_names]

    def span(self, name: str) -> SpanRow:
        """Return the row of a span that is not a step, from the newest launch that has it."""
        having = (launch for launch in (self.newest, *self.launches) if name in launch.span_names)
        return next((launch.span(name) for launch in having), SpanRow(name=name))


def rows(runs: Sequence[Run], before: Sequence[Run] = ()) -> list[SpanRow]:
    """Return the spans of the newest counted launch, with one row per span, or one per span and arm.

    If `before` has the launches of arm A, `runs` has those of arm B. A span that the newest launch lacks,
    such as a cold start-up, is taken from the newest launch that has it.
    """
    launches, others = ([_Launch.of(run) for run in reversed(side)] for side in (runs, before))
    if not launches:
        return []
    if not others:
        return _rows([_Side(launches=launches)])
    return _rows([_Side(arm="A", launches=others), _Side(arm="B", launches=launches)])


def of_result(result: Measurement) -> list[SpanRow]:
    """Return the spans of the healthy launches of a case."""
    return rows(result.healthy_runs, result.verdict.healthy(result.before) or result.before)


def table(rows: Sequence[SpanRow]) -> Table:
    """Return spans as a table, without columns that are unknown in all rows; empty without rows."""
    columns = {heading: cell for heading, cell in _COLUMNS.items() if any(map(cell, rows))}
    arms = ("arm",) if any(row.arm for row in rows) else ()
    cells = [
        (row.name, *(row.arm for _ in arms), *(cell(row) or NONE for cell in columns.values()))
        for row in rows
    ]
    return Table(caption=CAPTION, headers=("span", *arms, *columns), rows=cells, text_columns=1 + len(arms))


def of_counts(counts: Sequence[RankCounts]) -> Table:
    """Return the spans of a baseline as a table. A baseline has only counts."""
    return table(_rows([_Side(launches=[_Launch(counts=counts)])]))


def of_cases(results: Sequence[Measurement]) -> Table:
    """Return the spans of all cases as one table."""
    of_each = [(result.case_id, row) for result in results for row in of_result(result)]
    whole = table([row for _, row in of_each])
    cells = [(case_id, *row) for (case_id, _), row in zip(of_each, whole.rows, strict=True)]
    return Table(headers=("case", *whole.headers), rows=cells, text_columns=1 + whole.text_columns)


def held(runs: Sequence[Run]) -> list[str]:
    """For each event, name the step in which the event was longest during the last launch.

    An example is `step 21 contained: save checkpoint 3.2 s`. Events that happen in most steps are left out,
    because they do not explain why one step is longer than others.
    """
    if not runs or not runs[-1].measured_steps:
        return []
    run = runs[-1]
    start, stop = runs[-1].window
    usual_s = median(run.measured_steps)
    lines = []
    for name, span in run.spans.items():
        if not span.steps:  # the span was before the first step
            continue
        times = zip(span.seconds, span.steps, strict=True)
        measured = [(seconds, step) for seconds, step in times if start <= step < stop]
        longest_s, step = max(measured, default=(0.0, 0))
        # If a span is longer than its step, the span lasted several steps. Leave it out.
        is_long = HELD * usual_s < longest_s <= run.step_s[step]
        if is_long and 2 * len(measured) <= stop - start:
            lines.append(f"step {step + 1} contained: {name} {_time(longest_s)}")
    return lines


def _rows(sides: Sequence[_Side]) -> list[SpanRow]:
    return [
        replace(row, arm=side.arm)
        for of_sides in _of_sides(sides)
        for side, row in zip(sides, of_sides, strict=True)
    ]


def _of_sides(sides: Sequence[_Side]) -> Iterator[list[SpanRow]]:
    """Yield the rows of each span, one per side, in the order of a run."""
    launches = [side.newest for side in sides]
    if not any(launch.counts or launch.spans or launch.measured_wait_s for launch in launches):
        return  # only step times are known, and other tables have these
    names = list(dict.fromkeys(name for side in sides for name in side.span_names))
    start_ups = [*filter(is_of_start_up, names)]
    late = {step for launch in launches for step in launch.counted_steps if 0 < launch.window[1] < step}
    is_timed = any(launch.measured_s for launch in launches)
    for name in sorted(start_ups, key=_place):
        yield [side.span(name) for side in sides]
    for steps, counted in _groups(launches, late):
        yield [launch.steps(_name(steps, counted), steps) for launch in launches]
    if is_timed:
        yield [launch.row(MEASURED_STEPS, launch.measured_s) for launch in launches]
    for step in sorted(late):
        yield [launch.steps(f"{step_name(step)} (after the window)", [step]) for launch in launches]
    if is_timed:
        yield [launch.row(DATA_WAIT, launch.measured_wait_s) for launch in launches]
    if any(launch.worker_batches for launch in launches):
        yield [launch.row(WORKER_BATCH, amounts=_most(launch.worker_batches)) for launch in launches]
    for name in names:
        if name not in start_ups:
            yield [side.span(name) for side in sides]


def _place(start_up: str) -> tuple[bool, int]:
    """Return the sort key of a start-up or its part: warm before cold, and the total before its parts."""
    part = start_up.removeprefix(COLD).removeprefix(START_UP).removeprefix(": ")
    return start_up.startswith(COLD), PARTS.index(part) if part in PARTS else -1


def _groups(launches: Sequence[_Launch], late: Collection[int]) -> list[tuple[list[int], list[int]]]:
    """Group the counted steps: two steps are in one group if, on each side, they have the same counts.

    Returns a pair for each group: the steps of the group, and all counted steps.
    """
    counted = sorted({step for launch in launches for step in launch.counted_steps} - {*late})
    groups = grouped({step: step for step in counted}, partial(_are_alike, launches))
    return [([*group], counted) for group in groups]


def _are_alike(launches: Sequence[_Launch], first: int, second: int) -> bool:
    """Return whether two steps have equal counts on each side.

    A difference in Python calls is ignored if it is small enough to be chance.
    """
    for launch in launches:
        then = dict(launch.in_step(first))
        now = dict(launch.in_step(second))
        calls = then.pop("python_calls", None)
        calls_now = now.pop("python_calls", None)
        if then != now or (calls is None) != (calls_now is None):
            return False
        if calls is not None and calls_now is not None and not differ_by_chance(calls_now, calls):
            return False
    return True


def _name(steps: Sequence[int], counted: Sequence[int]) -> str:
    """Name a group of steps with equal counts.

    The name is that of the first step, if the group has only one step or contains the first counted step.
    Otherwise, the name says which steps they are, such as `every 5th step (5, 10)`.
    """
    if len(steps) == 1 or steps[0] == counted[0]:
        return step_name(steps[0])
    return when(steps, counted).removeprefix("in ").partition(" of ")[0]


def _in_step(counts: Counts) -> Amounts:
    return {
        "kernels": report_counts.kernels(counts),
        "host_reads": sum(counts.host_reads.values()),
        "python_calls": None if counts.python is None else counts.python.total,
        "collectives": sum(call.count for call in counts.collectives),
        "collective_bytes": report_counts.moved(counts),
        "peak_bytes": report_counts.peak(counts),
    }


def _in_event(counts: Counts) -> Amounts:
    return {
        "python_calls": None if counts.python is None else counts.python.total,
        "collectives": counts.collectives_begun,
        "peak_bytes": counts.allocator_peak,
        "modules": None if counts.modules is None else sum(counts.modules.values()),
    }


def _most(of_ranks: Iterable[Amounts]) -> Amounts:
    """Return the maximum of each amount over the ranks for which it is known."""
    most: dict[str, int | None] = {}
    for amounts in of_ranks:
        for name, value in amounts.items():
            counted = [number for number in (most.get(name), value) if number is not None]
            most[name] = max(counted, default=None)
    return most


def _finite(seconds: Iterable[float]) -> list[float]:
    return [duration_s for duration_s in seconds if isfinite(duration_s)]


def _time(seconds: float) -> str:
    """Format a duration, in ms below 1 s and otherwise in s.

    `duration`, which suits steps, changes to seconds only at 10 s. Events take longer than steps.
    """
    return f"{seconds:,.1f} s" if seconds >= 1 else duration(seconds)


def _collectives(row: SpanRow) -> str | None:
    if row.collectives is None:
        return None
    moved = f", {amount(row.collective_bytes, 'bytes')}" if row.collective_bytes else ""
    return f"{row.collectives:,}{moved}"


def _cell(value: float | None, written: Callable[[float], str]) -> str | None:
    return None if value is None else written(value)


def _amount(value: int | None, unit: Unit) -> str | None:
    return _cell(value, lambda number: amount(number, unit))


_COLUMNS: Mapping[str, Callable[[SpanRow], str | None]] = {
    "times": lambda row: _amount(row.times, "calls"),
    "median": lambda row: _cell(row.median_s, _time),
    "share": lambda row: _cell(row.share, "{:.1%}".format),
    "input": lambda row: row.input,
    "kernels": lambda row: _amount(row.kernels, "calls"),
    "host reads": lambda row: _amount(row.host_reads, "calls"),
    "Python": lambda row: _amount(row.python_calls, "calls"),
    "collectives": _collectives,
    "written": lambda row: _amount(row.bytes_written, "bytes"),
    "peak": lambda row: _amount(row.peak_bytes, "bytes"),
    "modules": lambda row: _amount(row.modules, "modules"),
}
"""The cell of a row in each column; None: unknown."""
