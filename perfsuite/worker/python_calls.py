"""Counts the calls of Python functions that a step makes in the thread that trains. Imports no torch."""

import gc
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from perfsuite.results.counts import Phase, PythonCalls

T = TypeVar("T")

OURS = str(Path(__file__).parents[1])
COUNTING = str(Path(__file__).with_name("counting.py"))  # whose functions are not counted, nor their calls
NOT_SEEN = ("find_torch_dispatch_rule", "__eq__")
"""Functions that are not counted, nor what they call: torch's, which is called for each operator under a
dispatch mode, as the one that counts; and comparisons, which a dictionary makes where hashes of addresses
collide, so by chance."""
WRAPPER = "watched"  # name of the functions by which we notice calls of a function of the training
LEAST = 0.001  # share of all calls below which a function is not kept by its name


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(OURS)


def _calls_for_us(frame: FrameType) -> bool:
    """Whether a frame of ours calls for us. A wrapper calls what it wraps for the training."""
    return _is_ours(frame) and frame.f_code.co_name != WRAPPER


class PythonCounter:
    """Counts the calls that each of two steps makes: what one of them alone does comes once, or now and then.

    Not seen are perfsuite's functions and what they call at once, finalizers that Python's garbage collector
    runs, what operators do within, and other threads, as that in which autograd runs hooks on a GPU. `phase`
    tells where in the step the training is.
    """

    def __init__(self, phase: Callable[[], Phase]) -> None:
        self._phase = phase
        self._hook = self._see  # one object, to be found again
        self._calls = Counter[tuple[str, str, Phase]]()
        self._steps: list[Counter[tuple[str, str, Phase]]] = []
        self._ours: FrameType | None = None  # of our own account, until it returns
        self._is_collecting = False
        self._is_whole = True

    def start(self) -> None:
        """Begin a step. A profiler of the user's keeps its place: nothing is counted then."""
        self._calls, self._ours = Counter(), None
        if sys.getprofile() is not None:
            self._is_whole = False
            return
        gc.callbacks.append(self._collecting)
        sys.setprofile(self._hook)

    def stop(self) -> None:
        """End a step."""
        if self._collecting in gc.callbacks:
            gc.callbacks.remove(self._collecting)
        if sys.getprofile() is self._hook:
            sys.setprofile(None)
        else:  # taken away
            self._is_whole = False
        self._steps.append(self._calls)

    def unseen(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function, and see nothing of what it does."""
        was_seeing = self._pause()
        try:
            return function(*args)
        finally:
            if was_seeing:
                sys.setprofile(self._hook)

    def result(self) -> PythonCalls | None:
        """What all steps so far have called; None if a profiler of the user's was there."""
        if not self._is_whole or not self._steps:
            return None
        common = self._steps[0]
        for step in self._steps[1:]:
            common = common & step
        calls, functions = Counter[Phase](), Counter[str]()
        for (module, name, phase), count in common.items():
            calls[phase] += count
            functions[f"{module}.{name}"] += count
        least = LEAST * functions.total()
        return PythonCalls(
            version="{}.{}".format(*sys.version_info),
            calls=dict(sorted(calls.items())),
            functions={name: count for name, count in sorted(functions.items()) if count >= least},
        )

    def _pause(self) -> bool:
        """Returns whether this thread was seen."""
        if sys.getprofile() is not self._hook:
            return False
        sys.setprofile(None)
        return True

    def _collecting(self, at: str, _: Any) -> None:
        if at == "start":
            self._is_collecting = self._pause()
        elif self._is_collecting:
            self._is_collecting = False
            sys.setprofile(self._hook)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if self._ours is not None:
            if frame is self._ours and event == "return":
                self._ours = None
        elif event == "call":
            try:
                self._call(frame)
            except Exception:  # it would end the training
                self._is_whole = False

    def _call(self, frame: FrameType) -> None:
        code, caller = frame.f_code, frame.f_back
        if code.co_name in NOT_SEEN or code.co_filename == COUNTING:
            self._ours = frame
        elif not _is_ours(frame) and not (caller is not None and _calls_for_us(caller)):
            self._calls[frame.f_globals.get("__name__", ""), code.co_qualname, self._phase()] += 1

    HOOKS = (
        _see,
        _call,
        _is_ours,
        _calls_for_us,
        _pause,
        _collecting,
        unseen,
    )  # the functions that run while it sees
