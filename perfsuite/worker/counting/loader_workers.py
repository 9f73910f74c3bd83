"""Count what a `DataLoader`'s worker process does for a batch, and what it keeps.

The counts are passed to the rank. Imports torch.

All workers, however they are started, make batches with the `fetch` method of one of two private classes of
torch. The workers of torchdata's StatefulDataLoader do so too. If torch does not have these classes, workers
are not counted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing import queues, resource_sharer
from socket import socket
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

from perfsuite import documents
from perfsuite.frameworks.common import private
from perfsuite.frameworks.common.private import (
    TorchDispatchMode,
    current_dispatch_mode_stack,
    overloadpacket,
)
from perfsuite.results.counts import KeptObjects, WorkerBatch
from perfsuite.results.rank_report import WorkerBatchFile
from perfsuite.results.run_dir import RunDir
from perfsuite.worker.counting import python_calls
from perfsuite.worker.counting.counter import StepCounter, does_work
from perfsuite.worker.counting.growth import Growth
from perfsuite.worker.counting.python_calls import PythonCounter
from perfsuite.worker.counting.steps import Collector, leave

OPERATORS_IN = 2
CALLS_IN = 3
"""A worker's operators are counted in its second batch, and its Python calls in its third batch. The first
batch is not counted, because it opens files and fills caches."""
KEPT_BETWEEN = (3, 7)
"""The objects that a worker keeps are counted after these batches, and in the middle between them."""
IDLE_S = 5.0
"""Maximum seconds for which a worker waits until the rank has taken all batches of the worker. The wait does
not delay the rank: as long as the rank has not taken the earlier batches, it does not need the next one."""
IDLE_POLL_S = 0.01
COUNTING_S = 10.0  # maximum seconds to wait for the result of a worker that is counting its objects
TOO_FEW = (
    "the number of objects that a loader's worker keeps is unknown: "
    f"the loader's first worker made fewer than {KEPT_BETWEEN[1] + 1} batches"
)


def watch(run_dir: RunDir, *, counts_objects: bool = False) -> None:
    """Count the batches of this process, if it is a loader worker, and of the loader workers that it forks.

    With `counts_objects`, also count the objects that a worker keeps. This takes a few tenths of a second, so
    it is only for launches that time nothing.
    """
    _leave_after_forks()
    counting = _Counting(run_dir, Growth(*KEPT_BETWEEN) if counts_objects else None)
    for name in ("MapDatasetFetcher", "IterableDatasetFetcher"):
        fetcher = private.or_none(name)
        if fetcher is not None:
            fetcher.fetch = _counted(fetcher.fetch, counting)


def batch_of(run_dir: RunDir, worker_pids: Iterable[int]) -> tuple[WorkerBatch | None, tuple[str, ...]]:
    """Return the total work of these workers for one batch each, and notes about what is unknown.

    The work is None if there are no workers, or if one of them was not counted.
    """
    files = [_read(run_dir, pid) for pid in worker_pids]
    counted = [file for file in files if file is not None]
    if not counted or len(counted) < len(files):
        return None, ()
    notes = dict.fromkeys(note for file in counted for note in file.notes)
    return _sum([file.batch for file in counted]), tuple(notes)


def _read(run_dir: RunDir, pid: int) -> WorkerBatchFile | None:
    """Return the file of a worker. If the worker is counting objects now, wait until it has finished."""
    until = time.monotonic() + COUNTING_S
    while True:
        file = documents.read_or_none(run_dir.worker_batch(pid), WorkerBatchFile)
        if file is None or not file.is_counting or time.monotonic() > until:
            return file
        time.sleep(IDLE_POLL_S)


def _sum(batches: list[WorkerBatch]) -> WorkerBatch:
    ops = Counter[str]()
    calls = Counter[Any]()
    functions = Counter[str]()
    for batch in batches:
        ops.update(batch.ops)
        calls.update(batch.python.calls)
        functions.update(batch.python.functions)
    python = batches[0].python.replace(calls=calls, functions=functions)
    return WorkerBatch(python=python, ops=ops, kept=_sum_of_kept([batch.kept for batch in batches]))


def _sum_of_kept(of_workers: list[KeptObjects | None]) -> KeptObjects | None:
    known = [kept for kept in of_workers if kept is not None]
    if len(known) < len(of_workers):
        return None
    by_type = Counter[str]()
    for kept in known:
        by_type.update(kept.by_type)
    holders = dict.fromkeys(holder for kept in known for holder in kept.holders)
    return KeptObjects(by_type=by_type, holders=tuple(holders))


def _counted(fetch: Callable[..., Any], counting: _Counting) -> Callable[..., Any]:
    @functools.wraps(fetch)
    def watched(*args: Any) -> Any:
        return counting.make(fetch, *args) if _is_first_worker() else fetch(*args)

    return watched


def _is_first_worker() -> bool:
    """Return whether this process is the first worker of a loader.

    This is a separate function. If `watched` contained this code, the calls in it would be counted.
    """
    worker = get_worker_info()
    return worker is not None and worker.id == 0


class _Counting:
    """Counts two batches of this process, which is the first worker of a loader.

    `growth` counts the objects that the worker keeps. None: they are not counted. `idle_s` is the maximum
    number of seconds to wait until the rank has taken all batches.
    """

    def __init__(self, run_dir: RunDir, growth: Growth | None, *, idle_s: float = IDLE_S) -> None:
        self._run_dir = run_dir
        self._growth = growth
        self._idle_s = idle_s
        self._batch: WorkerBatch | None = None  # the counts so far
        self._made = 0
        self._operators = _Operators()
        self._python = PythonCounter(lambda: "forward")

    def make(self, fetch: Callable[..., Any], *args: Any) -> Any:
        """Make a batch, and count its work if this is batch 2 or 3. Raises only the errors of `fetch`."""
        if self._growth is not None and self._growth.is_due(self._made):
            self._count_objects(self._growth)
        self._made += 1
        if self._made == OPERATORS_IN:
            with self._operators:
                return fetch(*args)
        if self._made != CALLS_IN:
            return fetch(*args)
        self._python.start()
        try:
            batch = fetch(*args)
        finally:
            self._python.stop()
        python = self._python.result()
        if python is not None and self._operators.is_whole:
            self._hand_over(WorkerBatch(python=python, ops=dict(sorted(self._operators.calls.items()))))
        return batch

    def _count_objects(self, growth: Growth) -> None:
        """Count the objects that are alive between two batches."""
        if self._batch is None:
            growth.give_up("its first batches were not counted")
            return
        if self._made == KEPT_BETWEEN[1]:
            self._write(WorkerBatchFile(batch=self._batch, notes=(TOO_FEW,), is_counting=True))
        if _is_idle(self._idle_s):
            growth.count()
        else:
            growth.give_up("a loader's worker still sent earlier batches")
        if growth.is_over:
            kept = growth.result()
            self._write(WorkerBatchFile(batch=self._batch.replace(kept=kept), notes=tuple(growth.notes)))

    def _hand_over(self, batch: WorkerBatch) -> None:
        self._batch = batch
        self._write(WorkerBatchFile(batch=batch, notes=() if self._growth is None else (TOO_FEW,)))

    def _write(self, file: WorkerBatchFile) -> None:
        with contextlib.suppress(Exception):  # if the disk is full, for example, nothing is counted
            documents.write(self._run_dir.worker_batch(os.getpid()), file)


def _is_idle(idle_s: float) -> bool:
    """Wait until the rank has taken all batches of this worker. Return False if that takes over `idle_s`.

    The rank needs the next batch, so it takes the earlier ones soon. Until then, threads of multiprocessing
    and the files that share the memory of tensors keep objects of these batches alive.
    """
    until = time.monotonic() + idle_s
    while not (_are_batches_sent() and _are_files_taken()):
        if time.monotonic() > until:
            return False
        time.sleep(IDLE_POLL_S)
    return True


def _are_batches_sent() -> bool:
    """Return whether the threads of multiprocessing that send batches wait for more. Ignore other threads."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident())
    return all(map(_sends_nothing, frames.values()))


