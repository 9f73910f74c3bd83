"""The timer of a rank that trains nothing (`perfsuite.frameworks.fake`): time is simulated."""

from __future__ import annotations


class SimulatedTimer:
    """A clock that stands still unless it is moved. It sleeps by moving."""

    name = "simulated"

    def __init__(self) -> None:
        self.now = 0.0

    def stamp(self) -> float:
        """Now, simulated."""
        return self.now

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start

    def settle(self) -> None:
        """Nothing to wait for."""

    def is_past(self, mark: float) -> bool:
        """Always."""
        return True

    def since(self, start: float) -> float | None:
        """The difference to now."""
        return self.now - start

    def host(self) -> float:
        """Now, simulated."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move on."""
        self.now += seconds
