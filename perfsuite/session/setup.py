"""What a session measures with. Imports neither torch nor pytest."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from perfsuite.launch.base import Listener
from perfsuite.launch.local import LocalLauncher
from perfsuite.launch.lock import MachineLock
from perfsuite.launch.quiet import Neighbours
from perfsuite.measure import Launching
from perfsuite.results.store import BaselineStore, Store
from perfsuite.session.host import Host
from perfsuite.session.options import Options


@dataclass
class Setup:
    """What a session measures with: its options, its machine and who else uses it, and its baselines."""

    options: Options
    listener: Listener
    host: Host = field(default_factory=Host)

    @cached_property
    def store(self) -> Store:
        """The local store."""
        return Store(self.options.store)

    @cached_property
    def baselines(self) -> BaselineStore:
        """Reviewed baselines, and those that this machine has recorded."""
        return BaselineStore(self.options.baselines, self.store.baselines)

    @cached_property
    def lock(self) -> MachineLock:
        """Lets one session at a time measure on these nodes."""
        return MachineLock(self.host.launcher.lock)

    def take_lock(self) -> None:
        """Wait until no other session measures on these nodes. Raises `BusyError` where nobody is to wait."""
        self.lock.take(self.listener.say, wait=not self.options.fail_if_busy)

    @cached_property
    def neighbours(self) -> Neighbours | None:
        """Who else uses this machine; None where launches are on others."""
        if self.host.launcher.name != LocalLauncher.name:
            return None
        say, show = self.listener.say, self.listener.waiting
        return Neighbours(say=say, show=show, most_s=self.options.wait_quiet_s)

    @property
    def launching(self) -> Launching:
        """How this session launches."""
        return Launching(
            launcher=self.host.launcher,
            inject=self.options.inject,
            counts=self.options.counts,
            neighbours=self.neighbours,
            when_shared=self.options.when_shared,
            on_launch=lambda case, number: self.listener.begin(case.id, case.total_steps, number, case.unit),
            on_progress=self.listener.step,
        )
