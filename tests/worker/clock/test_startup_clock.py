import atexit
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from perfsuite.worker.clock import startup_clock
from perfsuite.worker.clock.startup_clock import (
    BUILD,
    DATA,
    FIRST_STEP,
    IMPORTS,
    NOT_COUNTED,
    OTHER_PROFILER,
    PERFSUITE,
    PERFSUITE_BUILDS,
    PROCESS_GROUP,
    Part,
    StartUp,
    StartUpClock,
)
from tests.samples import known
from tests.worker.loops import in_a_thread


class Clock(StartUpClock):
    """A clock of start-up that the test advances. The process of this clock started a second ago."""

    def __init__(self) -> None:
        self.time = 1.0
        super().__init__(0.0, before=IMPORTS, now=lambda: self.time)

    def passes(self, seconds: float, *parts: str) -> None:
        """Let seconds pass within these parts. The last one is the innermost."""
        for part in parts:
            self.enter(part)
        self.time += seconds
        for _ in parts:
            self.leave()

    def ended(self) -> dict[str, float]:
        return parts_of(self.end())


class ProcessClock:
    """The clock of this process, with a time that the test advances. The process started a second ago."""

    def __init__(self) -> None:
        self.time = 1.0
        startup_clock.begin(IMPORTS, start_of=lambda: 0.0, now=lambda: self.time)

    def ended(self) -> dict[str, float]:
        return parts_of(startup_clock.end())


def parts_of(start_up: StartUp | None) -> dict[str, float]:
    """Return the seconds of each part, under its name without "start-up: "."""
    return {name.removeprefix("start-up: "): s for name, s in known(start_up).seconds.items()}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def original_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the clock of this process, which watches imports, and restore how Python imports."""
    bootstrap: Any = importlib._bootstrap
    monkeypatch.setattr(bootstrap, "_find_and_load", bootstrap._find_and_load)
    yield
    startup_clock.end()


@pytest.fixture
def process_clock(original_imports: None) -> ProcessClock:
    return ProcessClock()


def now() -> float:
    """Return the current time as the start of this process.

    The real start might be too long ago for a clock.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@pytest.fixture
def begun(original_imports: None) -> Callable[[], StartUp]:
    """Begin the real clock of this process, which watches imports, and return a function that ends it."""
    startup_clock.begin(PERFSUITE, start_of=now)
    return lambda: known(startup_clock.end())


def test_each_second_belongs_to_the_innermost_part(clock: Clock) -> None:
    clock.passes(2, IMPORTS)
    clock.passes(3)
    clock.passes(4, PROCESS_GROUP, IMPORTS)
    clock.passes(5, PROCESS_GROUP)
    clock.first_batch()
    clock.passes(6)
    assert clock.ended() == {
        "start-up": 21,
        IMPORTS: 7,
        BUILD: 3,
        PROCESS_GROUP: 5,
        FIRST_STEP: 6,
    }


def test_what_perfsuite_does_is_left_out(clock: Clock) -> None:
    clock.begin_loop()
    clock.passes(7, PERFSUITE)
    clock.passes(7, PERFSUITE, IMPORTS)
    clock.passes(7, PERFSUITE_BUILDS, DATA)
    assert clock.ended() == {"start-up": 1, IMPORTS: 1, BUILD: 0, FIRST_STEP: 0}


def test_imports_that_the_training_needs_count(clock: Clock) -> None:
    clock.passes(2, PERFSUITE_BUILDS, IMPORTS)
    assert clock.ended()[IMPORTS] == 3


def test_the_first_batch_begins_the_first_step(clock: Clock) -> None:
    clock.begin_loop()
    clock.passes(2)
    clock.passes(3, DATA)
    clock.first_batch()
    clock.passes(4)
    clock.first_batch()
    clock.passes(5)
    assert clock.ended() == {"start-up": 15, IMPORTS: 1, BUILD: 2, DATA: 3, FIRST_STEP: 9}


def test_our_own_loop_starts_the_first_step(clock: Clock) -> None:
    clock.passes(2)
    clock.begin_loop()
    clock.passes(3)
    assert clock.ended() == {"start-up": 6, IMPORTS: 1, BUILD: 2, FIRST_STEP: 3}


