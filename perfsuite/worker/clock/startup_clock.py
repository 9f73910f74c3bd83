"""Time the parts of a process's start-up, from the start of the process to the end of its first step.

Parts can be nested. Time then belongs only to the innermost part. Time that perfsuite itself takes belongs to
no part. In launches that only count work, the calls of Python functions are counted as well.

A script's process loads this module by its path before the script begins (`startup.sitecustomize`). For this
reason, this module imports nothing from perfsuite. Ranks of perfsuite's own loops are forked from a server
that has already imported torch (`node.preload`). Their clock begins in that server, and continues in each
rank.
"""

import atexit
import importlib
import os
import sys
from collections.abc import Callable
from threading import get_ident
from time import CLOCK_BOOTTIME, clock_gettime, time
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, Self

START_UP = "start-up"
IMPORTS = "imports"
PROCESS_GROUP = "process group"
BUILD = "build"
DATA = "data"
FIRST_STEP = "first step"
BUILD_AND_FIRST_STEP = "build and first step"  # used if the start of the first step is unknown
PERFSUITE = "perfsuite"  # perfsuite's own work, including its calls and imports
# perfsuite's own work that imports modules which the training needs anyway. These imports count as the
# training's imports.
PERFSUITE_BUILDS = "perfsuite builds"
UNNAMED = (PERFSUITE, PERFSUITE_BUILDS)  # parts that are not reported
PYTHON = "Python"  # name under which all modules of the standard library are counted
NOT_COUNTED = "the calls of the start-up are not counted: "
OTHER_PROFILER = "the training has its own profile function"
# Environment variable that turns on the counting of calls. It is off by default, because it takes time.
COUNTS_CALLS = "PERFSUITE_COUNT_START_UP"
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
OURS = (_HERE, os.path.realpath(_HERE) + os.sep)  # prefixes of the paths of our files
# Names of our functions that wrap a function of the training. Calls that such a wrapper makes are counted as
# calls of the training.
WRAPPERS = ("watched", "find_and_load")

# Maximum age of a process in seconds when its clock begins. The start time of an older process is not
# trusted.
OLDEST_S = 600
# Seconds by which the start of a process can seem to be in the future, because the kernel rounds
# start times to hundredths of a second.
FUTURE_S = 0.02


class StartUp(NamedTuple):
    """The times and counts of a process's start-up."""

    seconds: dict[str, float]  # span name -> seconds, for the whole start-up and for each of its parts
    modules: dict[str, int]  # package -> number of imported modules
    # Span name -> module and function -> number of calls. None if calls were not counted.
    calls: dict[str, dict[tuple[str, str], int]] | None = None
    note: str = ""  # the reason why counting the calls failed


