"""Count the calls of Python functions in a step. Imports no torch.

Since Python 3.12, `sys.monitoring` sees all threads. In older versions, `sys.setprofile` only sees the
training thread.
"""

import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

from perfsuite.results.counts import OUTSIDE_OF_STEPS, Phase, PythonCalls

T = TypeVar("T")

OURS = f"{Path(__file__).parents[2]}{os.sep}"
# The functions in `steps.py` are not counted, and neither are the calls that they make.
COUNTING = str(Path(__file__).with_name("steps.py"))
NOT_SEEN = ("find_torch_dispatch_rule", "__eq__")
"""These functions are not counted, and neither are the calls that they make. torch calls the first one for
each operator, but only under a dispatch mode such as ours. A dictionary calls `__eq__` if two keys are
different objects with the same hash. A hash can depend on an address in memory, so the number of these calls
can differ between launches."""
WRAPPER = "watched"  # name of all our wrappers around functions that the training calls
MONITORING: Any = getattr(sys, "monitoring", None)  # since Python 3.12
VERSION = "{}.{}".format(*sys.version_info)
LEAST = 0.001  # a function is listed by name only if it has at least this share of all calls


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OURS)


def _is_import(module: str, name: str) -> bool:
    return module.partition(".")[0] == "importlib" or name == "<module>"


def _calls_for_us(frame: FrameType) -> bool:
    """Return whether a frame makes its calls for perfsuite.

    perfsuite's wrappers (`WRAPPER`) are an exception: they make their calls for the training.
    """
    return _is_ours(frame) and frame.f_code.co_name != WRAPPER