def test_undivided_first_step_includes_the_build(clock: Clock) -> None:
    clock.passes(2)
    assert clock.ended() == {"start-up": 3, IMPORTS: 1, "build and first step": 2}


def test_a_part_that_did_not_happen_is_absent(clock: Clock) -> None:
    assert not {DATA, PROCESS_GROUP} & clock.ended().keys()


def test_nothing_is_timed_after_the_first_step(clock: Clock) -> None:
    clock.end()
    assert not clock.enter(IMPORTS)
    assert clock.end() is None


def test_another_thread_is_not_timed(clock: Clock) -> None:
    in_a_thread(lambda: clock.passes(2) if clock.enter(IMPORTS) else None)
    assert clock.ended()["start-up"] == 1


def test_torch_may_be_imported_in_another_thread(process_clock: ProcessClock) -> None:
    """perfsuite then attaches itself in that thread."""

    def attaches() -> None:
        startup_clock.pause()
        startup_clock.go_on()

    in_a_thread(attaches)
    with Part(IMPORTS):
        process_clock.time += 2
    assert process_clock.ended()[IMPORTS] == 3


def test_other_threads_first_step_is_unknown(clock: Clock) -> None:
    ended: list[StartUp | None] = []
    in_a_thread(lambda: ended.append(clock.end()))
    assert ended == [None]


def test_other_threads_first_step_ends_the_clock(clock: Clock) -> None:
    """If the clock went on, each later step would wait for the device, as the first step does."""
    in_a_thread(clock.end)

    assert clock.is_over


def test_a_part_ends_by_an_error_as_well(process_clock: ProcessClock) -> None:
    def fails() -> None:
        with Part(DATA):
            process_clock.time += 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    process_clock.time += 3
    assert process_clock.ended() == {"start-up": 6, IMPORTS: 1, DATA: 2, "build and first step": 3}


def test_forked_rank_continues_its_servers_clock(process_clock: ProcessClock) -> None:
    startup_clock.pause()
    process_clock.time += 2
    startup_clock.go_on()
    startup_clock.begin_loop()
    process_clock.time += 3
    assert process_clock.ended() == {"start-up": 4, IMPORTS: 1, BUILD: 0, FIRST_STEP: 3}


