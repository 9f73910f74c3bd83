"""Counts the calls of Python functions that a step makes. Imports no torch.

Since Python 3.12 `sys.monitoring` sees all threads. Before, `sys.setprofile` sees the thread that trains.
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
COUNTING = str(Path(__file__).with_name("steps.py"))  # whose functions are not counted, nor their calls
NOT_SEEN = ("find_torch_dispatch_rule", "__eq__")
"""Functions that are not counted, nor what they call: torch's, which is called for each operator under a
dispatch mode, as the one that counts; and comparisons, which a dictionary makes where hashes of addresses
collide, so by chance."""
WRAPPER = "watched"  # name of the functions by which we notice calls of a function of the training
MONITORING: Any = getattr(sys, "monitoring", None)  # since Python 3.12
VERSION = "{}.{}".format(*sys.version_info)
LEAST = 0.001  # share of all calls below which a function is not kept by its name


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OURS)


def _is_import(module: str, name: str) -> bool:
    return module.partition(".")[0] == "importlib" or name == "<module>"


def _calls_for_us(frame: FrameType) -> bool:
    """Whether a frame of ours calls for us. A wrapper calls what it wraps for the training."""
    return _is_ours(frame) and frame.f_code.co_name != WRAPPER


class PythonCounter:
    """Counts the calls of steps.

    Of two steps those count that both make: what one of them alone does comes once, or now and then. Of a
    single step, and of a third one and later ones, all count but imports: what comes in every n-th step is
    seen there.

    Not seen are perfsuite's functions and what they call at once, finalizers that Python's garbage collector
    runs, and what operators do within. Before Python 3.12 other threads are not seen, as that in which
    autograd runs hooks on a GPU. `phase` tells where in the step the training is. `hidden` is how the paths
    of files begin whose functions are not seen either, with all that they call.
    """

    def __init__(self, phase: Callable[[], Phase], hidden: tuple[str, ...] = ()) -> None:
        self._phase = phase
        self._hidden = (COUNTING, *hidden)
        self._calls = Counter[tuple[str, str, Phase]]()
        self._steps: list[Counter[tuple[str, str, Phase]]] = []
        self._watch: _Monitoring | _Profile = (_Monitoring if MONITORING else _Profile)(self._see)
        self._is_whole = True

    def start(self) -> None:
        """Begin a step. A profiler of the user's keeps its place: nothing is counted then."""
        self._calls = Counter()
        if sys.getprofile() is not None or not self._watch.start():
            self._is_whole = False
            return
        gc.callbacks.append(self._collecting)

    def stop(self) -> None:
        """End a step."""
        if self._collecting in gc.callbacks:
            gc.callbacks.remove(self._collecting)
        if not self._watch.stop() or sys.getprofile() is not None:  # it was taken away, or another one came
            self._is_whole = False
        self._steps.append(self._calls)

    def unseen(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function, and see nothing of what it does in this thread."""
        was_seeing = self._watch.pause()
        try:
            return function(*args)
        finally:
            if was_seeing:
                self._watch.resume()

    def result(self) -> PythonCalls | None:
        """What the last step has called; None if a profiler of the user's was there."""
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

    def _collecting(self, at: str, _: Any) -> None:
        if at == "start":
            self._watch.is_collecting = self._watch.pause()
        elif self._watch.is_collecting:
            self._watch.is_collecting = False
            self._watch.resume()

    def _see(self, frame: FrameType) -> bool:
        """Count a call. Returns whether it is of our own account, with all that it calls."""
        code = frame.f_code
        caller = frame.f_back
        if code.co_name in NOT_SEEN or code.co_filename.startswith(self._hidden):
            return True
        if not _is_ours(frame) and not (caller is not None and _calls_for_us(caller)):
            try:
                self._calls[frame.f_globals.get("__name__", ""), code.co_qualname, self._phase()] += 1
            except Exception:  # it would end the training
                self._is_whole = False
        return False


def outside_of_steps(calls: Mapping[tuple[str, str], int]) -> PythonCalls:
    """Return calls, by module and function, that one thread has made where no step runs."""
    functions = Counter[str]()
    for (module, name), count in calls.items():
        functions[f"{module}.{name}"] += count
    total = {OUTSIDE_OF_STEPS: functions.total()}
    return PythonCalls(version=VERSION, calls=total, functions=_most_called(functions))


def _most_called(functions: Counter[str]) -> dict[str, int]:
    least = LEAST * functions.total()
    return {name: count for name, count in sorted(functions.items()) if count >= least}


class _Profile:
    """Shows the calls of the thread that starts it, by `sys.setprofile`."""

    is_collecting = False  # Python's garbage collector runs, and has paused it

    def __init__(self, see: Callable[[FrameType], bool]) -> None:
        self._see = see
        self._hook = self._event  # one object, to be found again
        self._ours: FrameType | None = None  # of our own account, until it returns

    def start(self) -> bool:
        self._ours = None
        sys.setprofile(self._hook)
        return True

    def stop(self) -> bool:
        """Returns whether it was there until now."""
        return self.pause()

    def pause(self) -> bool:
        """Returns whether this thread was seen."""
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
    """Leave `sys.monitoring`, as also a process must that was forked in a counted step.

    Returns whether this process had our place in it.
    """
    if MONITORING is None or MONITORING.get_tool(MONITORING.PROFILER_ID) != OURS:
        return False
    MONITORING.set_events(MONITORING.PROFILER_ID, 0)
    MONITORING.free_tool_id(MONITORING.PROFILER_ID)
    return True


class _OfThread(threading.local):
    """What is seen of one thread."""

    paused = 0  # how many of our functions do not want it to be seen
    ours: FrameType | None = None  # of our own account, until it returns
    is_collecting = False


class _Monitoring:
    """Shows the calls of all threads, by `sys.monitoring`, in the place that it has for a profiler."""

    def __init__(self, see: Callable[[FrameType], bool]) -> None:
        self._see = see
        self._thread = _OfThread()

    @property
    def is_collecting(self) -> bool:
        """Whether Python's garbage collector runs in this thread, and has paused it."""
        return self._thread.is_collecting

    @is_collecting.setter
    def is_collecting(self, value: bool) -> None:
        self._thread.is_collecting = value

    def start(self) -> bool:
        """Returns whether the place was free."""
        if MONITORING.get_tool(MONITORING.PROFILER_ID) is not None:
            return False
        events = MONITORING.events
        begin = (events.PY_START, events.PY_RESUME, events.PY_THROW)  # as a generator does again and again
        end = (events.PY_RETURN, events.PY_UNWIND)
        self._thread = _OfThread()
        MONITORING.use_tool_id(MONITORING.PROFILER_ID, OURS)
        for event in (*begin, *end):
            callback = self._called if event in begin else self._returned
            MONITORING.register_callback(MONITORING.PROFILER_ID, event, callback)
        MONITORING.set_events(MONITORING.PROFILER_ID, sum((*begin, *end)))
        return True

    def stop(self) -> bool:
        """Returns whether it was there until now."""
        return leave_monitoring()

    def pause(self) -> bool:
        """Returns whether this thread was seen."""
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


HOOKS: tuple[Any, ...] = (  # the functions that run while it sees
    *(PythonCounter._see, PythonCounter._collecting, PythonCounter.unseen, _is_ours, _calls_for_us),
    *(_Profile.pause, _Profile.resume, _Profile._event),
    *(_Monitoring.pause, _Monitoring.resume, _Monitoring._called, _Monitoring._returned),
)
