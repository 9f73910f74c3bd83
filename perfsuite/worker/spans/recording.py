"""Records the spans of a run that are no steps: events, such as a checkpoint, and phases. Imports no torch.

Only the seconds that the thread which trains is in a span count: what other threads do meanwhile delays
nothing. No error of ours reaches the training: it becomes a note.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import Any

from perfsuite.frameworks.common.own_list import OwnList
from perfsuite.results.counts import Counts
from perfsuite.results.rank_report import SpanTimes
from perfsuite.worker.clock.timers import HostTimer
from perfsuite.worker.spans.running import Running

MOST_NAMES = 50  # of spans in a launch: a script may make names, as `rollout 17`


@dataclass(kw_only=True, eq=False)
class Span:
    """One time that a thread is in a span. What it does is counted the first time."""

    name: str
    thread: int
    is_event: bool  # recognised, and not named by a case or a script
    is_counted: bool
    steps: int  # that had ended when it began
    since: float | None = None  # None before it is timed
    collectives: int | None = None  # when it began; then those that it began itself; None: unknown
    peak: int | None = None  # of the allocator when it began; then its own, if that is higher; None: unknown
    bytes_written: int | None = None  # None: nothing was seen to be written
    left: Background | None = None  # what it left to other threads


@dataclass(kw_only=True, eq=False)
class Background:
    """Work that a span left to other threads."""

    future: Any = None  # of the work; None before it is known
    is_mixed: bool = False  # another one began before it had ended: which of them writes is not known

    def is_over(self) -> bool:
        """Return whether it has ended."""
        return self.future is not None and bool(self.future.done())


@dataclass(frozen=True, kw_only=True)
class Meters:
    """What is read when a span begins and when it ends. Each returns None where it is not known."""

    now: Callable[[], float] = HostTimer().stamp
    collectives: Callable[[], int | None] = lambda: None  # that have begun so far
    peak: Callable[[], int | None] = lambda: None  # bytes of the allocator's peak so far


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let an error of `method` become a note; it then returns None."""

    @functools.wraps(method)
    def guarded(self: Spans, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.note(f"events and phases are not all known ({type(error).__name__}: {error})")
            return None

    return guarded


class Spans:
    """The spans of this process. One within another of its name is part of that, as is an event in another.

    What a span does is counted the first time. Later ones only have their seconds.
    """

    def __init__(self, meters: Meters | None = None) -> None:
        self.notes: list[str] = []  # why something is not known, each once
        self._meters = meters or Meters()
        self._pid = os.getpid()
        self._steps: Callable[[], int] = lambda: 0
        self._running: Running | None = None  # there since the first step of a rank
        self._thread: int | None = None  # that trains; None before the first step
        self._open = defaultdict[int, list[Span]](list)  # by thread, the outermost first
        self._times = OwnList[tuple[str, int, int, float]]()  # name, thread, steps, seconds
        self._first: dict[tuple[int, str], Span] = {}  # of each thread and name, those that have ended
        self._left: list[Span] = []  # those that are counted and left work to other threads

    def train(self, steps: Callable[[], int], running: Path | None = None) -> None:
        """Take the calling thread for the one that trains. `steps` returns how many steps have ended.

        `running`: the file that says in which span it has been for long.
        """
        self._thread = _training_thread()
        self._steps = steps
        self._running = None if running is None else Running(running, self.open_for)

    @_guarded
    def begin(self, name: str, *, is_event: bool = False) -> Span | None:
        """Begin a span of the calling thread. Returns None where it is part of one that is open."""
        thread = get_ident()
        others = self._open[thread]
        is_part = any(other.name == name or (is_event and other.is_event) for other in others)
        if is_part or os.getpid() != self._pid:  # a process that was forked has no report
            return None
        is_counted = (thread, name) not in self._first
        if is_counted and len({*(known for _, known in [*self._first]), name}) > MOST_NAMES:
            self.note(f"only the first {MOST_NAMES} names of events and phases are reported")
            return None
        span = Span(
            name=name,
            thread=thread,
            is_event=is_event,
            is_counted=is_counted,
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
    def end(self, span: Span) -> None:
        """End a span."""
        assert span.since is not None
        seconds = self._meters.now() - span.since
        others = self._open[span.thread]
        if span in others:  # with what was begun in it and never ended
            del others[others.index(span) :]
        if self._running is not None and span.thread == self._thread:
            self._running.ended()
        if span.is_counted:
            span.collectives = _more(span.collectives, self._meters.collectives())
            span.peak = _higher(span.peak, self._meters.peak())
            self._first.setdefault((span.thread, span.name), span)
        self._times.append((span.name, span.thread, span.steps, seconds))

    @_guarded
    def wrote(self, number: int, *, in_background: bool = False) -> None:
        """Add bytes that the calling thread wrote into files to the spans that it is in.

        `in_background`: and to the span of another thread that left the writing to it, if there is one.
        """
        thread = get_ident()
        behind = [span for span in self._left if span.thread != thread and not _is_over(span)]
        behind = behind if in_background else []
        for span in (*self._open[thread], *behind):
            span.bytes_written = number + (span.bytes_written or 0)

    @_guarded
    def leave(self) -> Background:
        """Note, before it begins, that work of the calling thread's spans will go on in the background."""
        for span in self._left:
            if span.left is not None and not span.left.is_over():
                span.left.is_mixed = True
        background = Background()
        for span in self._open[get_ident()]:
            if span.is_counted:
                span.left = background
                self._left.append(span)
        return background

    def open_for(self, seconds: float) -> str | None:
        """Return the name of the span in which training has been for so long without a step; else None."""
        open_spans: list[Span] = [*self._open.get(self._thread or 0, ())]
        for span in open_spans:
            is_between_steps = span.steps == self._steps()
            if is_between_steps and span.since is not None and self._meters.now() - span.since >= seconds:
                return span.name
        return None

    def times(self) -> dict[str, SpanTimes]:
        """Return each time of each span of the thread that trains, by name."""
        by_name = defaultdict[str, list[tuple[int, float]]](list)
        for name, thread, steps, seconds in self._times:
            if thread == self._thread:
                by_name[name].append((steps, seconds))
        for span in self._open.get(self._thread or 0, ()):
            self.note(f"{span.name}: had begun and not ended when the last step ended, which is not reported")
        return {
            name: SpanTimes(steps=tuple(steps for steps, _ in times), seconds=tuple(s for _, s in times))
            for name, times in by_name.items()
        }

    def counts(self) -> dict[str, Counts]:
        """Return what each span of the thread that trains did the first time, by name."""
        return {
            name: self._counts(span) for (thread, name), span in self._first.items() if thread == self._thread
        }

    def _counts(self, span: Span) -> Counts:
        counts = Counts(
            bytes_written=span.bytes_written, collectives_begun=span.collectives, allocator_peak=span.peak
        )
        if span.left is None:
            return counts
        if span.left.is_mixed or not span.left.is_over():
            self.note(
                f"{span.name}: what the first wrote is not known: it was still being written when "
                f"{'the next one began' if span.left.is_mixed else 'the last step ended'}"
            )
            counts = counts.replace(bytes_written=None)
        return counts.replace(collectives_begun=None)  # a thread in the background may have begun some

    def note(self, why: str) -> None:
        """Note why something is not known, once."""
        if why not in self.notes:
            self.notes.append(why)


def _training_thread() -> int:
    """Return the thread that runs the script.

    Where optimizers step in backward, the caller may be a thread of autograd, which Python did not start.
    """
    here = threading.current_thread()
    return (threading.main_thread() if isinstance(here, threading._DummyThread) else here).ident or 0


def _is_over(span: Span) -> bool:
    return span.left is None or span.left.is_over()


def _more(before: int | None, now: int | None) -> int | None:
    """Return the growth of a number; None where it shrank, as when a process group was destroyed."""
    return None if before is None or now is None or now < before else now - before


def _higher(before: int | None, now: int | None) -> int | None:
    """Return a peak that is new. A lower one cannot be told from the peak before."""
    return None if before is None or now is None or now <= before else now