def test_times_a_function_in_every_importer(
    process_clock: ProcessClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connects(seconds: float) -> float:
        process_clock.time += seconds
        return seconds

    owner = SimpleNamespace(connects=connects)
    other = SimpleNamespace(connects=connects)
    monkeypatch.setitem(sys.modules, "other", other)
    startup_clock.watch(owner, "connects", PROCESS_GROUP)
    assert owner.connects(2) + other.connects(3) == 5
    assert process_clock.ended()[PROCESS_GROUP] == 5


def test_times_imports_and_counts_their_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: Callable[[], StartUp]
) -> None:
    package = tmp_path / "slow_package"
    package.mkdir()
    (package / "__init__.py").write_text("from . import part\n")
    (package / "part.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("slow_package")
    start_up = begun()
    assert start_up.modules["slow_package"] == 2
    assert "start-up: imports" in start_up.seconds


def test_what_perfsuite_imports_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: Callable[[], StartUp]
) -> None:
    (tmp_path / "of_ours.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with Part(PERFSUITE):
        importlib.import_module("of_ours")
    assert "of_ours" not in begun().modules


def test_ignores_imports_after_the_first_step(begun: Callable[[], StartUp]) -> None:
    bootstrap: Any = importlib._bootstrap
    timed = bootstrap._find_and_load
    begun()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module")
    assert bootstrap._find_and_load is not timed


def test_a_failed_import_shows_no_frame_of_ours(begun: Callable[[], StartUp]) -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        exec("import no_such_module")
    assert startup_clock.__file__ not in {str(entry.path) for entry in raised.traceback}


def test_the_start_of_a_process_is_the_kernels() -> None:
    since_boot = psutil.Process().create_time() - psutil.boot_time()
    assert startup_clock.process_start() == pytest.approx(since_boot, abs=2)


def test_without_a_start_nothing_is_timed() -> None:
    startup_clock.end()  # another test might have left a clock
    startup_clock.begin(IMPORTS, start_of=lambda: None)
    assert not startup_clock.is_running()
    assert startup_clock.end() is None


@pytest.fixture
def counting() -> Iterator[Clock]:
    """Yield a clock that counts calls."""
    clock = Clock()
    clock.count_calls(in_forks=False)
    yield clock
    clock.end()
    sys.setprofile(None)


def work() -> None:
    """Replaces the work of a training."""


def calls_of_work(start_up: StartUp | None) -> dict[str, int]:
    """Return how often each part called `work`."""
    by_span = known(known(start_up).calls)
    times = {span: calls.get((__name__, "work"), 0) for span, calls in by_span.items()}
    return {span.removeprefix("start-up: "): number for span, number in times.items() if number}


def test_calls_belong_to_the_part_that_runs(counting: Clock) -> None:
    work()
    counting.enter(PROCESS_GROUP)
    work()
    work()
    counting.leave()
    assert calls_of_work(counting.end()) == {"build and first step": 1, PROCESS_GROUP: 2}


def test_calls_before_the_first_batch_build(counting: Clock) -> None:
    counting.begin_loop()
    work()
    counting.first_batch()
    work()
    work()
    assert calls_of_work(counting.end()) == {BUILD: 1, FIRST_STEP: 2}


def test_calls_of_perfsuite_are_not_counted(counting: Clock) -> None:
    counting.enter(PERFSUITE)
    work()
    counting.leave()
    assert calls_of_work(counting.end()) == {}


@pytest.mark.usefixtures("original_imports")
def test_a_function_that_is_timed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(startup_clock.COUNTS_CALLS, "1")
    startup_clock.begin(IMPORTS, start_of=now)
    module = SimpleNamespace(work=work)
    startup_clock.watch(module, "work", PROCESS_GROUP)
    module.work()
    assert calls_of_work(startup_clock.end()) == {PROCESS_GROUP: 1}


def test_ignores_calls_after_the_first_step(counting: Clock) -> None:
    calls = known(counting.end()).calls
    assert sys.getprofile() is None
    work()
    assert all((__name__, "work") not in functions for functions in known(calls).values())


def test_calls_are_unknown_beside_a_profiler(counting: Clock) -> None:
    sys.setprofile(lambda *_: None)
    assert known(counting.end()).calls is None
    assert sys.getprofile() is not None


def test_notes_why_calls_are_unknown(counting: Clock) -> None:
    sys.setprofile(lambda *_: None)
    assert known(counting.end()).note == NOT_COUNTED + OTHER_PROFILER


def test_an_error_of_the_count_is_noted(counting: Clock) -> None:
    counting._parts.clear()  # this makes counting fail
    work()
    counting._parts.append(BUILD)
    work()
    start_up = known(counting.end())
    assert start_up.calls is None
    assert start_up.note == f"{NOT_COUNTED}IndexError: list index out of range"


def test_other_threads_first_step_ends_the_count(counting: Clock) -> None:
    in_a_thread(counting.end)
    work()
    assert sys.getprofile() is None


def is_counted_in_a_fork(clock: Clock) -> bool:
    """Return whether a child that is forked now counts calls."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if sys.getprofile() is not None else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_process_without_a_step_stops_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit = list[Callable[[], object]]()
    monkeypatch.setattr(atexit, "register", at_exit.append)
    Clock().count_calls(in_forks=False)
    for function in at_exit:
        function()
    assert sys.getprofile() is None


def test_forked_worker_counts_nothing(counting: Clock) -> None:
    assert not is_counted_in_a_fork(counting)


def test_a_rank_that_the_server_forks_goes_on() -> None:
    clock = Clock()
    clock.count_calls(in_forks=True)
    try:
        assert is_counted_in_a_fork(clock)
    finally:
        clock.end()


@pytest.mark.usefixtures("original_imports")
@pytest.mark.parametrize("asked", [True, False])
def test_calls_are_counted_only_where_asked(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(startup_clock.COUNTS_CALLS, raising=False)
    if asked:
        monkeypatch.setenv(startup_clock.COUNTS_CALLS, "1")
    startup_clock.begin(IMPORTS, start_of=now)
    assert (known(startup_clock.end()).calls is not None) is asked


def test_start_of_the_process_as_psutil_reads_it() -> None:
    assert startup_clock.process_started_at() == pytest.approx(psutil.Process().create_time(), abs=5)