class StartUpClock:
    """Adds up the seconds of each part, and records imported modules.

    Only the thread that creates this object is observed.
    """

    def __init__(self, started_at: float, *, before: str, now: Callable[[], float]) -> None:
        """Begin at `started_at`, a time on the clock `now`. The time until now belongs to part `before`."""
        self.is_over = False
        self._now = now
        self._seconds = dict[str, float]()
        self._modules = set[str]()
        self._parts = [BUILD]  # running parts, the innermost last
        self._thread = get_ident()
        self._since = started_at
        self._has_batch = self._has_loop = False
        self._calls: _Calls | None = None
        self._add(before)

    def count_calls(self, *, in_forks: bool) -> None:
        """Start counting the calls of Python functions that this thread makes.

        With `in_forks`, forked children continue to count, for example the ranks that a server forks.
        """
        self._calls = _Calls(self, in_forks=in_forks)

    def enter(self, part: str) -> bool:
        """Begin a part inside the running part. In another thread, or after the first step, return False."""
        if self.is_over or get_ident() != self._thread:
            return False
        outer = self._parts[-1]
        self._add(outer)
        is_ours = outer == PERFSUITE or (outer == PERFSUITE_BUILDS and part != IMPORTS)
        self._parts.append(outer if is_ours else part)
        return True

    def leave(self) -> None:
        """End the innermost part. In another thread, or after the first step, do nothing."""
        if not self.is_over and get_ident() == self._thread:
            self._add(self._parts.pop())

    def imported(self, name: str) -> None:
        """Record a module that the running import has loaded."""
        if self._parts[-1] == IMPORTS:
            self._modules.add(name)

    def begin_loop(self) -> None:
        """Begin the first step, because one of perfsuite's own training loops begins."""
        self._has_loop = True
        self._begin_first_step()

    def first_batch(self) -> None:
        """Begin the first step, because a loader has yielded its first batch.

        If the first step had begun already, its work until now is counted as building the job.
        """
        if self._has_batch or self.is_over or get_ident() != self._thread:
            return
        self._has_batch = True
        self._begin_first_step()
        self._seconds[BUILD] = self._seconds.get(BUILD, 0.0) + self._seconds.pop(FIRST_STEP, 0.0)
        if self._calls is not None:
            self._calls.rename(FIRST_STEP, BUILD)

    def end(self) -> StartUp | None:
        """End the first step.

        Return None if another thread took the first step, because the parts are then unknown.
        """
        if self.is_over:
            return None
        calls = None if self._calls is None else self._calls.end()
        self.is_over = True
        if get_ident() != self._thread:
            return None
        self._add(self._parts[-1])
        seconds = {part: part_s for part, part_s in self._seconds.items() if part not in UNNAMED}
        if not (self._has_batch or self._has_loop):
            seconds[BUILD_AND_FIRST_STEP] = seconds.pop(BUILD, 0.0)
            if self._calls is not None:
                self._calls.rename(BUILD, BUILD_AND_FIRST_STEP)
        named = {_span(part): part_s for part, part_s in seconds.items()}
        by_span = None if calls is None else {_span(part): part_calls for part, part_calls in calls.items()}
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
    """Counts the calls of Python functions in the thread that creates this object, with `sys.setprofile`.

    As in the counts of steps (`counting.python_calls`), calls of perfsuite's functions are left out, and so
    are the calls that these functions make directly. The import machinery is left out as well, because it
    does more work if a file has not been compiled yet.
    """

    def __init__(self, clock: StartUpClock, *, in_forks: bool) -> None:
        """Start counting. With `in_forks`, this process is a server, and its children continue to count."""
        self._clock = clock
        self._by_part = dict[str, dict[tuple[str, str], int]]()
        self._is_over = False
        self._error = ""  # the error that ended the counting
        self._server = os.getpid() if in_forks else None
        self._hook = _counting(clock, self._by_part, self._give_up)
        os.register_at_fork(after_in_child=self._forked)
        # The hook must not run while Python shuts down. If no step is taken, nothing else removes the hook.
        atexit.register(self.end)
        sys.setprofile(self._hook)

    def rename(self, part: str, new_part: str) -> None:
        """Move the calls of one part to another part."""
        to = self._by_part.setdefault(new_part, {})
        for function, number in self._by_part.pop(part, {}).items():
            to[function] = to.get(function, 0) + number

    def end(self) -> dict[str, dict[tuple[str, str], int]] | None:
        """Return the calls of each part, or None if calls might be missing (see `why_unknown`)."""
        self._is_over = True
        if sys.getprofile() is not self._hook:
            return None
        sys.setprofile(None)
        return None if self._error else self._by_part

    @property
    def why_unknown(self) -> str:
        """The reason why `end` returned None."""
        return self._error or OTHER_PROFILER

    def _give_up(self, error: Exception) -> None:
        """Stop counting calls. If a search for named functions has wrapped our hook, the search continues."""
        self._error = f"{type(error).__name__}: {error}"
        self._by_part.clear()
        if sys.getprofile() is self._hook:
            sys.setprofile(None)

    def _forked(self) -> None:
        profiler = sys.getprofile()  # our hook, or a search for named functions that calls our hook
        is_ours = getattr(profiler, "__module__", "").startswith("perfsuite.")
        if is_ours and not self._is_over and os.getppid() != self._server:
            sys.setprofile(None)


class _Code(NamedTuple):
    """Facts about a function's code, stored by the code's id, because hashing code objects is slow."""

    code: CodeType  # keeps the code alive, so that its id is not reused
    function: tuple[str, str] | None  # module and name of the function; None if it is not counted
    # Whether the function belongs to perfsuite and makes its calls for perfsuite. Our wrappers make their
    # calls for the training.
    calls_for_us: bool


def _counting(
    clock: StartUpClock,
    by_part: dict[str, dict[tuple[str, str], int]],
    give_up: Callable[[Exception], None],
) -> Callable[[FrameType, str, Any], None]:
    """Return a hook for `sys.setprofile` that adds calls to `by_part`.

    The hook must be fast, because it runs about a million times.
    """
    codes = dict[int, _Code]()
    has_failed = False

    def remember(frame: FrameType) -> _Code:
        code = frame.f_code
        module = str(frame.f_globals.get("__name__", ""))
        is_import = code.co_name == "<module>" or module.partition(".")[0] == "importlib"
        is_ours = code.co_filename.startswith(OURS)
        # `find_and_load` is recognised by its module, because `_watch_imports` replaces its `co_filename`.
        counts = not (is_import or is_ours or module == __name__)
        function = (module, code.co_qualname) if counts else None
        codes[id(code)] = entry = _Code(code, function, is_ours and code.co_name not in WRAPPERS)
        return entry

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal has_failed
        if event == "call" and not has_failed:
            try:
                add(frame)
            except Exception as error:  # an error must not end the training
                has_failed = True
                give_up(error)

    def add(frame: FrameType) -> None:
        function = (codes.get(id(frame.f_code)) or remember(frame)).function
        if function is None:
            return
        caller = frame.f_back
        if caller is not None and (codes.get(id(caller.f_code)) or remember(caller)).calls_for_us:
            return
        if clock.is_over:  # another thread has ended the counting
            sys.setprofile(None)
            return
        part = clock._parts[-1]
        if part not in UNNAMED:
            calls = by_part.setdefault(part, {})
            calls[function] = calls.get(function, 0) + 1

    return count


