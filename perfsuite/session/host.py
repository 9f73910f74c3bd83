"""The machines that cases run on, real or pretended. Imports neither torch nor pytest."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.dry import limits
from perfsuite.dry.machine import Device, pretended
from perfsuite.errors import CaseError, MachineError
from perfsuite.launch.base import Launcher
from perfsuite.launch.local import LocalLauncher
from perfsuite.launch.requirements import unsupported, wrong_torch
from perfsuite.node.machine import detect_cpu
from perfsuite.results.store import STORE


class Host:
    """The machine or nodes that cases are launched on, and which cases they can run.

    Every node must see the directory `shared`.
    """

    def __init__(self, launcher: Launcher | None = None, shared: Path = STORE) -> None:
        self.launcher = launcher or LocalLauncher()
        self._shared = shared

    @cached_property
    def machine(self) -> Machine:
        """Each node with its GPUs, if it has any. Looked at once, and only if something is measured."""
        return self.launcher.machine(self._shared)

    @cached_property
    def _without_gpus(self) -> Machine:
        return detect_cpu("a case meant for cpu")

    def machine_for(self, case: Case) -> Machine:
        """The machine that `case` runs on: one with GPUs is a CPU machine, too, for a case meant for that."""
        if "cpu" in case.hardware and all(self.machine.why_not(hardware) for hardware in case.hardware):
            return self._without_gpus
        return self.machine.for_nodes(case.topology.nodes)

    def why_not(self, case: Case) -> str | None:
        """Why this machine cannot run `case`, or None.

        Raises `CaseError` where the machine could, but the installed torch cannot use its GPUs.
        """
        machine = self.machine_for(case)
        reason = unsupported(case, machine)
        if reason is None and (problem := wrong_torch(case, machine)) is not None:
            raise CaseError(problem)
        return reason


class DryHost(Host):
    """The machines that dry runs pretend, and which cases can be run dry on them."""

    def __init__(self, device: Device | None = None) -> None:
        super().__init__()
        self.device = device

    @cached_property
    def machine(self) -> Machine:
        """This machine. A dry run needs nothing of it: one that could not be measured on will do."""
        try:
            return self.launcher.machine(self._shared)
        except MachineError as error:
            return detect_cpu(str(error))

    def machine_for(self, case: Case) -> Machine:
        """The machine that is pretended for `case`."""
        return pretended(case, self.device)[0]

    def why_not(self, case: Case) -> str | None:
        """Why `case` cannot be run dry, or None."""
        return limits.why_not(case, self.machine_for(case))
