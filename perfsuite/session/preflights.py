"""The preflights of a session: which of its nodes are bad."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from perfsuite.case import torch_build
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.frameworks.base import framework_of
from perfsuite.launch.preflight import preflight
from perfsuite.report.terminal import preflight_text
from perfsuite.results.session_file import Preflight
from perfsuite.session.setup import Setup


@dataclass
class Preflights:
    """Looks at several nodes before the first case on them, by the torch of this environment."""

    setup: Setup
    new_directory: Callable[[], Path]
    save: Callable[[], None]  # writes what the session knows so far
    made: list[Preflight] = field(default_factory=list)
    # What is wrong with each node that two preflights in a row found bad, by its number from 0 on.
    _bad: dict[int, str] = field(default_factory=dict)

    def problems(self, case: Case, machine: Machine) -> tuple[str, ...]:
        """What is wrong with the nodes that a case would use; none for one that trains nothing."""
        nodes = case.topology.nodes
        if nodes == 1 or not self.setup.options.preflight or not torch_build.installed():
            return ()
        if not framework_of(case).plan(case).needs_torch:
            return ()
        known = {(len(each.nodes), each.machine.device) for each in self.made}
        if min(self._bad, default=nodes) >= nodes and (nodes, machine.device) not in known:
            self._look(nodes, machine)
        return tuple(self._bad[node] for node in sorted(self._bad) if node < nodes)

    def _look(self, nodes: int, machine: Machine) -> None:
        """Have a preflight of the first nodes, and another if it finds a bad node: others may disturb it."""
        first = self._preflight(nodes, machine)
        if not first.problems:
            return
        self.setup.progress.say(
            "what a preflight finds wrong counts if a second one finds that node bad, too"
        )
        second = self._preflight(nodes, machine)
        for number, (before, now) in enumerate(zip(first.nodes, second.nodes, strict=True)):
            if before.problems and now.problems:
                self._bad[number] = f"{now.name}, by two preflights: {'; '.join(now.problems)}"

    def _preflight(self, nodes: int, machine: Machine) -> Preflight:
        self.save()
        self.setup.progress.waiting(f"preflight of {nodes} nodes")
        launcher, allocation = self.setup.host.launcher, self.setup.host.machine.allocation
        names = [node.name for node in allocation.nodes[:nodes]] if allocation else []
        found = preflight(launcher, machine, nodes, self.new_directory(), names=names)
        self.made.append(found)
        self.save()
        self.setup.progress.say(preflight_text(found))
        return found
