"""Says which events and phases a launch had, how long it waited for them, and what they wrote. Pure."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from perfsuite.report.text import NONE, Table, plural
from perfsuite.results.amounts import amount, duration
from perfsuite.results.counts import spans
from perfsuite.results.rank_report import SpanTimes
from perfsuite.results.run import Run
from perfsuite.results.session_file import Measurement

AT_THE_START = "before step 1"
HELD = 0.1  # share of a usual step from which on an event is named that one step holds
CAPTION = (
    "Seconds that the training waited, on the rank that waited longest; bytes of all ranks, the first time. "
    "They are in the time of the steps that held them."
)
HEADERS = ("event or phase", "times", "median", "longest", "written", "when")


class _Event(NamedTuple):
    name: str
    times: SpanTimes
    written: int | None  # bytes, of all ranks, the first time; None: unknown

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of the table."""
        seconds = self.times.seconds
        written = NONE if self.written is None else amount(self.written, "bytes")
        return (
            self.name,
            str(len(seconds)),
            _time(median(seconds)),
            _time(max(seconds)),
            written,
            _when(self.times.steps),
        )


def table(runs: Sequence[Run]) -> Table:
    """Return the events and phases of the last launch as a table; empty without any."""
    rows = [event.row for event in _events(runs)]
    return Table(caption=CAPTION, headers=HEADERS, rows=rows, last_text_columns=1)


def of_cases(results: Sequence[Measurement]) -> Table:
    """Return the events and phases of all cases as one table; empty without any."""
    rows = [(each.case_id, *event.row) for each in results if not each.dry for event in _events(each.runs)]
    return Table(caption=CAPTION, headers=("case", *HEADERS), rows=rows, text_columns=2, last_text_columns=1)


def held(runs: Sequence[Run]) -> list[str]:
    """Return which step of the last launch was long as it held an event, the longest of each: `step 21 held:
    save checkpoint 3.2 s`. What most of the steps hold makes none of them long.
    """
    if not runs or not runs[-1].measured_steps:
        return []
    run, (start, stop) = runs[-1], runs[-1].window
    usual_s = median(run.measured_steps)
    found = []
    for event in _events(runs):
        times = zip(event.times.seconds, event.times.steps, strict=True)
        measured = [(seconds, step) for seconds, step in times if start <= step < stop]
        longest_s, step = max(measured, default=(0.0, 0))
        if longest_s > HELD * usual_s and 2 * len(measured) <= stop - start:
            found.append(f"step {step + 1} held: {event.name} {_time(longest_s)}")
    return found


def _events(runs: Sequence[Run]) -> Iterator[_Event]:
    for name, times in runs[-1].spans.items() if runs else ():
        if times.steps:  # else it is a part of the start
            yield _Event(name, times, _written(runs[-1], name))


def _time(seconds: float) -> str:
    """Return a time in s from one second on: events take longer than steps."""
    return f"{seconds:,.1f} s" if seconds >= 1 else duration(seconds)


def _written(run: Run, name: str) -> int | None:
    spans_of = [(len(each.ranks), each.counts.spans.get(name)) for each in run.counts]
    written = [(ranks, span.bytes_written) for ranks, span in spans_of if span is not None]
    known = [ranks * number for ranks, number in written if number is not None]
    return sum(known) if known else None


def _when(steps_before: Sequence[int]) -> str:
    """Return in which steps something began, from how many had ended each time."""
    in_steps = sorted({ended + 1 for ended in steps_before if ended})
    parts = [AT_THE_START] if len(in_steps) < len({*steps_before}) else []
    if len(in_steps) > 6 and not _is_range(in_steps):
        parts.append(f"in {plural(len(in_steps), 'step')}, {in_steps[0]} to {in_steps[-1]}")
    elif in_steps:
        parts.append(f"in step{'s' * (len(in_steps) > 1)} {spans(in_steps)}")
    return ", ".join(parts)


def _is_range(numbers: Sequence[int]) -> bool:
    return len(numbers) == numbers[-1] - numbers[0] + 1
