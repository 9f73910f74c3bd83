"""What other packages add to perfsuite by entry points (docs/develop/extending.md), found by name.

Nothing of another package is imported before its name is asked for; if that fails, the error names it.
"""

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from perfsuite.errors import ExtensionError

Group = Literal["perfsuite.frameworks", "perfsuite.metrics", "perfsuite.launchers"]
FRAMEWORKS: Group = "perfsuite.frameworks"
METRICS: Group = "perfsuite.metrics"
LAUNCHERS: Group = "perfsuite.launchers"
GROUPS: tuple[Group, ...] = (FRAMEWORKS, METRICS, LAUNCHERS)
BUILT_IN_LAUNCHERS = frozenset({"local", "slurm"})  # names that no other package may give to a launcher


@dataclass(frozen=True)
class Extension:
    """One entry point of one installed package."""

    group: Group
    name: str
    package: str  # the distribution's name, as pip installs it
    version: str
    entry_point: EntryPoint

    def __str__(self) -> str:
        return f"{self.name} = {self.entry_point.value!r} of {self.package} {self.version} ({self.group})"

    def load(self) -> Any:
        """Import the object. Raises `ExtensionError` naming the package if that fails."""
        try:
            return self.entry_point.load()
        except Exception as error:
            raise ExtensionError(
                f"{self} cannot be imported: {type(error).__name__}: {error}. "
                f"Mend it (pip install --upgrade {self.package}) or remove it (pip uninstall {self.package})."
            ) from error

    def error(self, problem: str) -> ExtensionError:
        """The error that says why the loaded object cannot be used."""
        return ExtensionError(f"{self}: {problem}, or remove it (pip uninstall {self.package}).")


@functools.cache
def installed(group: Group) -> tuple[Extension, ...]:
    """Every extension of a group, sorted by name; none of them is imported. Read once per process."""
    extensions = []
    for each in entry_points(group=group):
        assert each.dist is not None  # it was found in a distribution
        extensions.append(Extension(group, each.name, each.dist.name, each.dist.version, each))
    return tuple(sorted(extensions, key=lambda each: (each.name, each.package)))


def find(group: Group, name: str, *, built_in: Collection[str] = ()) -> Extension | None:
    """The extension of that name, or None. Raises `ExtensionError` if its name is taken."""
    same = [each for each in installed(group) if each.name == name]
    if same and name in built_in:
        raise _taken("perfsuite itself", same[-1])
    if len(same) > 1:
        raise _taken(f"{same[0].package} {same[0].version}", same[-1])
    return same[0] if same else None


def names(group: Group, *, built_in: Collection[str] = ()) -> list[str]:
    """Every name of a group, sorted: those built in, and those of other packages."""
    return sorted({*built_in, *(each.name for each in installed(group))})


def problems(group: Group, built_in: Collection[str], load: Callable[[Extension], object]) -> list[str]:
    """What is wrong with the extensions of a group, one message each; imports them all by `load`."""
    messages = []
    for name in sorted({each.name for each in installed(group)}):
        try:
            if (extension := find(group, name, built_in=built_in)) is not None:
                load(extension)
        except ExtensionError as error:
            messages.append(str(error))
    return messages


def _taken(first: str, second: Extension) -> ExtensionError:
    return ExtensionError(
        f"the name {second.name!r} ({second.group}) is taken twice: by {first}, and by {second.package} "
        f"{second.version} ({second.entry_point.value}). Remove one (pip uninstall {second.package}), "
        "or have it choose another name."
    )