def _sends_nothing(innermost: FrameType) -> bool:
    """Return whether a thread sends nothing. `innermost` is the innermost frame of the thread.

    The thread that sends batches might still be waiting although it has been notified of a batch, because it
    has not run since then. The variable `buffer` of its function then contains this batch.
    """
    for frame, _ in traceback.walk_stack(innermost):
        if frame.f_code.co_filename == queues.__file__:
            is_waiting = innermost.f_code is threading.Condition.wait.__code__
            return is_waiting and not frame.f_locals.get("buffer")
        if frame.f_code.co_filename == resource_sharer.__file__:
            return innermost.f_code is socket.accept.__code__
    return True


def _are_files_taken() -> bool:
    """Return whether the rank has opened all files in which this worker shares the memory of tensors.

    Returns False if this is unknown.
    """
    try:
        return not resource_sharer._resource_sharer._cache  # type: ignore[attr-defined]
    except AttributeError:
        return False


class _Operators(TorchDispatchMode):
    """Counts the operators that do work, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = Counter[str]()
        self.is_whole = True  # whether every operator could be counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            if does_work(func):
                self.calls[str(overloadpacket(func))] += 1
        except Exception:  # an error must not end the training
            self.is_whole = False
        return func(*args, **(kwargs or {}))


@functools.cache
def _leave_after_forks() -> None:
    """Let processes that are forked from now on drop the rank's counters."""
    os.register_at_fork(after_in_child=_leave_counters_of_the_rank)


def _leave_counters_of_the_rank() -> None:
    """Drop the counters and the profile function that this process inherited from the rank.

    The process inherits them if it was forked in a counted step, or while perfsuite was searching for the
    functions that the case names.
    """
    for mode in current_dispatch_mode_stack():
        if isinstance(mode, StepCounter):
            leave(mode)
    if getattr(sys.getprofile(), "__module__", "").startswith("perfsuite."):
        sys.setprofile(None)
    python_calls.leave_monitoring()
    if Collector.paused is not None:
        Collector.paused.go_on()
