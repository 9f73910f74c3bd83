"""Finds the launcher that a session starts its jobs with. Driver side; imports neither torch nor pytest."""

import os

from perfsuite import extensions
from perfsuite.errors import CaseError
from perfsuite.extensions import BUILT_IN_LAUNCHERS, LAUNCHERS
from perfsuite.launch.base import Launcher
from perfsuite.launch.local import LocalLauncher
from perfsuite.launch.slurm.launcher import JOB_ID, SlurmLauncher


def usual() -> str:
    """Return the launcher that is used where none is asked for: Slurm's in an allocation of several nodes."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    is_several = nodes.isdigit() and int(nodes) > 1
    return SlurmLauncher.name if JOB_ID in os.environ and is_several else LocalLauncher.name


def launcher(name: str | None = None) -> Launcher:
    """Return the launcher of that name, or the usual one.

    Raises `CaseError` for a name that nobody has, `ExtensionError` for a package's that cannot be used, and
    `MachineError` for one that cannot work here.
    """
    name = name or usual()
    for built_in in (LocalLauncher, SlurmLauncher):
        if name == built_in.name:
            return built_in()
    extension = extensions.find(LAUNCHERS, name, built_in=BUILT_IN_LAUNCHERS)
    if extension is None:
        known = ", ".join(extensions.names(LAUNCHERS, built_in=BUILT_IN_LAUNCHERS))
        raise CaseError(f"there is no launcher {name!r}; known are {known}")
    made: Launcher = extension.load()()
    return made
