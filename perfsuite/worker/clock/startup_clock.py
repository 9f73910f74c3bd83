"""Times the parts of a process's start-up, from its own start to the end of its first step.

Each second belongs to one part: the innermost of those that run. What perfsuite itself does belongs to none.
Where nothing is timed, the calls of Python functions are counted, too.

A script's process loads this module by its path before the script begins (`startup.sitecustomize`), so it
imports nothing of perfsuite. Ranks of perfsuite's own loops are forked by a server that has imported torch
for them (`node.preload`): the clock begins with that server, and each rank goes on with it.
"""

import atexit
import importlib
import os
import sys
from collections.abc import Callable
from threading import get_ident
from time import CLOCK_BOOTTIME, clock_gettime
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, Self

START_UP = "start-up"
IMPORTS = "imports"
PROCESS_GROUP = "process group"
BUILD = "build"
DATA = "data"
FIRST_STEP = "first step"
BUILD_AND_FIRST_STEP = "build and first step"  # where nothing shows when the first step begins
PERFSUITE = "perfsuite"  # what perfsuite itself does, with all that this calls and imports
PERFSUITE_BUILDS = "perfsuite builds"  # the same, but the training needs what it imports
UNNAMED = (PERFSUITE, PERFSUITE_BUILDS)  # parts that are left out
PYTHON = "Python"  # stands for all modules of the standard library
NOT_COUNTED = "calls of the start-up are not counted: "
OTHER_PROFILER = "the training has a profile function of its own"
COUNTS_CALLS = "PERFSUITE_COUNT_START_UP"  # environment variable that asks to count calls, which takes time
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
OURS = (_HERE, os.path.realpath(_HERE) + os.sep)  # how the paths of our files begin
WRAPPERS = ("watched", "find_and_load")  # our functions that call what they wrap for the training

OLDEST_S = 600  # age of a process above which its start is not believed when its clock begins
FUTURE_S = 0.02  # how far in the future its start may seem: the kernel tells it in hundredths of a second


class StartUp(NamedTuple):
    """What the start-up of a process took."""

    seconds: dict[str, float]  # of all parts together, and of each part, by the name of the span
    modules: dict[str, int]  # modules that were imported, by package
    # Calls by module and function, by the name of the span; None where they were not counted.
    calls: dict[str, dict[tuple[str, str], int]] | None = None
    note: str = ""  # why they are not known, where they were to be counted


class StartUpClock:
    """Adds up the seconds of the thread that makes it, by part, and the modules that it imports."""

    def __init__(self, started_at: float, *, before: str, now: Callable[[], float]) -> None:
        """Begin at `started_at`, in seconds by `now`. All until now is of the part `before`."""
        self.is_over = False
        self._now = now
        self._seconds = dict[str, float]()
        self._modules = set[str]()
        self._parts = [BUILD]  # those that run, the innermost last
        self._thread = get_ident()
        self._since = started_at
        self._has_batch = self._has_loop = False
        self._calls: _Calls | None = None
        self._add(before)

    def count_calls(self, *, in_forks: bool) -> None:
        """Count the calls of Python functions that this thread makes from now on.

        With `in_forks` those of the children count that this process forks, as of ranks by their server.
        """
        self._calls = _Calls(self, in_forks=in_forks)

    def enter(self, part: str) -> bool:
        """Begin a part within the one that runs. False in another thread, and after the first step."""
        if self.is_over or get_ident() != self._thread:
            return False
        outer = self._parts[-1]
        self._add(outer)
        is_ours = outer == PERFSUITE or (outer == PERFSUITE_BUILDS and part != IMPORTS)
        self._parts.append(outer if is_ours else part)
        return True

    def leave(self) -> None:
        """End the innermost part; does nothing where `enter` returns False."""
        if not self.is_over and get_ident() == self._thread:
            self._add(self._parts.pop())

    def imported(self, name: str) -> None:
        """Note that the import which runs has loaded a module."""
        if self._parts[-1] == IMPORTS:
            self._modules.add(name)

    def begin_loop(self) -> None:
        """Begin the first step: a loop of perfsuite's own begins."""
        self._has_loop = True
        self._begin_first_step()

    def first_batch(self) -> None:
        """Begin the first step: a loader has given a batch. What a loop did before that built the job."""
        if self._has_batch or self.is_over or get_ident() != self._thread:
            return
        self._has_batch = True
        self._begin_first_step()
        self._seconds[BUILD] = self._seconds.get(BUILD, 0.0) + self._seconds.pop(FIRST_STEP, 0.0)
        if self._calls is not None:
            self._calls.rename(FIRST_STEP, BUILD)

    def end(self) -> StartUp | None:
        """End the first step. None if another thread has made it: its parts are not known."""
        if self.is_over:
            return None
        calls = None if self._calls is None else self._calls.end()
        self.is_over = True
        if get_ident() != self._thread:
            return None
        self._add(self._parts[-1])
        seconds = {part: each for part, each in self._seconds.items() if part not in UNNAMED}
        if not (self._has_batch or self._has_loop):
            seconds[BUILD_AND_FIRST_STEP] = seconds.pop(BUILD, 0.0)
            if self._calls is not None:
                self._calls.rename(BUILD, BUILD_AND_FIRST_STEP)
        named = {_span(part): each for part, each in seconds.items()}
        by_span = None if calls is None else {_span(part): each for part, each in calls.items()}
        note = "" if self._calls is None or calls is not None else NOT_COUNTED + self._calls.why_unknown
        return StartUp({START_UP: sum(seconds.values()), **named}, self._by_package(), by_span, note)

    def _begin_first_step(self) -> None:
        self._add(self._parts[-1])
        self._parts = [FIRST_STEP if part == BUILD else part for part in self._parts]

    def _add(self, part: str) -> None:
        now = self._now()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._since
        self._since = now

    def _by_package(self) -> dict[str, int]:
        numbers = dict[str, int]()
        for name in self._modules:
            package = name.partition(".")[0]
            package = PYTHON if package in sys.stdlib_module_names else package
            if package != "perfsuite":
                numbers[package] = numbers.get(package, 0) + 1
        return dict(sorted(numbers.items()))


