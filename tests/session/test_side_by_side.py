import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Barrier, Event
from unittest.mock import Mock

import psutil
import pytest

from perfsuite.session.mode import Task
from perfsuite.session.side_by_side import BYTES_PER_PROCESS, SideBySide, tasks_at_once
from tests.samples import make_case, make_machine

WAIT_S = 30  # far more than any of these tests needs


def make_task(name: str) -> Task:
    return Task(case=make_case(model=name), machine=make_machine(), directory=Path(name))


A, B = make_task("llama-tiny"), make_task("gpt2")
New = Callable[..., SideBySide[str]]


@pytest.fixture
def new() -> Iterator[New]:
    """Yield a function that creates a `SideBySide` for two tasks at a time. It ends when the test ends."""
    made = []

    def create(run: Callable[[Task, Event], str], at_once: int = 2) -> SideBySide[str]:
        made.append(SideBySide(run, at_once=lambda processes: at_once))
        return made[-1]

    yield create
    for each in made:
        each.end()


def test_tasks_that_have_begun_run_at_the_same_time(new: New) -> None:
    both = Barrier(2, timeout=WAIT_S)  # a task that runs alone breaks it

    def run(task: Task, stop: Event) -> str:
        both.wait()
        return task.case.id

    runs = new(run)
    assert runs.begin([A, B]) == 2
    assert [runs.result(task) for task in (B, A)] == [B.case.id, A.case.id]


def test_no_more_tasks_run_than_there_is_room_for(new: New) -> None:
    running = []

    def run(task: Task, stop: Event) -> str:
        running.append(task)
        assert len(running) == 1
        running.remove(task)
        return "ran"

    runs = new(run, at_once=1)
    assert runs.begin([A, B]) == 1
    assert [runs.result(task) for task in (A, B)] == ["ran", "ran"]


def test_one_task_does_not_run_beside_others(new: New) -> None:
    assert new(lambda task, stop: "ran").begin([A]) == 1


def test_a_task_that_was_not_begun_runs_when_asked(new: New) -> None:
    assert new(lambda task, stop: task.case.id).result(A) == A.case.id


def test_an_error_is_raised_where_the_result_is_read(new: New) -> None:
    def run(task: Task, stop: Event) -> str:
        if task is A:
            raise ValueError("broken")
        return "ran"

    runs = new(run)
    runs.begin([A, B])
    assert runs.result(B) == "ran"
    with pytest.raises(ValueError, match="broken"):
        runs.result(A)


def test_the_end_stops_running_tasks_and_drops_others(new: New) -> None:
    stopped = []
    has_begun = Event()

    def run(task: Task, stop: Event) -> str:
        has_begun.set()
        stopped.append((task, stop.wait(WAIT_S)))
        return "ended"

    runs = new(run, at_once=1)
    runs.begin([A, B])
    assert has_begun.wait(WAIT_S)
    runs.end()
    assert stopped == [(A, True)]


@pytest.mark.parametrize(
    ("cores", "memory", "processes", "tasks"),
    [(8, 64, 1, 8), (8, 64, 2, 4), (8, 6.5, 1, 3), (1, 64, 2, 1), (8, 0, 1, 1)],
)
def test_cores_and_memory_limit_the_tasks_at_a_time(
    monkeypatch: pytest.MonkeyPatch, cores: int, memory: float, processes: int, tasks: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    available = int(memory / 2 * BYTES_PER_PROCESS)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Mock(available=available))
    assert tasks_at_once(processes) == tasks
