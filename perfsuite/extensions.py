"""Find extensions of perfsuite in other packages by name, using entry points (docs/develop/extending.md).

perfsuite's own frameworks, launchers and commands are found in the same way. An extension is imported only
when its name is used. If the import fails, the error names the package.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import Any, Literal

from perfsuite.errors import ExtensionError

Group = Literal["perfsuite.commands", "perfsuite.frameworks", "perfsuite.metrics", "perfsuite.launchers"]
COMMANDS: Group = "perfsuite.commands"
FRAMEWORKS: Group = "perfsuite.frameworks"
METRICS: Group = "perfsuite.metrics"
LAUNCHERS: Group = "perfsuite.launchers"
GROUPS: tuple[Group, ...] = (COMMANDS, FRAMEWORKS, METRICS, LAUNCHERS)
PERFSUITE = "perfsuite"  # this package; other packages cannot use the names of its extensions
INSTALL = "install it again (pip install perfsuite, or pip install -e . in its repository)"


@dataclass(frozen=True)
class Extension:
    """One entry point of an installed package."""

    group: Group
    name: str
    package: str  # name of the distribution, as pip installs it
    version: str
    entry_point: EntryPoint

    def __str__(self) -> str:
        return f"{self.name} = {self.entry_point.value!r} of {self.package} {self.version} ({self.group})"

    def load(self) -> Any:
        """Import the object. Raises `ExtensionError` with the name of the package if that fails."""
        try:
            return self.entry_point.load()
        except (Exception, SystemExit) as error:
            raise ExtensionError(
                f"{self} cannot be imported: {type(error).__name__}: {error}. {self._way_out}."
            ) from error

    def error(self, problem: str) -> ExtensionError:
        """Return an error that explains why the loaded object cannot be used."""
        return ExtensionError(f"{self}: {problem}, or remove it (pip uninstall {self.package}).")

    @property
    def _way_out(self) -> str:
        if self.package == PERFSUITE:
            return INSTALL[0].upper() + INSTALL[1:]
        return (
            f"Upgrade it (pip install --upgrade {self.package}) or remove it (pip uninstall {self.package})"
        )


@functools.cache
def own(group: Group) -> Mapping[str, Extension]:
    """Return perfsuite's own extensions in a group, by name. The metadata of other packages is not read.

    A source tree can contain older metadata in addition to the installed metadata. This function uses the
    first metadata of perfsuite that lists a framework. Raises `ExtensionError` if there is none.
    """
    for perfsuite in distributions(name=PERFSUITE):
        if perfsuite.entry_points.select(group=FRAMEWORKS):
            of_group = perfsuite.entry_points.select(group=group)
            return {entry_point.name: _extension(group, perfsuite, entry_point) for entry_point in of_group}
    raise ExtensionError(f"the metadata of perfsuite is missing, or older than its code: {INSTALL}")


@functools.cache
def installed(group: Group) -> tuple[Extension, ...]:
    """Return other packages' extensions in a group, sorted by name, without importing them. Cached."""
    extensions = []
    for entry_point in entry_points(group=group):
        assert entry_point.dist is not None  # it was found in a distribution
        if entry_point.dist.name != PERFSUITE:
            extensions.append(_extension(group, entry_point.dist, entry_point))
    return tuple(sorted(extensions, key=lambda extension: (extension.name, extension.package)))


def _extension(group: Group, package: Distribution, entry_point: EntryPoint) -> Extension:
    return Extension(group, entry_point.name, package.name, package.version, entry_point)


def find(group: Group, name: str, *, reserved: Collection[str] = ()) -> Extension | None:
    """Return the extension of that name, or None.

    If perfsuite itself has the name, other packages are not searched. Raises `ExtensionError` if two other
    packages have the name, or if a package uses a name that is reserved.
    """
    return own(group).get(name) or of_others(group, name, reserved=reserved)


def of_others(group: Group, name: str, *, reserved: Collection[str] = ()) -> Extension | None:
    """Return the extension of that name in another package, or None. Raises the errors of `find`."""
    same = [extension for extension in installed(group) if extension.name == name]
    if same and (name in reserved or name in own(group)):
        raise _taken("perfsuite itself", same[-1])
    if len(same) > 1:
        raise _taken(f"{same[0].package} {same[0].version}", same[-1])
    return same[0] if same else None


def names(group: Group) -> list[str]:
    """Return the names of all extensions in a group, sorted: perfsuite's own, and other packages'."""
    return sorted({*own(group), *(extension.name for extension in installed(group))})


def problems(group: Group, load: Callable[[Extension], object]) -> list[str]:
    """Import all extensions of other packages with `load`. Return a message for each one that fails."""
    messages = []
    for name in sorted({extension.name for extension in installed(group)}):
        try:
            extension = of_others(group, name)
            if extension is not None:
                load(extension)
        except ExtensionError as error:
            messages.append(str(error))
    return messages


def _taken(first: str, second: Extension) -> ExtensionError:
    return ExtensionError(
        f"the name {second.name!r} ({second.group}) is used twice: by {first}, and by {second.package} "
        f"{second.version} ({second.entry_point.value}). Remove one of them (pip uninstall "
        f"{second.package}), or change its name."
    )
