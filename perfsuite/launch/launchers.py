"""Find the launcher of a session. For the driver; imports neither torch nor pytest.

Launchers are imported whenever pytest starts, because their settings are options of pytest.
"""

from collections.abc import Callable, Collection, Mapping
from inspect import isabstract, signature
from pathlib import Path
from typing import Any, NamedTuple

from perfsuite import extensions
from perfsuite.errors import CaseError, ExtensionError, error_text
from perfsuite.extensions import LAUNCHERS, Extension
from perfsuite.inputs.ini import read_ini
from perfsuite.inputs.setting import Setting
from perfsuite.launch.base import Launcher

LOCAL = "local"
Read = Callable[[Setting], Any]  # returns the value of a setting


class Installed(NamedTuple):
    """The installed launchers, by name."""

    usable: Mapping[str, type[Launcher]]
    problems: Mapping[str, str]  # name of a launcher that cannot be used -> the reason

    @property
    def settings(self) -> list[Setting]:
        """The settings of all launchers that can be used."""
        return [setting for launcher_class in self.usable.values() for setting in launcher_class.settings]


def installed(reserved: Collection[str] = ()) -> Installed:
    """Import every installed launcher. `reserved` has the names of perfsuite's options, without `--perf-`."""
    usable = {}
    problems = {}
    for name in extensions.names(LAUNCHERS):
        try:
            launcher_class = _load(name)
            taken = [setting.name for setting in launcher_class.settings if setting.name in reserved]
            if taken:
                problem = f"its setting {taken[0]!r} has the same name as an option of perfsuite"
                raise ExtensionError(f"the launcher {name!r} cannot be used: {problem}")
            usable[name] = launcher_class
        except ExtensionError as error:
            problems[name] = str(error)
    return Installed(usable, problems)


def launcher(name: str | None = None, read: Read | None = None) -> Launcher:
    """Return the launcher with this name, or the default launcher. `read` returns the value of a setting.

    Without `read`, settings are read from the ini file. Raises `CaseError` for an unknown name or bad
    settings, `ExtensionError` for a launcher that cannot be used, and `MachineError` for a launcher that
    cannot work here.
    """
    name = name or _default()
    launcher_class = _load(name)
    read = read or _of_ini()
    return launcher_class(**{_argument(name, setting): read(setting) for setting in launcher_class.settings})


def load(extension: Extension) -> type[Launcher]:
    """Import a launcher. Raises `ExtensionError` if it cannot be imported or used."""
    loaded = extension.load()
    if not (isinstance(loaded, type) and issubclass(loaded, Launcher)):
        raise extension.error(f"it is {loaded!r}: give a subclass of {Launcher.__module__}.Launcher")
    if isabstract(loaded):
        missing = " and ".join(sorted(loaded.__abstractmethods__))
        raise extension.error(f"the method {missing} is missing: add it")
    arguments = []
    for setting in loaded.settings:
        if not isinstance(setting, Setting):
            raise extension.error(f"its settings contain {setting!r}: use {Setting.__module__}.Setting")
        if not setting.name.startswith(f"{extension.name}-"):
            raise extension.error(f"rename its setting {setting.name!r} to '{extension.name}-...'")
        arguments.append(_argument(extension.name, setting))
    if len(set(arguments)) < len(arguments):
        raise extension.error("two of its settings have the same name: rename one")
    try:
        signature(loaded).bind(**dict.fromkeys(arguments))
    except TypeError as error:
        raise extension.error(f"it cannot be called with its settings ({error}): correct that") from None
    return loaded


def _load(name: str) -> type[Launcher]:
    extension = extensions.find(LAUNCHERS, name)
    if extension is None:
        names = ", ".join(extensions.names(LAUNCHERS))
        raise CaseError(f"there is no launcher {name!r}; the launchers are {names}")
    return load(extension)


def _argument(name: str, setting: Setting) -> str:
    """Return the argument for a setting: `srun_options` for `slurm-srun-options` of the launcher `slurm`."""
    return setting.name.removeprefix(f"{name}-").replace("-", "_")


def _default() -> str:
    """Return the name of the launcher that is the default for this process, or `local`."""
    meant = [name for name, launcher_class in installed().usable.items() if _is_default(name, launcher_class)]
    if len(meant) > 1:
        raise CaseError(f"the launchers {' and '.join(meant)} are all defaults here: choose one of them")
    return meant[0] if meant else LOCAL


def _is_default(name: str, launcher_class: type[Launcher]) -> bool:
    try:
        return launcher_class.is_default()
    except Exception as error:
        raise ExtensionError(
            f"the launcher {name!r} fails when asked whether it is the default ({error_text(error)}). Choose "
            "another (--perf-launcher local), or fix its package"
        ) from error


def _of_ini() -> Read:
    values = read_ini(Path.cwd()).values
    return lambda setting: setting.read(setting.key, values.get(setting.key) if setting.ini else None)
