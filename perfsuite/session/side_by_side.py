"""Run several cases dry at the same time, as many as the machine has cores and memory for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Generic, TypeVar

import psutil

from perfsuite.session.mode import Task

Result = TypeVar("Result")
BYTES_PER_PROCESS = 2 * 2**30
"""Memory that the process of a dry run is assumed to need. It is about twice as much as was seen."""


def tasks_at_once(processes: int) -> int:
    """Return how many tasks with `processes` processes each can run at the same time: at least one."""
    cores = len(os.sched_getaffinity(0))
    in_memory = psutil.virtual_memory().available // BYTES_PER_PROCESS
    return max(1, min(cores, in_memory) // processes)


class SideBySide(Generic[Result]):
    """Calls `run` for several tasks at the same time. Each call starts `processes` processes.

    Dry runs only count, so they do not disturb each other. `run` gets a task and an event. When the event is
    set, `run` must end early.
    """

    def __init__(
        self,
        run: Callable[[Task, Event], Result],
        processes: int = 1,
        at_once: Callable[[int], int] = tasks_at_once,
    ) -> None:
        self._run = run
        self._processes = processes
        self._at_once = at_once
        self._threads: ThreadPoolExecutor | None = None
        self._begun: dict[str, Future[Result]] = {}  # by the id of the case
        self._stop: list[Event] = []

    def begin(self, tasks: Sequence[Task]) -> int:
        """Begin these tasks, and return how many of them run at the same time."""
        count = self._at_once(self._processes)
        self._threads = ThreadPoolExecutor(count)
        for task in tasks:
            stop = Event()
            self._stop.append(stop)
            self._begun[task.case.id] = self._threads.submit(self._run, task, stop)
        return min(count, len(tasks))

    def result(self, task: Task) -> Result:
        """Return the result of a task, or raise its error. A task that was not begun runs now."""
        begun = self._begun.pop(task.case.id, None)
        return self._run(task, Event()) if begun is None else begun.result()

    def end(self) -> None:
        """End the tasks that still run, and drop the others."""
        for stop in self._stop:
            stop.set()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
