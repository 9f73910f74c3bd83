"""Tracks the optimizers that step in a process, and which of them is the clock. Worker side."""

from __future__ import annotations

import weakref
from typing import Any


class Optimizers:
    """The optimizers that step, in order, and which of them is the clock: the first, or the `wanted` one.

    `wanted` is the name of a class, or with a number, as in `AdamW:2`, the second of that class.
    """

    def __init__(self, wanted: str | None = None) -> None:
        self.wanted = wanted
        self.seen: list[Stepping] = []
        self._by_id: dict[int, Stepping] = {}
        self._clock: Stepping | None = None

    def is_clock(self, optimizer: Any) -> bool:
        """Whether the steps of `optimizer` are those that are timed."""
        return self._of(optimizer) is self._clock

    def count(self, optimizer: Any) -> None:
        """Count a step of `optimizer`."""
        self._of(optimizer).steps += 1

    def begin(self) -> None:
        """Begin with the clock's first step: `notes` compares only steps from here on."""
        for each in self.seen:
            each.steps_before = each.steps

    def notes(self) -> tuple[str, ...]:
        """Return which optimizers step at another rate than the clock, after the clock's last step."""
        if self._clock is None:
            return ()
        name, intervals = self._clock.name, self._clock.measured - 1
        return tuple(
            f"{each.name} stepped {each.measured / intervals:.3g} times for each step of the clock, {name}: "
            "name another optimizer with Script(clock=...)"
            for each in self.seen
            if each.measured and abs(each.measured - intervals) > 1
        )

    def summary(self) -> str:
        """Return which optimizers stepped and how often, for a message."""
        steps = ", ".join(f"{each.name} ({each.steps} steps)" for each in self.seen)
        return f"Those that did: {steps}" if steps else "None of torch did"

    def _of(self, optimizer: Any) -> Stepping:
        known = self._by_id.get(id(optimizer))
        if known is not None and known.optimizer() is optimizer:
            return known
        kind = type(optimizer).__name__
        number = 1 + sum(each.kind == kind for each in self.seen)
        new = Stepping(weakref.ref(optimizer), kind, number)
        self.seen.append(new)
        self._by_id[id(optimizer)] = new
        if self._clock is None and self.wanted in (None, f"{kind}:{number}", new.name):
            self._clock = new
        return new


class Stepping:
    """One optimizer that steps: `number` is its place among those of its class, from 1."""

    def __init__(self, optimizer: weakref.ref[Any], kind: str, number: int) -> None:
        self.optimizer = optimizer
        self.kind = kind
        self.name = kind if number == 1 else f"{kind}:{number}"
        self.steps = self.steps_before = 0

    @property
    def measured(self) -> int:
        """Steps since the clock began."""
        return self.steps - self.steps_before
