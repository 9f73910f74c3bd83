"""Mark parts of a training script as phases (`perfsuite.phase`). Imports no torch.

Outside of a launch, a phase costs almost nothing: it only checks that a variable is None.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from perfsuite.case.phases import phase_name
from perfsuite.errors import CaseError, MismatchError
from perfsuite.worker.hooks.named import NamedFunction

if TYPE_CHECKING:
    from perfsuite.worker.spans.recording import Span, Spans

F = TypeVar("F", bound=Callable[..., Any])


def _no_torch() -> bool:
    return False


spans: Spans | None = None  # the spans of this process. None if no launch measures this process
is_compiling: Callable[[], bool] = _no_torch
"""A function that returns whether torch is compiling its caller. Compiled code has no phases, because they
would break its graph."""


class phase:
    """Mark a part of a training script as a phase: `with phase("rollout"): ...`, or `@phase("rollout")`.

    A launch reports the seconds and the work of the phase under this name. Outside of a launch, a phase has
    no effect. A phase can contain other phases.
    """

    def __init__(self, name: str) -> None:
        self.name = phase_name(name)
        # For each `with` block that has begun but not yet ended: its thread, and its span if it is recorded.
        self._begun: list[tuple[int, Span | None]] = []

    def __enter__(self) -> phase:
        if spans is not None and not is_compiling():
            self._begun.append((get_ident(), spans.begin(self.name)))
        return self

    def __exit__(self, error: type[BaseException] | None = None, *_: object) -> None:
        span = self._take() if self._begun and not is_compiling() else None
        if span is not None and spans is not None:
            spans.end(span, error)

    def _take(self) -> Span | None:
        """Remove the last block that this thread has begun, and return its span.

        If this thread has begun none, take the last block of any thread, because a generator can begin a
        block in one thread and end it in another.
        """
        begun = [*self._begun]
        thread = get_ident()
        mine = [block for block in begun if block[0] == thread]
        for block in reversed(mine or begun):
            with contextlib.suppress(ValueError):  # another thread has just removed it
                self._begun.remove(block)
                return block[1]
        return None

    def __call__(self, function: F) -> F:
        """Wrap a function, static method or class method, so that each of its calls is recorded as the phase.

        Raises `CaseError` for a class, and for a function that is async or a generator.
        """
        if isinstance(function, staticmethod | classmethod):
            return type(function)(self(function.__func__))
        if isinstance(function, type):
            raise CaseError(f"phase({self.name!r}): {function.__qualname__} is a class: mark its methods")
        why = why_not_timed(function)
        if why:
            raise CaseError(f"phase({self.name!r}): {function.__qualname__} {why}")
        return watched(function, self.name)


def why_not_timed(function: Any) -> str | None:
    """Return why a function's calls cannot be timed, or None if they can be."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if not any(is_kind(function) for is_kind in kinds):
        return None
    return (
        "is a generator or async function: calling it only begins the work. Name the function that waits for "
        "the work, or put `with perfsuite.phase(...)` around the code that waits"
    )


def watched(function: F, name: str, *, is_event: bool = False, is_wait: bool = False) -> F:
    """Wrap a function so that each of its calls is a span of this name (see `Spans.begin`)."""

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        recorder = None if is_compiling() else spans  # keep `spans`: it can be None when the call ends
        span = None if recorder is None else recorder.begin(name, is_event=is_event, is_wait=is_wait)
        if recorder is None or span is None:
            return function(*args, **kwargs)
        error: type[BaseException] | None = None
        try:
            return function(*args, **kwargs)
        except BaseException as raised:
            error = type(raised)
            raise
        finally:
            recorder.end(span, error)

    return watched  # type: ignore[return-value]


class NamedPhase(NamedFunction):
    """A function that a case names as `module:name`. Its calls are a phase."""

    def __init__(self, phase: str, function: str) -> None:
        super().__init__(function, self._timed)
        self._phase = phase
        self._why_not_timed: str | None = None

    def check_name(self) -> None:
        """Raise `MismatchError` if the function cannot be timed, or does not exist in its imported module.

        A module that is not imported yet is not an error, because it might be imported later. Whether any
        rank calls the function is known only when the run ends.
        """
        why = self._why_not_timed or (self.why_not_found() if self.is_imported else None)
        if why is not None:
            advice = "" if self._why_not_timed else ". Name a function or method that the script calls"
            raise MismatchError(f"phases={{{self._phase!r}: {self.name!r}}}: {why}{advice}")

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self._why_not_timed = why_not_timed(function)
        return watched(function, self._phase)