def _span(part: str) -> str:
    return f"{START_UP}: {part}"


class _Calls:
    """Counts the calls of Python functions of the thread that makes it, by `sys.setprofile`.

    As `counting.python_calls` in steps, it leaves out perfsuite's functions and what they call at once, and
    the machinery of imports, which does more where a file is not compiled yet.
    """

    def __init__(self, clock: StartUpClock, *, in_forks: bool) -> None:
        """With `in_forks` this process is a server whose children go on counting. Else no child counts."""
        self._clock = clock
        self._by_part = dict[str, dict[tuple[str, str], int]]()
        self._is_over = False
        self._error = ""  # that ended the counting
        self._server = os.getpid() if in_forks else None
        self._hook = _counting(clock, self._by_part, self._give_up)
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.end)  # if no step is made: names are gone when Python ends
        sys.setprofile(self._hook)

    def rename(self, part: str, other: str) -> None:
        """Let what was counted in a part count as of another one."""
        to = self._by_part.setdefault(other, {})
        for function, number in self._by_part.pop(part, {}).items():
            to[function] = to.get(function, 0) + number

    def end(self) -> dict[str, dict[tuple[str, str], int]] | None:
        """Return the calls by part; None if some may be missing (`why_unknown`)."""
        self._is_over = True
        if sys.getprofile() is not self._hook:
            return None
        sys.setprofile(None)
        return None if self._error else self._by_part

    @property
    def why_unknown(self) -> str:
        """Return why `end` returns None."""
        return self._error or OTHER_PROFILER

    def _give_up(self, error: Exception) -> None:
        """Count no more calls. The search for named functions, which calls the hook, goes on."""
        self._error = f"{type(error).__name__}: {error}"
        self._by_part.clear()
        if sys.getprofile() is self._hook:
            sys.setprofile(None)

    def _forked(self) -> None:
        profiler = sys.getprofile()  # or the search for named functions, which calls ours
        is_ours = getattr(profiler, "__module__", "").startswith("perfsuite.")
        if is_ours and not self._is_over and os.getppid() != self._server:
            sys.setprofile(None)


class _Code(NamedTuple):
    """What is known of the code of a function."""

    code: CodeType  # kept, as its identity stands for it: its hash would be computed anew each time
    function: tuple[str, str] | None  # its module and name; None if it does not count
    calls_for_us: bool  # a function of ours; a wrapper calls what it wraps for the training


def _counting(
    clock: StartUpClock,
    by_part: dict[str, dict[tuple[str, str], int]],
    give_up: Callable[[Exception], None],
) -> Callable[[FrameType, str, Any], None]:
    """Return a function for `sys.setprofile` that counts in `by_part`. It is called some million times."""
    codes = dict[int, _Code]()
    has_failed = False

    def known(frame: FrameType) -> _Code:
        code = frame.f_code
        module = str(frame.f_globals.get("__name__", ""))
        is_import = code.co_name == "<module>" or module.partition(".")[0] == "importlib"
        is_ours = code.co_filename.startswith(OURS)
        # The function that watches imports says that it is in another file.
        counts = not (is_import or is_ours or module == __name__)
        function = (module, code.co_qualname) if counts else None
        codes[id(code)] = found = _Code(code, function, is_ours and code.co_name not in WRAPPERS)
        return found

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal has_failed
        if event == "call" and not has_failed:
            try:
                add(frame)
            except Exception as error:  # it would end the training: the calls are not known then
                has_failed = True
                give_up(error)

    def add(frame: FrameType) -> None:
        function = (codes.get(id(frame.f_code)) or known(frame)).function
        if function is None:
            return
        caller = frame.f_back
        if caller is not None and (codes.get(id(caller.f_code)) or known(caller)).calls_for_us:
            return
        if clock.is_over:  # another thread has ended it
            sys.setprofile(None)
            return
        part = clock._parts[-1]
        if part not in UNNAMED:
            calls = by_part.setdefault(part, {})
            calls[function] = calls.get(function, 0) + 1

    return count