class PythonCounter:
    """Counts the Python calls of steps.

    The result of the second step contains only the calls that the first step made as well. A call that
    only one of these two steps made does not recur in every step. The results of all other steps contain all
    calls except imports, so that calls that are made only in every n-th step are seen.

    The following calls are not counted: calls of perfsuite's functions, calls that these make directly, calls
    by finalizers that Python's garbage collector runs, and calls inside operators. Before Python 3.12, calls
    in other threads are not counted either, for example in the thread in which autograd runs hooks on a GPU.

    `phase` returns the current phase of the step. `hidden` contains prefixes of file paths. Functions in
    files with such a path are not counted, and neither are the calls that these functions make.
    """

    def __init__(self, phase: Callable[[], Phase], hidden: tuple[str, ...] = ()) -> None:
        self._phase = phase
        self._hidden = (COUNTING, *hidden)
        self._calls = Counter[tuple[str, str, Phase]]()
        self._steps: list[Counter[tuple[str, str, Phase]]] = []
        self._watch: _Monitoring | _Profile = (_Monitoring if MONITORING else _Profile)(self._see)
        self._is_whole = True

    def start(self) -> None:
        """Begin a step. If the user has set a profiler, it stays active and nothing is counted."""
        self._calls = Counter()
        if sys.getprofile() is not None or not self._watch.start():
            self._is_whole = False
            return
        # The training's own collector callbacks run between these two, so their calls are not counted.
        gc.callbacks.insert(0, self._collection_begins)
        gc.callbacks.append(self._collection_ends)

    def stop(self) -> None:
        """End a step."""
        for callback in (self._collection_begins, self._collection_ends):
            if callback in gc.callbacks:
                gc.callbacks.remove(callback)
        # Calls are missing if our profile function was removed, or if another one was added.
        if not self._watch.stop() or sys.getprofile() is not None:
            self._is_whole = False
        self._steps.append(self._calls)

    def forget_last(self) -> None:
        """Forget the calls of the step that was stopped last."""
        self._steps.pop()

    def unseen(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function without counting its calls in this thread."""
        was_seeing = self._watch.pause()
        try:
            return function(*args)
        finally:
            if was_seeing:
                self._watch.resume()

    def result(self) -> PythonCalls | None:
        """Return the calls of the last step, or None if a user's profiler was active or counting failed."""
        if not self._is_whole or not self._steps:
            return None
        counted = self._steps[-1]
        if len(self._steps) == 2:
            counted = self._steps[0] & counted
        calls = Counter[Phase]()
        functions = Counter[str]()
        for (module, name, phase), count in counted.items():
            if len(self._steps) != 2 and _is_import(module, name):
                continue
            calls[phase] += count
            functions[f"{module}.{name}"] += count
        return PythonCalls(
            version=VERSION,
            all_threads=MONITORING is not None,
            calls=dict(sorted(calls.items())),
            functions=_most_called(functions),
        )

    def _collection_begins(self, at: str, _: Any) -> None:
        try:
            if at == "start":
                self._watch.is_collecting = self._watch.pause()
        except Exception:  # Python would only print the error, and go on
            self._is_whole = False

    def _collection_ends(self, at: str, _: Any) -> None:
        try:
            if at == "stop" and self._watch.is_collecting:
                self._watch.is_collecting = False
                self._watch.resume()
        except Exception:
            self._is_whole = False

    def _see(self, frame: FrameType) -> bool:
        """Count a call of a function. Return True if the function and all calls that it makes are ignored."""
        code = frame.f_code
        caller = frame.f_back
        if code.co_name in NOT_SEEN or code.co_filename.startswith(self._hidden):
            return True
        if not _is_ours(frame) and not (caller is not None and _calls_for_us(caller)):
            try:
                self._calls[frame.f_globals.get("__name__", ""), code.co_qualname, self._phase()] += 1
            except Exception:  # an error must not end the training
                self._is_whole = False
        return False


def outside_of_steps(calls: Mapping[tuple[str, str], int]) -> PythonCalls:
    """Return the calls that one thread made outside of steps. `calls` maps (module, name) to a number."""
    functions = Counter[str]()
    for (module, name), count in calls.items():
        functions[f"{module}.{name}"] += count
    total = {OUTSIDE_OF_STEPS: functions.total()}
    return PythonCalls(version=VERSION, calls=total, functions=_most_called(functions))


def _most_called(functions: Counter[str]) -> dict[str, int]:
    least = LEAST * functions.total()
    return {name: count for name, count in sorted(functions.items()) if count >= least}


class _Profile:
    """Reports the calls of the thread that calls `start`, with `sys.setprofile`."""

    is_collecting = False  # whether reporting is paused because Python's garbage collector runs

    def __init__(self, see: Callable[[FrameType], bool]) -> None:
        self._see = see
        self._hook = self._event  # keep one bound method, so that it can be recognised
        self._ours: FrameType | None = None  # the frame of an uncounted call, while it runs

    def start(self) -> bool:
        self._ours = None
        sys.setprofile(self._hook)
        return True

    def stop(self) -> bool:
        """Stop reporting calls. Returns whether reporting was active until now."""
        return self.pause()

    def pause(self) -> bool:
        """Pause reporting in this thread. Return whether it was active."""
        if sys.getprofile() is not self._hook:
            return False
        sys.setprofile(None)
        return True

    def resume(self) -> None:
        sys.setprofile(self._hook)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if self._ours is not None:
            if frame is self._ours and event == "return":
                self._ours = None
        elif event == "call" and self._see(frame):
            self._ours = frame


def leave_monitoring() -> bool:
    """Release `sys.monitoring`. A process that was forked in a counted step must also call this.

    Returns whether this process had claimed `sys.monitoring`.
    """
    if MONITORING is None or MONITORING.get_tool(MONITORING.PROFILER_ID) != OURS:
        return False
    MONITORING.set_events(MONITORING.PROFILER_ID, 0)
    MONITORING.free_tool_id(MONITORING.PROFILER_ID)
    return True


class _OfThread(threading.local):
    """The state of one thread."""

    paused = 0  # number of our running functions that have paused reporting
    ours: FrameType | None = None  # the frame of an uncounted call, while it runs
    is_collecting = False


class _Monitoring:
    """Reports the calls of all threads, with `sys.monitoring` and its tool id for profilers."""

    def __init__(self, see: Callable[[FrameType], bool]) -> None:
        self._see = see
        self._thread = _OfThread()

    @property
    def is_collecting(self) -> bool:
        """Whether reporting is paused because Python's garbage collector runs in this thread."""
        return self._thread.is_collecting

    @is_collecting.setter
    def is_collecting(self, value: bool) -> None:
        self._thread.is_collecting = value

    def start(self) -> bool:
        """Start reporting calls. Return False if another tool uses the tool id."""
        if MONITORING.get_tool(MONITORING.PROFILER_ID) is not None:
            return False
        events = MONITORING.events
        begin = (events.PY_START, events.PY_RESUME, events.PY_THROW)  # resuming a generator counts as a call
        # At the `yield` of a generator with uncounted calls, counting resumes for the calls of its consumer.
        end = (events.PY_RETURN, events.PY_UNWIND, events.PY_YIELD)
        self._thread = _OfThread()
        MONITORING.use_tool_id(MONITORING.PROFILER_ID, OURS)
        for event in (*begin, *end):
            callback = self._called if event in begin else self._returned
            MONITORING.register_callback(MONITORING.PROFILER_ID, event, callback)
        MONITORING.set_events(MONITORING.PROFILER_ID, sum((*begin, *end)))
        return True

    def stop(self) -> bool:
        """Stop reporting calls. Returns whether reporting was active until now."""
        return leave_monitoring()

    def pause(self) -> bool:
        """Pause reporting in this thread. Always returns True."""
        self._thread.paused += 1
        return True

    def resume(self) -> None:
        self._thread.paused -= 1

    def _called(self, code: CodeType, *_: Any) -> None:
        thread = self._thread
        if not thread.paused and thread.ours is None:
            frame = sys._getframe(1)
            if self._see(frame):
                thread.ours = frame

    def _returned(self, code: CodeType, *_: Any) -> None:
        thread = self._thread
        if thread.ours is not None and sys._getframe(1) is thread.ours:
            thread.ours = None


HOOKS: tuple[Any, ...] = (  # functions of this module that run while calls are counted
    *(PythonCounter._see, PythonCounter._collection_begins, PythonCounter._collection_ends),
    *(PythonCounter.unseen, _is_ours, _calls_for_us),
    *(_Profile.pause, _Profile.resume, _Profile._event),
    *(_Monitoring.pause, _Monitoring.resume, _Monitoring._called, _Monitoring._returned),
)
