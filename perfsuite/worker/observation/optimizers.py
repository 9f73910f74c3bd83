"""Track the optimizers that step in a process, and decide which of them is the clock. Imports no torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from perfsuite.worker.observation.frozen import unfrozen

T = TypeVar("T")
MOST_NAMED = 6  # maximum number of optimizers that a message names. The others are only counted


@dataclass(eq=False)
class Stepping:
    """One optimizer that steps."""

    kind: str  # name of the class
    name: str  # name of the class, with a number (`AdamW:2`) unless this is the first optimizer of the class
    # Ids of the parameters. The observer keeps the clock's parameters alive, so their ids are not reused.
    parameters: set[int]
    optimizer: Callable[[], Any]  # a weak reference to the optimizer
    is_clock: bool = False
    # Whether this optimizer already existed when the clock began. If it did, it becomes the clock only if it
    # steps twice in a row.
    in_turn: bool = False
    steps: int = 0
    steps_since: int = 0  # number of steps since the clock's first step began
    tick: int | None = None  # number of steps that the clock had taken when this optimizer last stepped

    def follows(self, clock: Stepping) -> bool:
        """Return whether this optimizer might replace `clock`, because the script has rebuilt its optimizer.

        This requires that both have the same class, and that one of the two has all parameters of the other.
        """
        both = self.parameters & clock.parameters
        return self.kind == clock.kind and bool(both) and both in (self.parameters, clock.parameters)


class Optimizers:
    """The optimizers that step, in order. One of them is the clock: the first one, or the `wanted` one.

    `wanted` is the name of a class, optionally with a number: `AdamW:2` is the second optimizer of that
    class.

    A script can rebuild the optimizer that is the clock. A new optimizer replaces the old one as the clock if
    both have the same class, and if one of the two has all parameters of the other. If each of the two has
    parameters that the other does not have, they are assumed to step in turn, and the old one remains the
    clock. An optimizer that already existed when the clock began might alternate with the clock. It becomes
    the clock only if it steps twice in a row.
    """

    def __init__(self, wanted: str | None = None) -> None:
        self.wanted = wanted
        self.seen: list[Stepping] = []
        self._living: weakref.WeakKeyDictionary[Any, Stepping] = weakref.WeakKeyDictionary()
        self._clock: Stepping | None = None  # the current clock
        self._ticks = 0  # number of steps of the clock
        self._there: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers built before the clock began

    def takes_turn(self, optimizer: Any) -> bool:
        """Return whether the step that `optimizer` is about to take is a step of the clock."""
        stepping = self._of(optimizer)
        if stepping.in_turn and stepping.tick == self._ticks:  # this optimizer steps twice in a row
            stepping.is_clock = True
            self._clock = stepping
        if stepping.is_clock and self._clock is not None and stepping is not self._clock:
            if self._clock.steps < 2:  # the two alternate, and only one of them can be the clock
                self._clock.is_clock = False
            self._clock = stepping
        return stepping.is_clock

    def count(self, optimizer: Any) -> bool:
        """Count a step that `optimizer` has taken. Return whether this was a step of the clock."""
        stepping = self._of(optimizer)
        self._ticks += stepping.is_clock
        stepping.steps += 1
        stepping.steps_since += 1
        stepping.tick = self._ticks
        return stepping.is_clock

    def is_clock(self, optimizer: Any) -> bool:
        """Return whether the steps of `optimizer` are steps of the clock.

        An optimizer that has never stepped might be a wrapper of the clock. It is regarded as one if it has
        any of the clock's parameters.
        """
        stepping = self._living.get(optimizer)
        if stepping is not None:
            return stepping.is_clock
        parameters = set(map(id, parameters_of(optimizer)))
        return self._clock is not None and not parameters.isdisjoint(self._clock.parameters)

    def begin(self, there: Iterable[Any] = ()) -> None:
        """Start the step counts that `notes` uses.

        Call this at the clock's first step. The argument `there` contains all optimizers that exist already.
        """
        self._there.update(there)
        for optimizer in self.seen:
            optimizer.steps_since = 0

    def notes(self) -> tuple[str, ...]:
        """Return notes on the other optimizers that stepped since `begin`. Call this at the end."""
        clocks = [stepping for stepping in self.seen if stepping.is_clock]
        if not clocks:
            return ()
        clock = clocks[0].name
        ticks = sum(each.steps_since for each in clocks)
        parameters = set[int]().union(*(each.parameters for each in clocks))
        others = [each for each in self.seen if each.steps_since and not each.is_clock]
        rates = [
            f"{other.name} took {other.steps_since} steps in {ticks} training steps. Each step of {clock} "
            "ends a training step. If another optimizer should end it, give Script(clock=...)"
            for other in others
            if abs(other.steps_since - ticks) > 1
        ]
        unobserved = ", ".join(other.name for other in others[:MOST_NAMED] if other.parameters - parameters)
        if not unobserved:
            return tuple(rates)
        return (*rates, f"dtypes and gradients are checked for {clock}, but not for {unobserved}")

    def summary(self) -> str:
        """Return a sentence for a message: the optimizers that stepped, with their numbers of steps."""
        steps = ", ".join(f"{stepping.name} ({stepping.steps} steps)" for stepping in self.seen[:MOST_NAMED])
        more = f" and {len(self.seen) - MOST_NAMED} more" if len(self.seen) > MOST_NAMED else ""
        return f"Optimizers that stepped: {steps}{more}" if steps else "No torch optimizer stepped"

    def _of(self, optimizer: Any) -> Stepping:
        if optimizer not in self._living:
            kind = type(optimizer).__name__
            number = 1 + sum(stepping.kind == kind for stepping in self.seen)
            name = kind if number == 1 else f"{kind}:{number}"
            parameters = set(map(id, parameters_of(optimizer)))
            new = Stepping(kind, name, parameters, weakref.ref(optimizer))
            earlier = self._earlier_like(new)
            if earlier is not None:
                earlier.optimizer = new.optimizer
                self._living[optimizer] = earlier
                return earlier
            self._living[optimizer] = new
            self.seen.append(new)
            if self._clock is None:
                new.is_clock = self.wanted in (None, f"{kind}:{number}", name)
            elif new.follows(self._clock):
                new.in_turn = optimizer in self._there
                new.is_clock = not new.in_turn
            if new.is_clock:
                self._clock = new
        return self._living[optimizer]

    def _earlier_like(self, new: Stepping) -> Stepping | None:
        """Return the entry of an earlier, freed optimizer of this kind, or None if there is none.

        A script can build an inner optimizer in every step, as in meta-learning. All of these optimizers
        share one entry. An optimizer that might be the clock has an entry of its own.
        """
        if self._clock is None or new.follows(self._clock):
            return None
        for old in self.seen:
            if old.kind == new.kind and not (old.is_clock or old.in_turn) and old.optimizer() is None:
                return old
        return None


def parameters_of(*optimizers: Any) -> list[Any]:
    """Return all parameters of these optimizers. An optimizer without `param_groups` has none."""
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    return [p for group in groups for p in group["params"]]


def living(kind: type[T]) -> list[T]:
    """Return all living objects of a class. Objects that `gc.freeze` hides are included, and frozen again."""
    with unfrozen(collects=True):
        # `isinstance` would run the `__class__` property of arbitrary objects.
        return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