_clock: StartUpClock | None = None  # of this process, or of the one that it was forked from


class Part:
    """A part of the start-up, in a `with`. Without a clock, and after the first step, it does nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._entered: StartUpClock | None = None

    def __enter__(self) -> Self:
        if _clock is not None and _clock.enter(self._name):
            self._entered = _clock
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._entered is not None:
            self._entered.leave()


def begin(before: str) -> None:
    """Begin the clock of this process, unless its start is unknown. All until now is of the part `before`."""
    global _clock
    now = _boot_clock()
    started_at = process_start()
    if started_at is not None and -FUTURE_S <= now - started_at <= OLDEST_S:
        _clock = StartUpClock(min(started_at, now), before=before, now=_boot_clock)
        _watch_imports(_clock)
        if COUNTS_CALLS in os.environ:
            _clock.count_calls(in_forks=before == PERFSUITE)


def pause() -> None:
    """Leave out what comes, until `go_on`: perfsuite does it."""
    if _clock is not None:
        _clock.enter(PERFSUITE)


def go_on() -> None:
    """End what `pause` began, maybe in the process that this one was forked from."""
    if _clock is not None:
        _clock.leave()


def begin_loop() -> None:
    """Begin the first step: a loop of perfsuite's own begins."""
    if _clock is not None:
        _clock.begin_loop()


def first_batch() -> None:
    """Begin the first step, if a loader has given its first batch."""
    if _clock is not None:
        _clock.first_batch()


def is_running() -> bool:
    """Whether the first step has not ended yet, of a process whose clock has begun."""
    return _clock is not None and not _clock.is_over


def end() -> StartUp | None:
    """End the first step. Returns what the start-up took; None if that is unknown."""
    return None if _clock is None else _clock.end()


def watch(owner: Any, name: str, part: str) -> None:
    """Time the calls of a function as a part, in all modules that have imported it by its name."""
    function = getattr(owner, name)
    if not is_running() or hasattr(function, "is_timed"):
        return

    def watched(*args: Any, **kwargs: Any) -> Any:
        with Part(part):
            return function(*args, **kwargs)

    watched.__dict__.update(getattr(function, "__dict__", {}))
    for each in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(watched, each, getattr(function, each, None))
    watched.__wrapped__ = function  # type: ignore[attr-defined]
    watched.is_timed = True  # type: ignore[attr-defined]
    for module in (owner, *list(sys.modules.values())):
        try:
            names = object.__getattribute__(
                module, "__dict__"
            )  # a lazy module would be loaded by its own way
        except AttributeError:
            continue
        if names.get(name) is function:
            setattr(module, name, watched)


def process_start() -> float | None:
    """Return when this process started, in seconds since the machine did; None if unknown.

    The kernel tells it in clock ticks (proc_pid_stat(5), starttime), which are hundredths of a second.
    """
    try:
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _boot_clock() -> float:
    return clock_gettime(CLOCK_BOOTTIME)  # of the same start as the ticks, and nobody sets it


def _watch_imports(clock: StartUpClock) -> None:
    """Time imports until the first step has ended.

    Python calls `importlib._bootstrap._find_and_load` for each module that is not loaded yet. The name is
    private (seen in Python 3.11): without it imports belong to the parts that make them.
    """
    bootstrap = getattr(importlib, "_bootstrap", None)
    load = getattr(bootstrap, "_find_and_load", None)
    if load is None:
        return

    def find_and_load(name: str, *args: Any) -> Any:
        if not clock.enter(IMPORTS):
            if clock.is_over and bootstrap._find_and_load is watched:  # type: ignore[union-attr]
                bootstrap._find_and_load = load  # type: ignore[union-attr]
            return load(name, *args)
        try:
            module = load(name, *args)
            clock.imported(name)
            return module
        finally:
            clock.leave()

    # Python leaves frames of this file out of the tracebacks of imports that fail.
    code = find_and_load.__code__.replace(co_filename="<frozen importlib._bootstrap>")
    find_and_load.__code__ = code
    watched = find_and_load
    bootstrap._find_and_load = watched  # type: ignore[union-attr]
