"""Record the events (such as saving a checkpoint) and phases of a run as spans. Imports no torch.

Only the seconds of the training thread are reported, because other threads do not delay the training. Errors
in perfsuite become notes, and never reach the training.
"""

from __future__ import annotations

import functools
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import get_ident
from typing import Any

from perfsuite.frameworks.common.own_list import OwnList
from perfsuite.results.counts import Counts
from perfsuite.results.rank_report import SpanTimes
from perfsuite.worker.clock.timers import HostTimer, training_thread
from perfsuite.worker.spans.running import Running

# Maximum number of span names in a launch. There must be a limit, because a script can generate names (such
# as `rollout 17`).
MOST_NAMES = 50


@dataclass(kw_only=True, eq=False)
class Span:
    """One occurrence of a span in a thread.

    Work is counted only in the first step that contains the span. A script can save one checkpoint in several
    calls, so the work of all occurrences in this step is added to the first `Span`.
    """

    name: str
    thread: int
    is_event: bool  # whether this is an event that perfsuite recognised. False: a case or a script named it
    is_counted: bool
    steps: int  # number of steps that had ended when the span began
    is_wait: bool = False  # whether this only waits for work that an earlier occurrence left to other threads
    # Whether a span around this one has ended first, for example because this is a phase inside a generator.
    is_detached: bool = False
    since: float | None = None  # the time at which the span began. None before that
    # Before the span ends: the number of collectives that had begun before the span. After its end: the
    # number of collectives that began inside the span. None if unknown.
    collectives: int | None = None
    # Before the span ends: the allocator's peak before the span, in bytes. After its end: the new peak, or
    # None if the span did not raise the peak. Also None if unknown.
    peak: int | None = None
    bytes_written: int | None = None  # None if no write was seen
    left: Background | None = None  # work that the span left to other threads
    # Later occurrences in the same step whose work is not added yet, because this occurrence or the later one
    # left work to other threads, and the bytes of that work are not known yet.
    later: list[Span] = field(default_factory=list)

    def add(self, span: Span) -> None:
        """Add the work of a later occurrence in the same step."""
        if self.left is not None or span.left is not None:
            self.later.append(span)
            return
        self.bytes_written = _sum(self.bytes_written, span.bytes_written)
        self.collectives = _sum(self.collectives, span.collectives)
        self.peak = _highest(self.peak, span.peak)


@dataclass(kw_only=True, eq=False)
class Background:
    """Work that a span left to other threads."""

    name: str  # the name of the span
    since: float  # the time just before the span started this work
    future: Any = None  # the future of the work. None until the work has been started
    # Whether other background work began before this work had ended. It is then unknown which work wrote
    # what.
    is_mixed: bool = False

    def is_over(self) -> bool:
        """Return whether the work has ended."""
        return self.future is not None and bool(self.future.done())


