"""Find the launcher with which a session starts its jobs. Driver side; imports neither torch nor pytest."""

import os

from perfsuite import extensions
from perfsuite.errors import CaseError
from perfsuite.extensions import LAUNCHERS
from perfsuite.launch.base import Launcher

LOCAL = "local"
SLURM = "slurm"


def usual() -> str:
    """Return the default launcher: Slurm's in an allocation of several nodes, otherwise the local one."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    is_several = nodes.isdigit() and int(nodes) > 1
    return SLURM if "SLURM_JOB_ID" in os.environ and is_several else LOCAL


def launcher(name: str | None = None) -> Launcher:
    """Return the launcher with this name, or the default one.

    Raises `CaseError` for an unknown name, `ExtensionError` for a package's launcher that cannot be used, and
    `MachineError` for one that cannot work here.
    """
    name = name or usual()
    extension = extensions.find(LAUNCHERS, name)
    if extension is None:
        known = ", ".join(extensions.names(LAUNCHERS))
        raise CaseError(f"there is no launcher {name!r}; known are {known}")
    made: Launcher = extension.load()()
    return made
