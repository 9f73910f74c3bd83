"""Count the work of a `DataLoader`'s worker process for a batch, and pass it to the rank. Imports torch.

All workers, however they are started, make batches with the `fetch` method of one of two private classes of
torch. The workers of torchdata's StatefulDataLoader do so too. If torch does not have these classes, workers
are not counted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import get_worker_info

from perfsuite import documents
from perfsuite.frameworks.common import private
from perfsuite.frameworks.common.private import (
    TorchDispatchMode,
    current_dispatch_mode_stack,
    overloadpacket,
)
from perfsuite.results.counts import WorkerBatch
from perfsuite.results.rank_report import WorkerBatchFile
from perfsuite.results.run_dir import RunDir
from perfsuite.worker.counting import python_calls
from perfsuite.worker.counting.counter import StepCounter, does_work
from perfsuite.worker.counting.python_calls import PythonCounter
from perfsuite.worker.counting.steps import leave

OPERATORS_IN = 2
CALLS_IN = 3
"""A worker's operators are counted in its second batch, and its Python calls in its third batch. The first
batch is not counted, because it opens files and fills caches."""


def watch(run_dir: RunDir) -> None:
    """Count batches of loader workers: of this process if it is a worker, and of workers that it forks."""
    counting = _Counting(run_dir)
    for name in ("MapDatasetFetcher", "IterableDatasetFetcher"):
        fetcher = private.or_none(name)
        if fetcher is not None:
            fetcher.fetch = _counted(fetcher.fetch, counting)


def batch_of(run_dir: RunDir, worker_pids: Iterable[int]) -> WorkerBatch | None:
    """Return the total work of these workers for one batch each.

    Returns None if there are no workers, or if one of them was not counted.
    """
    files = (documents.read_or_none(run_dir.worker_batch(pid), WorkerBatchFile) for pid in worker_pids)
    batches = [None if file is None else file.batch for file in files]
    counted = [batch for batch in batches if batch is not None]
    return _sum(counted) if counted and len(counted) == len(batches) else None


def _sum(batches: list[WorkerBatch]) -> WorkerBatch:
    ops = Counter[str]()
    calls = Counter[Any]()
    functions = Counter[str]()
    for batch in batches:
        ops.update(batch.ops)
        calls.update(batch.python.calls)
        functions.update(batch.python.functions)
    python = batches[0].python.replace(calls=calls, functions=functions)
    return WorkerBatch(python=python, ops=ops)


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
    """Counts two batches of this process, which is the first worker of a loader."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._made = 0
        self._operators = _Operators()
        self._python = PythonCounter(lambda: "forward")

    def make(self, fetch: Callable[..., Any], *args: Any) -> Any:
        """Make a batch, and count its work if this is batch 2 or 3. Raises only the errors of `fetch`."""
        self._made += 1
        if self._made == 1:
            _leave_counters_of_the_rank()
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
        self._hand_over()
        return batch

    def _hand_over(self) -> None:
        python = self._python.result()
        if python is not None and self._operators.is_whole:
            batch = WorkerBatch(python=python, ops=dict(sorted(self._operators.calls.items())))
            with contextlib.suppress(Exception):  # if the disk is full, for example, nothing is counted
                documents.write(self._run_dir.worker_batch(os.getpid()), WorkerBatchFile(batch=batch))


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


def _leave_counters_of_the_rank() -> None:
    """Drop the counters and the profile function that this process inherited from the rank.

    The process inherits them if it was forked in a counted step, or while named functions were searched for.
    """
    for mode in current_dispatch_mode_stack():
        if isinstance(mode, StepCounter):
            leave(mode)
    if getattr(sys.getprofile(), "__module__", "").startswith("perfsuite."):
        sys.setprofile(None)
    python_calls.leave_monitoring()
