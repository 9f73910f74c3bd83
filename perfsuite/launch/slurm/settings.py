"""What a repository or the environment settles for Slurm. Imports neither torch nor pytest."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perfsuite.ini import Ini, read_ini, split
from perfsuite.results.store import STORE

PREFIX = "perf_slurm_"
ENVIRONMENT = "PERFSUITE_SLURM_"
"""How the names of the environment variables begin that win over a setting."""


def store_of(ini: Ini, arguments: Sequence[str]) -> Path:
    """The local store of a session with these arguments of pytest."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--perf-store", nargs="?")
    given = parser.parse_known_args(arguments)[0].perf_store
    return ini.root / (given or ini.values.get("perf_store") or STORE)


@dataclass(frozen=True)
class Steps:
    """How the steps of an allocation are started where a cluster needs more than `srun` and this Python."""

    srun_options: tuple[str, ...] = ()
    """Further options of `srun`, such as `--container-image=...`. They come last, and so win."""
    python: str | None = None
    """The interpreter on the nodes, as in a container; None: that of this process."""


def steps(directory: Path) -> Steps:
    """The settings for steps: of the environment, else of the ini file of a session in `directory`.

    Raises `CaseError` for a text that a shell could not split, `FileError` as `read_ini` does.
    """
    ini = read_ini(directory)
    variable = f"{ENVIRONMENT}SRUN_OPTIONS"
    given = os.environ.get(variable)
    options = ini.words(f"{PREFIX}srun_options") if given is None else split(variable, given)
    return Steps(tuple(options), os.environ.get(f"{ENVIRONMENT}PYTHON") or ini.text(f"{PREFIX}python"))
