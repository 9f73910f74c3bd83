"""Track which optimizers step in a process, and which of them is the clock. Imports no torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from perfsuite.worker.observation.frozen import unfrozen

T = TypeVar("T")
MOST_NAMED = 6  # number of optimizers that a message names; it counts the others


@dataclass(eq=False)
class Stepping:
    """One optimizer that steps."""

    kind: str  # its class
    name: str  # its class, plus its number (from 1) if it is not the first of that class
    parameters: set[int]  # their ids; the observer keeps the clock's parameters alive
    is_clock: bool = False
    # Whether it existed when the clock began; if so, it becomes the clock when it steps twice in a row.
    in_turn: bool = False
    steps: int = 0
    steps_since: int = 0  # steps since the clock's first one began
    tick: int | None = None  # number of the clock's steps when it stepped last

    def follows(self, clock: Stepping) -> bool:
        """Return whether this may be `clock`, built again with the same, more or fewer parameters."""
        both = self.parameters & clock.parameters
        return self.kind == clock.kind and bool(both) and both in (self.parameters, clock.parameters)


class Optimizers:
    """The optimizers that step, in order, and which of them is the clock: the first, or the `wanted` one.

    `wanted` is the name of a class, optionally with a number: `AdamW:2` is the second one of that class. If a
    new optimizer of the clock's class steps the same parameters, some of them, or more, the script has
    rebuilt the clock, and the new one becomes the clock. (If each has parameters of its own, they share some
    and step in turn.) An optimizer that existed when the clock began may step in turn with it, so it becomes
    the clock only when it steps twice in a row.
    """

    def __init__(self, wanted: str | None = None) -> None:
        self.wanted = wanted
        self.seen: list[Stepping] = []
        self._living: weakref.WeakKeyDictionary[Any, Stepping] = weakref.WeakKeyDictionary()
        self._clock: Stepping | None = None  # the current clock
        self._ticks = 0  # steps of the clock
        self._there: weakref.WeakSet[Any] = weakref.WeakSet()  # those built before the clock began

    def takes_turn(self, optimizer: Any) -> bool:
        """Return whether the step that `optimizer` is about to make is one of the clock's, which is timed."""
        stepping = self._of(optimizer)
        if stepping.in_turn and stepping.tick == self._ticks:  # twice in a row
            stepping.is_clock = True
            self._clock = stepping
        if stepping.is_clock and self._clock is not None and stepping is not self._clock:
            if self._clock.steps < 2:  # both step in turn, so the new one does not replace it
                self._clock.is_clock = False
            self._clock = stepping
        return stepping.is_clock

    def count(self, optimizer: Any) -> bool:
        """Count a step that `optimizer` has made. Return whether it was one of the clock's."""
        stepping = self._of(optimizer)
        self._ticks += stepping.is_clock
        stepping.steps += 1
        stepping.steps_since += 1
        stepping.tick = self._ticks
        return stepping.is_clock

    def begin(self, there: Iterable[Any] = ()) -> None:
        """Begin with the clock's first step, as `notes` does. `there` are all optimizers built so far."""
        self._there.update(there)
        for optimizer in self.seen:
            optimizer.steps_since = 0

    def notes(self) -> tuple[str, ...]:
        """Return which optimizers step at another rate than the clock, after the clock's last step."""
        clocks = [each for each in self.seen if each.is_clock]
        steps = sum(each.steps_since for each in clocks)
        return tuple(
            f"{each.name} made {each.steps_since} steps in {steps} of the clock, {clocks[0].name}: "
            "name another optimizer with Script(clock=...)"
            for each in self.seen
            if clocks and not each.is_clock and each.steps_since and abs(each.steps_since - steps) > 1
        )

    def summary(self) -> str:
        """Return which optimizers stepped and how often, for a message."""
        steps = ", ".join(f"{each.name} ({each.steps} steps)" for each in self.seen[:MOST_NAMED])
        more = f" and {len(self.seen) - MOST_NAMED} more" if len(self.seen) > MOST_NAMED else ""
        return f"Those that stepped: {steps}{more}" if steps else "None of torch stepped"

    def _of(self, optimizer: Any) -> Stepping:
        if optimizer not in self._living:
            kind = type(optimizer).__name__
            number = 1 + sum(each.kind == kind for each in self.seen)
            name = kind if number == 1 else f"{kind}:{number}"
            new = self._living[optimizer] = Stepping(kind, name, set(map(id, parameters_of(optimizer))))
            self.seen.append(new)
            if self._clock is None:
                new.is_clock = self.wanted in (None, f"{kind}:{number}", name)
            elif new.follows(self._clock):
                new.in_turn = optimizer in self._there
                new.is_clock = not new.in_turn
            if new.is_clock:
                self._clock = new
        return self._living[optimizer]


def parameters_of(*optimizers: Any) -> list[Any]:
    """Return all parameters of these optimizers; none of an optimizer that lists none."""
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    return [p for group in groups for p in group["params"]]


def living(kind: type[T]) -> list[T]:
    """Return every living object of a class. Those hidden by `gc.freeze` are included and frozen again."""
    with unfrozen(collects=True):
        # `isinstance` would run the `__class__` property of arbitrary objects.
        return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
