import threading
from pathlib import Path

import pytest

from perfsuite.results.run_dir import RunDir
from perfsuite.worker.spans.recording import Meters, Spans
from perfsuite.worker.spans.running import Running
from tests.processes import wait_until


class Watched:
    """A rank whose time the test sets."""

    def __init__(self, directory: Path) -> None:
        self.now = 0.0
        self.run_dir = RunDir(directory)
        self.spans = Spans(Meters(now=lambda: self.now))
        self.spans.train(lambda: 0)
        self.running = Running(self.run_dir.running(3), self.spans.open_for, after_s=5)

    def told(self) -> dict[int, str]:
        self.running.look()
        return self.run_dir.all_running()


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def test_a_span_is_told_while_it_takes_long(watched: Watched) -> None:
    span = watched.spans.begin("save checkpoint", is_event=True)
    watched.now = 4
    assert watched.told() == {}
    watched.now = 5
    assert watched.told() == {3: "save checkpoint"}
    watched.spans.end(span)
    assert watched.told() == {}


def test_the_span_is_told_that_has_taken_long(watched: Watched) -> None:
    watched.spans.begin("validate")
    watched.now = 4
    watched.spans.begin("load checkpoint", is_event=True)
    watched.now = 6
    assert watched.told() == {3: "validate"}


def test_a_phase_in_which_steps_end_is_not_told(watched: Watched) -> None:
    """An example is a phase around the whole training. In such a phase, a step can still hang."""
    steps = [0]
    watched.spans.train(lambda: steps[0])
    watched.spans.begin("train")
    watched.now = 6
    assert watched.told() == {3: "train"}
    steps[0] = 1
    assert watched.told() == {}


def test_the_end_of_a_long_span_is_told_at_once(watched: Watched) -> None:
    span = watched.spans.begin("save checkpoint", is_event=True)
    watched.now = 5
    watched.running.look()
    watched.spans.end(span)
    watched.running.ended()
    assert watched.run_dir.all_running() == {}


def test_a_rank_tells_by_itself(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    running = Running(run_dir.running(0), lambda after_s: "rollout", after_s=0.001)
    running.begin()
    wait_until(lambda: run_dir.all_running() == {0: "rollout"}, "the name of the span")
    running.stop()


def test_nothing_is_left_once_reports_have_stopped(tmp_path: Path) -> None:
    """A script can go on for hours after perfsuite has given up, with a span that never ends."""
    run_dir = RunDir(tmp_path)
    before = {*threading.enumerate()}
    running = Running(run_dir.running(0), lambda after_s: "rollout", after_s=0.001)
    running.begin()
    wait_until(lambda: run_dir.all_running() == {0: "rollout"}, "the name of the span")
    running.stop()
    wait_until(lambda: {*threading.enumerate()} == before, "the end of the thread")
    assert run_dir.all_running() == {}


def test_a_disk_that_is_full_ends_no_training(tmp_path: Path) -> None:
    running = Running(tmp_path / "nowhere" / "running-0", lambda after_s: "rollout")
    running.look()
