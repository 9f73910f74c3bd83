"""What a session and a launch say to each other. Imports neither torch nor pytest."""

from __future__ import annotations

from typing import Protocol

from perfsuite.case.case import Unit


class Listener(Protocol):
    """Follows a session of launches: the session calls these methods, whoever shows its progress has them."""

    def begin(self, case_id: str, total_steps: int, launch: int, unit: Unit = "tokens") -> None:
        """Launch number `launch` of a case begins; its speed is shown in `unit` per second."""

    def step(self, step: int, tokens_per_step: int) -> None:
        """Rank 0 has finished `step` steps (0: it is still starting). Called many times a second."""

    def say(self, text: str) -> None:
        """Print a line that stays."""

    def waiting(self, text: str | None) -> None:
        """Show what the session waits for now; None when it waits no longer."""

    def end(self, outcome: str) -> None:
        """The case has its verdict."""