@dataclass(frozen=True, kw_only=True)
class Meters:
    """Functions to call when a span begins and when it ends. They return None if a value is unknown."""

    now: Callable[[], float] = HostTimer().stamp
    collectives: Callable[[], int | None] = lambda: None  # the number of collectives that have begun so far
    peak: Callable[[], int | None] = lambda: None  # the allocator's peak so far, in bytes


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Turn an error in `method` into a note. The method then returns None."""

    @functools.wraps(method)
    def guarded(self: Spans, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.note(f"some events or phases are unknown ({type(error).__name__}: {error})")
            return None

    return guarded


class Spans:
    """The spans of this process.

    If a span is inside another span, and both have the same name or both are events, the inner span is only a
    part of the outer span and is not recorded. In the first step that contains the span, its occurrences have
    counts and seconds. Later occurrences have only seconds. An occurrence that ends with an exception is left
    out, because a save that fails early would look like a fast save.
    """

    def __init__(self, meters: Meters | None = None) -> None:
        self.notes: list[str] = []  # reasons why values are unknown, without duplicates
        self._meters = meters or Meters()
        self._pid = os.getpid()
        self._steps: Callable[[], int] = lambda: 0
        self._running: Running | None = None  # set at the first step of a rank
        self._thread: int | None = None  # the training thread. None before the first step
        self._open = defaultdict[int, list[Span]](list)  # thread -> its open spans, the outermost first
        self._times = OwnList[tuple[str, int, int, float, bool]]()  # name, thread, steps, seconds, is_wait
        self._failed = OwnList[tuple[str, int, str]]()  # name, thread, kind of the exception
        self._moved = OwnList[tuple[str, int]]()  # name and thread of spans that ended in another thread
        # For each thread and name, the first span that has ended.
        self._first: dict[tuple[int, str], Span] = {}
        self._left: list[Span] = []  # counted spans that left work to other threads
        self._behind: list[Background] = []  # background work of the training thread that might not be over

    def train(self, steps: Callable[[], int], running: Path | None = None) -> None:
        """Treat the calling thread as the training thread.

        `steps` returns the number of steps that have ended. `running` is a file. If a span runs for a long
        time, its name is written into this file.
        """
        self._thread = training_thread()
        self._steps = steps
        self._running = None if running is None else Running(running, self.open_for)

    def stop_reporting(self) -> None:
        """Stop reporting long spans. The thread that looks for them removes its file and ends."""
        if self._running is not None:
            self._running.stop()

    @_guarded
    def begin(self, name: str, *, is_event: bool = False, is_wait: bool = False) -> Span | None:
        """Begin a span in the calling thread. Return None if the span is not recorded.

        With `is_wait`, the seconds are added to those of the span's occurrences, but the wait does not
        count as another occurrence.
        """
        thread = get_ident()
        others = self._open[thread]
        # A span that outlived the span around it might never end. If it began in an earlier step, it does not
        # count as a span around the new one.
        around = [other for other in others if not other.is_detached or other.steps == self._steps()]
        is_part = any(other.name == name or (is_event and other.is_event) for other in around)
        if is_part or os.getpid() != self._pid:  # spans of a forked process would not be reported
            return None
        first = self._first.get((thread, name))
        is_counted = not is_wait and (first is None or first.steps == self._steps())
        if first is None and len({*(span_name for _, span_name in [*self._first]), name}) > MOST_NAMES:
            self.note(f"only the first {MOST_NAMES} names of events and phases are reported")
            return None
        span = Span(
            name=name,
            thread=thread,
            is_event=is_event,
            is_counted=is_counted,
            is_wait=is_wait,
            steps=self._steps(),
        )
        if is_counted:
            span.collectives = self._meters.collectives()
            span.peak = self._meters.peak()
        if self._running is not None and thread == self._thread:
            self._running.begin()
        others.append(span)
        span.since = self._meters.now()
        return span

    @_guarded
    def end(self, span: Span, error: type[BaseException] | None = None) -> None:
        """End a span. `error` is the class of the exception that ended it, or None.

        Spans that began after this one stay open: a phase inside a generator can end later than the phase
        around it. A span that ends in another thread is left out, because its seconds belong to no thread.
        """
        assert span.since is not None
        seconds = self._meters.now() - span.since
        others = self._open[span.thread]
        if span in others:
            for later in others[others.index(span) + 1 :]:
                later.is_detached = True
            others.remove(span)
        if self._running is not None and span.thread == self._thread:
            self._running.ended()
        if get_ident() != span.thread:
            self._moved.append((span.name, span.thread))
            return
        if error is not None:
            self._failed.append((span.name, span.thread, error.__name__))
            if not span.is_wait:  # the training has waited, even if the work then failed
                return
        if span.is_counted:
            span.collectives = _more(span.collectives, self._meters.collectives())
            span.peak = _higher(span.peak, self._meters.peak())
            first = self._first.setdefault((span.thread, span.name), span)
            if first is not span:
                first.add(span)
        self._times.append((span.name, span.thread, span.steps, seconds, span.is_wait))

    @_guarded
    def wrote(self, number: int, *, in_background: bool = False) -> None:
        """Add `number` bytes, which the calling thread wrote into files, to the thread's open spans.

        With `in_background`, also add the bytes to spans of other threads, if the background work of these
        spans has not ended.
        """
        thread = get_ident()
        behind = [span for span in self._left if span.thread != thread and not _is_over(span)]
        behind = behind if in_background else []
        for span in (*self._open[thread], *behind):
            span.bytes_written = number + (span.bytes_written or 0)

    @_guarded
    def leave(self) -> Background:
        """Record that the open spans of the calling thread are about to start work in the background."""
        for span in self._left:
            if span.left is not None and not span.left.is_over():
                span.left.is_mixed = True
        thread = get_ident()
        open_spans = self._open[thread]
        background = Background(name=open_spans[0].name if open_spans else "", since=self._meters.now())
        for span in open_spans:
            if span.is_counted:
                span.left = background
                self._left.append(span)
        if open_spans and thread == self._thread:
            self._behind.append(background)
        return background

    def open_for(self, seconds: float) -> str | None:
        """Return the name of a span that has run for at least `seconds`, or None if there is no such span.

        A span is ignored if a step has ended since the span began. This does not apply to work that a span
        left to other threads. Such work counts until it has ended, because the training can wait for it in
        ways that are not seen.
        """
        before = self._meters.now() - seconds
        open_spans: list[Span] = [*self._open.get(self._thread or 0, ())]
        for span in open_spans:
            if span.steps == self._steps() and span.since is not None and span.since <= before:
                return span.name
        for background in [*self._behind]:
            if background.is_over():
                self._behind.remove(background)
            elif background.future is not None and background.since <= before:
                return background.name
        return None

    def times(self) -> dict[str, SpanTimes]:
        """Return, for each span of the training thread, the steps and seconds of all its occurrences."""
        by_name = defaultdict[str, list[tuple[int, float, bool]]](list)
        for name, thread, steps, seconds, is_wait in self._times:
            if thread == self._thread:
                by_name[name].append((steps, seconds, is_wait))
        for span in self._open.get(self._thread or 0, ()):
            self.note(f"{span.name}: the last one was still open when the last step ended, so it is left out")
        for name, kinds in self._failures().items():
            number = f"{len(kinds)} ended with an exception ({', '.join(dict.fromkeys(kinds))})"
            self.note(f"{name}: {number} and {'does' if len(kinds) == 1 else 'do'} not count")
        for name, times_moved in self._moved_out().items():
            verb = "does" if times_moved == 1 else "do"
            self.note(f"{name}: {times_moved} ended in another thread and {verb} not count")
        return {
            name: SpanTimes(
                steps=tuple(steps for steps, _, _ in times),
                seconds=tuple(seconds for _, seconds, _ in times),
                waits=sum(is_wait for _, _, is_wait in times),
            )
            for name, times in by_name.items()
        }

    def _failures(self) -> dict[str, list[str]]:
        """Return, for each span of the training thread that failed, the kinds of its exceptions."""
        by_name = defaultdict[str, list[str]](list)
        for name, thread, kind in self._failed:
            if thread == self._thread:
                by_name[name].append(kind)
        return by_name

    def _moved_out(self) -> Counter[str]:
        """Return, for each span that began in the training thread, how often it ended in another thread."""
        return Counter(name for name, thread in self._moved if thread == self._thread)

    def counts(self) -> dict[str, Counts]:
        """Return, for each span of the training thread, the counts of the first step that contains it."""
        return {
            name: self._in_first_step(span).replace(occurrences=self._occurrences(name))
            for (thread, name), span in self._first.items()
            if thread == self._thread
        }

    def _occurrences(self, name: str) -> int | None:
        """Return how often a span of the training thread ended. None if some occurrences are left out."""
        open_names = {span.name for span in self._open.get(self._thread or 0, ())}
        if name in open_names or name in self._failures() or name in self._moved_out():
            return None
        return sum(
            its_name == name and thread == self._thread and not is_wait
            for its_name, thread, _, _, is_wait in self._times
        )

    def _in_first_step(self, first: Span) -> Counts:
        counts = self._counts(first)
        for span in first.later:
            more = self._counts(span)
            counts = counts.replace(
                bytes_written=_sum(counts.bytes_written, more.bytes_written),
                collectives_begun=_sum(counts.collectives_begun, more.collectives_begun),
                allocator_peak=_highest(counts.allocator_peak, more.allocator_peak),
            )
        return counts

    def _counts(self, span: Span) -> Counts:
        counts = Counts(
            bytes_written=span.bytes_written, collectives_begun=span.collectives, allocator_peak=span.peak
        )
        if span.left is None:
            return counts
        if span.left.is_mixed or not span.left.is_over():
            self.note(
                f"{span.name}: the bytes written by the first one are unknown, because its work in the "
                "background was still running when "
                f"{'the next one began' if span.left.is_mixed else 'the last step ended'}"
            )
            counts = counts.replace(bytes_written=None)
        return counts.replace(collectives_begun=None)  # a background thread might have begun collectives

    def note(self, why: str) -> None:
        """Add the reason why a value is unknown, unless it is already there."""
        if why not in self.notes:
            self.notes.append(why)


def _is_over(span: Span) -> bool:
    return span.left is None or span.left.is_over()


def _more(before: int | None, now: int | None) -> int | None:
    """Return the growth of a number. None if it shrank, for example because a process group was destroyed."""
    return None if before is None or now is None or now < before else now - before


def _sum(first: int | None, second: int | None) -> int | None:
    """Return the sum of two numbers. None if one of them is unknown."""
    return None if first is None or second is None else first + second


def _highest(first: int | None, second: int | None) -> int | None:
    """Return the higher of two peaks.

    A peak is None if its span did not raise the allocator's peak, or if the peak is unknown.
    """
    return max((peak for peak in (first, second) if peak is not None), default=None)


def _higher(before: int | None, now: int | None) -> int | None:
    """Return the new peak. If it did not rise, return None, because earlier work might have reached it."""
    return None if before is None or now is None or now <= before else now