def process_start() -> float | None:
    """Return the start time of this process in seconds since the machine booted, or None if unknown.

    The kernel reports this time in clock ticks, which are usually hundredths of a second (proc_pid_stat(5),
    starttime).
    """
    try:
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def process_started_at() -> float | None:
    """Return the start time of this process in seconds since the epoch, or None if unknown."""
    start = process_start()
    return None if start is None else time() - _boot_clock() + start


def _boot_clock() -> float:
    return clock_gettime(CLOCK_BOOTTIME)  # has the same origin as the kernel's ticks, and is never adjusted


around_import: Callable[[str], Callable[[], None] | None] | None = None
"""A function to call when an import begins, with the module's name. It can return a function to call when the
import ends."""
_clock: StartUpClock | None = None  # the clock of this process. A forked process inherits its parent's clock


class Part:
    """A part of the start-up, as a context manager.

    It has no effect if there is no clock, or after the first step.
    """

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


def begin(
    before: str,
    *,
    start_of: Callable[[], float | None] = process_start,
    now: Callable[[], float] = _boot_clock,
) -> None:
    """Start the clock of this process, unless its start time is unknown.

    Time that has passed since the process started belongs to the part `before`. `start_of` returns the time
    at which the process started, and `now` the current time. Both are in seconds since the machine booted.
    """
    global _clock
    begun_at = now()
    started_at = start_of()
    if started_at is not None and -FUTURE_S <= begun_at - started_at <= OLDEST_S:
        _clock = StartUpClock(min(started_at, begun_at), before=before, now=now)
        _watch_imports(_clock)
        if COUNTS_CALLS in os.environ:
            _clock.count_calls(in_forks=before == PERFSUITE)


def pause() -> None:
    """Exclude the time until `go_on`, because it is spent on perfsuite's own work."""
    if _clock is not None:
        _clock.enter(PERFSUITE)


def go_on() -> None:
    """Include time again after `pause`. The pause might have begun in the parent process, before a fork."""
    if _clock is not None:
        _clock.leave()


def begin_loop() -> None:
    """Begin the first step, because one of perfsuite's own training loops begins."""
    if _clock is not None:
        _clock.begin_loop()


def first_batch() -> None:
    """Begin the first step, if this is the first batch of a loader."""
    if _clock is not None:
        _clock.first_batch()


def is_running() -> bool:
    """Return whether this process has a clock and its first step has not ended yet."""
    return _clock is not None and not _clock.is_over


def end() -> StartUp | None:
    """End the first step. Return the measured start-up, or None if it is unknown."""
    return None if _clock is None else _clock.end()


def watch(owner: Any, name: str, part: str) -> None:
    """Count the time of a function's calls as this part of the start-up.

    The function is also replaced in all modules that have imported it by name.
    """
    function = getattr(owner, name)
    if not is_running() or hasattr(function, "is_timed"):
        return

    def watched(*args: Any, **kwargs: Any) -> Any:
        with Part(part):
            return function(*args, **kwargs)

    watched.__dict__.update(getattr(function, "__dict__", {}))
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(watched, attribute, getattr(function, attribute, None))
    watched.__wrapped__ = function  # type: ignore[attr-defined]
    watched.is_timed = True  # type: ignore[attr-defined]
    for module in (owner, *list(sys.modules.values())):
        try:
            names = object.__getattribute__(module, "__dict__")  # `getattr` would load a lazy module
        except AttributeError:
            continue
        if names.get(name) is function:
            setattr(module, name, watched)


def _watch_imports(clock: StartUpClock) -> None:
    """Time imports until the first step has ended.

    Python calls `importlib._bootstrap._find_and_load` for each module that is not loaded yet. This name is
    private (seen in Python 3.11). If it is missing, the time of an import counts as time of the part around
    it.
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
        at_end = None if around_import is None else around_import(name)
        try:
            module = load(name, *args)
            clock.imported(name)
            return module
        finally:
            if at_end is not None:
                at_end()
            clock.leave()

    # Make this function look like a part of importlib. Python then removes its frame, like those of
    # importlib, from the tracebacks of failed imports.
    code = find_and_load.__code__.replace(co_filename="<frozen importlib._bootstrap>")
    find_and_load.__code__ = code
    watched = find_and_load
    bootstrap._find_and_load = watched  # type: ignore[union-attr]
