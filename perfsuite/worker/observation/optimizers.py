"""Tracks the optimizers that step in a process, and which of them is the clock. Imports no torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from perfsuite.worker.observation.frozen import unfrozen

T = TypeVar("T")
TOLD = 6  # optimizers that a message names; the others it counts


@dataclass(eq=False)
class Stepping:
    """One optimizer that steps."""

    kind: str  # its class
    name: str  # its class, and its number, from 1, if it is not the first of that class
    parameters: set[int]  # their identities: what observes the training keeps those of the clock alive
    is_clock: bool = False
    in_turn: bool = False  # it was there when the clock began: the clock, once it steps twice in a row
    steps: int = 0
    steps_since: int = 0  # steps since the clock's first one began
    tick: int | None = None  # steps of the clock when it stepped last

    def follows(self, clock: Stepping) -> bool:
        """Whether it may be what a script has built anew: the same, or more or fewer parameters."""
        both = self.parameters & clock.parameters
        return self.kind == clock.kind and bool(both) and both in (self.parameters, clock.parameters)


class Optimizers:
    """The optimizers that step, in order, and which of them is the clock: the first, or the `wanted` one.

    `wanted` is the name of a class, or with a number, as in `AdamW:2`, the second of that class. A new one of
    the clock's class goes on as the clock, as the script has built it anew, if it steps the same parameters,
    some of them, or more. (If each has some of its own, they share a part and step in turn.) One that was
    there when the clock began may step in turn with it: it goes on as the clock from its second step in a
    row.
    """

    def __init__(self, wanted: str | None = None) -> None:
        self.wanted = wanted
        self.seen: list[Stepping] = []
        self._living: weakref.WeakKeyDictionary[Any, Stepping] = weakref.WeakKeyDictionary()
        self._clock: Stepping | None = None  # the one that is it now
        self._ticks = 0  # steps of the clock
        self._there: weakref.WeakSet[Any] = weakref.WeakSet()  # built when the clock began

    def takes_turn(self, optimizer: Any) -> bool:
        """Whether the step that `optimizer` is about to make is one of the clock's, which is timed."""
        stepping = self._of(optimizer)
        if stepping.in_turn and stepping.tick == self._ticks:  # twice in a row
            stepping.is_clock = True
            self._clock = stepping
        if stepping.is_clock and self._clock is not None and stepping is not self._clock:
            if self._clock.steps < 2:  # both step in turn: the new one is no successor
                self._clock.is_clock = False
            self._clock = stepping
        return stepping.is_clock

    def count(self, optimizer: Any) -> bool:
        """Count a step that `optimizer` has made. Returns whether it was one of the clock's."""
        stepping = self._of(optimizer)
        self._ticks += stepping.is_clock
        stepping.steps += 1
        stepping.steps_since += 1
        stepping.tick = self._ticks
        return stepping.is_clock

    def begin(self, there: Iterable[Any] = ()) -> None:
        """Begin with the clock's first step, as `notes` do; `there`: all optimizers built so far."""
        self._there.update(there)
        for each in self.seen:
            each.steps_since = 0

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
        steps = ", ".join(f"{each.name} ({each.steps} steps)" for each in self.seen[:TOLD])
        more = f" and {len(self.seen) - TOLD} more" if len(self.seen) > TOLD else ""
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
    """Return all that these optimizers step; nothing of one that lists no parameters."""
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    return [p for group in groups for p in group["params"]]


def living(kind: type[T]) -> list[T]:
    """Return every living object of a class, also those that `gc.freeze` hides; these are frozen again."""
    with unfrozen(collects=True):
        # `type`: `isinstance` would run the `__class__` of whatever there is.
        return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
