"""Tracks the optimizers that step in a process, and which of them is the clock. Imports no torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")
TOLD = 6  # optimizers that a message names; the others it counts


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
        self._by_id: dict[int, Stepping] = {}
        self._clocks: list[Stepping] = []  # those that together are the clock, the one that steps now last
        self._there: weakref.WeakSet[Any] = weakref.WeakSet()  # built when the clock began
        self._in_turn: list[Stepping] = []  # of them: the clock, once they step twice in a row
        self._ticks = 0  # steps of the clock

    def takes_turn(self, optimizer: Any) -> bool:
        """Whether the step that `optimizer` is about to make is one of the clock's."""
        stepping = self._of(optimizer)
        if stepping in self._in_turn and stepping.at[-1:] == [self._ticks]:  # twice in a row
            self._in_turn.remove(stepping)
            self._clocks.append(stepping)
        return self.is_clock(optimizer)

    def is_clock(self, optimizer: Any) -> bool:
        """Whether the steps of `optimizer` are those that are timed."""
        stepping = self._of(optimizer)
        if stepping not in self._clocks:
            return False
        if stepping is not self._clocks[-1]:
            if self._clocks[-1].steps < 2:  # both step in turn: the new one is no successor
                self._clocks.pop()
            self._clocks.remove(stepping)
            self._clocks.append(stepping)
        return True

    def count(self, optimizer: Any) -> None:
        """Count a step of `optimizer`."""
        stepping = self._of(optimizer)
        self._ticks += stepping in self._clocks
        stepping.steps += 1
        stepping.at.append(self._ticks)

    def begin(self, there: Iterable[Any] = ()) -> None:
        """Begin with the clock's first step, as `notes` do; `there`: all optimizers built so far."""
        self._there.update(there)
        for each in self.seen:
            each.at.clear()

    def notes(self) -> tuple[str, ...]:
        """Return which optimizers step at another rate than the clock, after the clock's last step."""
        if not self._clocks:
            return ()
        intervals = sum(len(each.at) for each in self._clocks) - 1
        return tuple(
            f"{each.name} stepped {each.rate(intervals):.3g} times for each step of the clock, {self.name}: "
            "name another optimizer with Script(clock=...)"
            for each in self.seen
            if each not in self._clocks and each.at and abs(len(each.at) - intervals) > 1
        )

    @property
    def name(self) -> str:
        """The clock's name: that of the first optimizer that was it."""
        return next(each.name for each in self.seen if each in self._clocks)

    def summary(self) -> str:
        """Return which optimizers stepped and how often, for a message."""
        steps = ", ".join(f"{each.name} ({each.steps} steps)" for each in self.seen[:TOLD])
        more = f" and {len(self.seen) - TOLD} more" if len(self.seen) > TOLD else ""
        return f"Those that stepped: {steps}{more}" if steps else "None of torch stepped"

    def _of(self, optimizer: Any) -> Stepping:
        known = self._by_id.get(id(optimizer))
        if known is not None and known.optimizer() is optimizer:
            return known
        kind = type(optimizer).__name__
        number = 1 + sum(each.kind == kind for each in self.seen)
        new = Stepping(optimizer, kind, number)
        self.seen.append(new)
        self._by_id[id(optimizer)] = new
        if self._clocks:
            clock = self._clocks[-1]
            both = new.parameters & clock.parameters
            if kind == clock.kind and both and both in (new.parameters, clock.parameters):
                (self._in_turn if optimizer in self._there else self._clocks).append(new)
        elif self.wanted in (None, f"{kind}:{number}", new.name):
            self._clocks.append(new)
        return new


class Stepping:
    """One optimizer that steps: `number` is its place among those of its class, from 1."""

    def __init__(self, optimizer: Any, kind: str, number: int) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.kind = kind
        self.name = kind if number == 1 else f"{kind}:{number}"
        # Their identities: what observes the training keeps those of the clock alive.
        self.parameters = set(map(id, parameters_of(optimizer)))
        self.steps = 0
        self.at: list[int] = []  # after how many steps of the clock, for each step since that began

    def rate(self, intervals: int) -> float:
        """Return its steps for each step of the clock, from its first to its last in so many `intervals`."""
        first, last, steps = self.at[0], self.at[-1], len(self.at)
        return (steps - self.at.count(last)) / (last - first) if last > first else steps / max(intervals, 1)


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
