"""Tracks the optimizers that step in a process, and which of them is the clock. Imports no torch."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
TOLD = 6  # optimizers that a message names; the others it counts


@dataclass(eq=False)
class Stepping:
    """One optimizer that steps."""

    kind: str  # its class
    number: int  # its place among those of its class, from 1
    steps: int = 0
    steps_since: int = 0  # steps since the clock's first one began

    @property
    def name(self) -> str:
        """Its class, and its number if it is not the first of that class."""
        return self.kind if self.number == 1 else f"{self.kind}:{self.number}"


class Optimizers:
    """The optimizers that step, in order, and which of them is the clock: the first, or the `wanted` one.

    `wanted` is the name of a class, or with a number, as in `AdamW:2`, the second of that class.
    """

    def __init__(self, wanted: str | None = None) -> None:
        self.wanted = wanted
        self.seen: list[Stepping] = []
        self._living: weakref.WeakKeyDictionary[Any, Stepping] = weakref.WeakKeyDictionary()
        self._clock: Stepping | None = None

    def is_clock(self, optimizer: Any) -> bool:
        """Whether the steps of `optimizer` are those that are timed."""
        return self._of(optimizer) is self._clock

    def count(self, optimizer: Any) -> None:
        """Count a step of `optimizer`."""
        stepping = self._of(optimizer)
        stepping.steps += 1
        stepping.steps_since += 1

    def begin(self) -> None:
        """Begin with the clock's first step, as `notes` do."""
        for each in self.seen:
            each.steps_since = 0

    def notes(self) -> tuple[str, ...]:
        """Return which optimizers step at another rate than the clock, after the clock's last step."""
        if self._clock is None:
            return ()
        steps = self._clock.steps_since
        return tuple(
            f"{each.name} made {each.steps_since} steps in {steps} of the clock, {self._clock.name}: "
            "name another optimizer with Script(clock=...)"
            for each in self.seen
            if each.steps_since and abs(each.steps_since - steps) > 1
        )

    def summary(self) -> str:
        """Return which optimizers stepped and how often, for a message."""
        steps = ", ".join(f"{each.name} ({each.steps} steps)" for each in self.seen[:TOLD])
        more = f" and {len(self.seen) - TOLD} more" if len(self.seen) > TOLD else ""
        return f"Those that stepped: {steps}{more}" if steps else "None of torch stepped"

    def _of(self, optimizer: Any) -> Stepping:
        if optimizer not in self._living:
            kind = type(optimizer).__name__
            new = Stepping(kind, number=1 + sum(each.kind == kind for each in self.seen))
            self.seen.append(new)
            self._living[optimizer] = new
            if self._clock is None and self.wanted in (None, f"{kind}:{new.number}", new.name):
                self._clock = new
        return self._living[optimizer]


def parameters_of(*optimizers: Any) -> list[Any]:
    """Return all that these optimizers step; nothing of one that lists no parameters."""
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    return [p for group in groups for p in group["params"]]


def living(kind: type[T]) -> list[T]:
    """Return every living object of a class, also those that `gc.freeze` hides; these are frozen again."""
    is_frozen = gc.get_freeze_count() > 0
    if is_frozen:
        gc.unfreeze()
    # `type`: `isinstance` would run the `__class__` of whatever there is.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
    if is_frozen:
        gc.collect()  # or garbage would stay for ever
        gc.freeze()
    return found
