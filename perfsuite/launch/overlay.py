"""Add packages that take precedence over those of an environment, without changing the environment.

Most packages are installed into a directory that comes first on `PYTHONPATH`. This does not work for torch,
because torch loads the libraries of CUDA from its own directory. If torch or one of these libraries changes,
torch and all of the libraries are installed into a virtual environment. Through a `.pth` file, this
environment finds all other packages in the original environment.
"""

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from perfsuite import documents
from perfsuite.errors import FileError, PackageError
from perfsuite.inputs import files
from perfsuite.launch.download import Consent, Plan, ask_for, check_space, refuse_large
from perfsuite.launch.installed import DONE, UV_LOCK, once, requirements_of
from perfsuite.launch.installer import InstallerError, Package, pip, run, would_install

LIBRARIES = ("nvidia-", "cuda-")  # prefixes of the names of the libraries that torch loads
LONGEST_NAME = 80  # maximum length, in characters, of the package list in a directory's name
BELOW = "perfsuite-below.pth"
_ASK = """
import json, platform, site, sys
sites = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
print(json.dumps([platform.python_version(), [each for each in sys.path if each], sites]))
"""


@dataclass(frozen=True)
class Environment:
    """The packages that an interpreter finds."""

    python: str
    version: str  # the version of Python
    path: tuple[str, ...]
    sites: tuple[str, ...]  # directories of packages in which Python reads `.pth` files

    @classmethod
    def of(cls, python: str) -> "Environment":
        """Return the environment of an interpreter. Raises `PackageError` if the interpreter does not run."""
        version, path, sites = json.loads(run(python, "-c", _ASK).splitlines()[-1])
        return cls(python, version, tuple(path), tuple(sites))

    @cached_property
    def distributions(self) -> Mapping[str, importlib.metadata.Distribution]:
        """The installed packages by canonical name."""
        return distributions_in(self.path)

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """The versions of the installed packages by canonical name."""
        return {name: distribution.version for name, distribution in self.distributions.items()}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The packages that an arm names, to be put over an environment."""

    releases: tuple[str, ...] = ()  # such as `accelerate==1.10.0`
    lists: tuple[Path, ...] = ()  # files with requirements: `requirements.txt`, `uv.lock`
    python: str = sys.executable

    @cached_property
    def below(self) -> Environment:
        """The environment over which the packages are put."""
        return Environment.of(self.python)

    @cached_property
    def names(self) -> set[str]:
        """The canonical names of the packages in `releases` and `lists`."""
        lines = (*self.releases, *(line for text in self._texts for line in text.splitlines()))
        matches = (re.match(r"[A-Za-z0-9][\w.-]*", line.strip()) for line in lines)
        return {canonicalize_name(match[0]) for match in matches if match is not None}

    @cached_property
    def _texts(self) -> tuple[str, ...]:
        try:
            return tuple(files.read_text(file, errors="backslashreplace") for file in self.lists)
        except OSError as error:
            raise FileError(f"cannot read {error.filename}: {error.strerror}") from None

    def directory(self, store: Path) -> Path:
        """Return the directory that adds exactly these packages to this environment."""
        names = ",".join([*self.releases, *(file.name for file in self.lists)])
        of = [sorted(self.below.versions.items()), self.below.version, self.python]
        key = documents.digest([self.releases, self._texts, *of])
        return (store / "packages" / f"{names[:LONGEST_NAME]}-{key}").absolute()

    def is_kept(self, store: Path) -> bool:
        """Return whether the packages have already been installed."""
        return (self.directory(store) / DONE).exists()

    def requirements(self, store: Path) -> list[str]:
        """Return the requirements as arguments for pip.

        A `uv.lock` is first converted by uv to a requirements file.
        """
        words = [*self.releases]
        for file in self.lists:
            exported = _exported(file, store) if file.name == UV_LOCK else file.absolute()
            if not _installs_something(files.read_text(exported, errors="backslashreplace")):
                raise PackageError(f"{file} names no package, so the launches would not change")
            words += ["-r", str(exported)]
        return words


def _installs_something(requirements: str) -> bool:
    """Return whether a line of a requirements file names a package or another file.

    Comments, and options such as `--extra-index-url` or `-c constraints.txt`, install nothing.
    """
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in requirements.splitlines())
    return any(re.match(r"[^-]|-r|--requirement|-e|--editable", line) for line in lines)


def _exported(lock: Path, store: Path) -> Path:
    """Write the packages of a `uv.lock` as requirements for pip, and return the file."""
    text = requirements_of(lock)
    file = (store / "packages" / f"{lock.name}-{documents.digest(text)}.txt").absolute()
    documents.write_text(file, text)
    return file


def plan(wanted: Wanted, store: Path) -> Plan:
    """Return the packages that must be installed. Raises `PackageError` if they cannot be installed."""
    below = wanted.below
    is_torch_wanted = "torch" in wanted.names
    libraries = [word for word in wanted.releases if word.startswith(LIBRARIES)]
    unused = [
        library
        for library in libraries
        if canonicalize_name(library.partition("==")[0]) not in below.versions
    ]
    if unused and not is_torch_wanted:
        torch = below.versions.get("torch", "(not installed)")
        raise PackageError(
            f"torch {torch} of {below.python} does not load {unused[0].partition('==')[0]}, so the launches "
            "would not change. Name a torch that loads this package, or the interpreter of an environment "
            "with such a torch"
        )
    words = [word for word in wanted.requirements(store) if word not in libraries]
    held = [] if is_torch_wanted or "torch" not in below.versions else [f"torch=={below.versions['torch']}"]
    changes: dict[str, Package] = {}
    broken: dict[str, str] = {}
    if words:
        changes, broken = _resolved([*words, *held], below, wanted.names)
    if libraries:
        # Do not resolve dependencies. torch pins the versions of its libraries, so pip would refuse any
        # other version.
        changes |= _by_name(would_install("--no-deps", *libraries, python=below.python))
    notes = [
        f"{package.name} {package.version} was yanked{f': {package.yanked}' if package.yanked else ''}"
        for package in changes.values()
        if package.yanked is not None
    ]
    notes += [f"{why}, but is not changed" for why in broken.values()]
    moved = [name for name in changes if name in below.versions and name not in wanted.names]
    notes += [
        f"{name} changes from {below.versions[name]} to {changes[name].version}"
        for name in moved
        if not name.startswith(LIBRARIES)
    ]
    return Plan(changes=tuple(changes.values()), notes=tuple(notes))


def _resolved(
    words: Sequence[str], below: Environment, named: Collection[str]
) -> tuple[dict[str, Package], dict[str, str]]:
    """Return the packages that pip would install, and the reasons why they would break installed packages.

    Both dictionaries have the names of packages as keys.

    pip ignores the requirements of packages that are already installed. If an installed package pins the
    version of a new package with `==`, as torchvision pins torch, the installed package is also requested.
    Other installed packages are not requested, because pip might then try hundreds of versions of them.
    """
    changes = _by_name(would_install(*words, python=below.python))
    pinned = [name for name in broken_by(changes, below, pins=True) if name not in {*named, "torch"}]
    if pinned:
        # This fails if one of these packages has no compatible version.
        with contextlib.suppress(PackageError):
            changes = _by_name(would_install(*words, *pinned, python=below.python))
    return changes, broken_by(changes, below)


def _by_name(packages: Iterable[Package]) -> dict[str, Package]:
    return {canonicalize_name(package.name): package for package in packages}


def broken_by(changes: Mapping[str, Package], below: Environment, *, pins: bool = False) -> dict[str, str]:
    """Return the installed packages that `changes` would break, each with the reason.

    A requirement that the installed version already fails to meet does not count. With `pins`, only packages
    that pin the version of a changed package with `==` are returned.
    """
    broken = {}
    for name, distribution in below.distributions.items():
        if name in changes:
            continue
        # perfsuite needs torch only with the extra `torch`, so that it can be installed without torch.
        extras = ("", "torch") if name == "perfsuite" else ("",)
        for requirement in _requirements(distribution, extras):
            needed = canonicalize_name(requirement.name)
            if needed not in changes or (
                pins and not any(of.operator == "==" for of in requirement.specifier)
            ):
                continue
            before = below.versions.get(needed)
            fitted = before is None or requirement.specifier.contains(before, prereleases=True)
            if fitted and not _fits(requirement, changes[needed].version):
                broken[name] = f"{name} {below.versions[name]} needs {needed}{requirement.specifier}"
    return broken


def _fits(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        # The name of a file might not contain a version.
        return True


def _requirements(
    distribution: importlib.metadata.Distribution, extras: Iterable[str]
) -> Iterator[Requirement]:
    """Yield the requirements of a package that apply on this machine and with the given extras."""
    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
            if requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in extras
            ):
                yield requirement
        except (InvalidRequirement, UndefinedComparison, UndefinedEnvironmentName):
            continue


def distributions_in(path: Sequence[str]) -> dict[str, importlib.metadata.Distribution]:
    """Return the packages in these directories by canonical name. The first package of each name is used."""
    distributions: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions(path=list(path)):
        name = distribution.metadata["Name"]
        if name:
            distributions.setdefault(canonicalize_name(name), distribution)
    return distributions


def needs_of_torch(packages: Mapping[str, importlib.metadata.Distribution]) -> set[str]:
    """Return torch and the libraries that it loads, by canonical name."""
    seen: set[tuple[str, str]] = set()
    waiting = [("torch", "")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen or name not in packages:
            continue
        seen.add((name, extra))
        for requirement in _requirements(packages[name], (extra,)):
            waiting += [(canonicalize_name(requirement.name), of) for of in ("", *requirement.extras)]
    return {name for name, _ in seen if name == "torch" or name.startswith(LIBRARIES)}


def release(wanted: Wanted, store: Path, consent: Consent = refuse_large, agreed: Plan | None = None) -> Path:
    """Return the directory with the packages for an arm, and install them if necessary.

    The directory also has those dependencies that the environment lacks or has in an incompatible version. If
    torch or one of its libraries changes, the directory is a virtual environment. If the environment already
    has everything, the directory is empty. The environment's torch is kept unless torch is requested, so
    releases that need another torch are refused.

    `consent` is called before a download, unless the plan is already `agreed`. Raises `PackageError` if the
    installation fails or consent is not given.
    """
    directory = wanted.directory(store)

    def install() -> None:
        planned = agreed or plan(wanted, store)
        if agreed is None:
            check_space([planned], store)
            ask_for(consent, [planned])
        names = _by_name(planned.changes)
        is_of_torch = not names.keys().isdisjoint({"torch", *needs_of_torch(wanted.below.distributions)})
        directory.mkdir(parents=True)
        if is_of_torch:
            _make_environment(directory, planned, wanted.below)
        elif planned.changes:
            _install_into(directory, planned, wanted.below.python, directory)

    once(directory, install)
    return directory


def python_in(directory: Path) -> str | None:
    """Return the interpreter of a directory from `release`, or None if it is not a virtual environment."""
    python = directory / "bin" / "python"
    return str(python) if (directory / BELOW).exists() and python.exists() else None


def _install_into(target: Path, planned: Plan, python: str, directory: Path) -> None:
    named = [f"{package.name}=={package.version}" for package in planned.changes if package.version]
    by_url = [f"{package.name} @ {package.url}" for package in planned.changes if not package.version]
    # Let pip unpack into a directory on the same disk. By default, pip unpacks into the system's temporary
    # directory, which can be on a smaller disk.
    temporary = directory / ".temporary"
    temporary.mkdir()
    into = ("--upgrade", "--target", str(target))
    words = ("install", "--quiet", "--no-deps", *into, *named, *by_url)
    pip(*words, python=python, variables={"TMPDIR": str(temporary)})
    shutil.rmtree(temporary)


def _make_environment(directory: Path, planned: Plan, below: Environment) -> None:
    """Create a virtual environment with torch and its libraries over another environment."""
    run(below.python, "-m", "venv", "--without-pip", str(directory))
    minor = ".".join(below.version.split(".")[:2])
    packages = directory / "lib" / f"python{minor}" / "site-packages"
    _install_into(packages, planned, below.python, directory)
    mine = distributions_in([str(packages)])
    for name in sorted(needs_of_torch({**below.distributions, **mine}) - mine.keys()):
        _link(below.distributions[name], packages)
    lines = [f"import site; site.addsitedir({site!r})" for site in below.sites]
    (packages / BELOW).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (directory / BELOW).touch()
    python = directory / "bin" / "python"
    try:
        run(str(python), "-c", "import torch", variables={"CUDA_VISIBLE_DEVICES": ""})
    except InstallerError as error:
        why = (error.output.strip() or "no reason was given").splitlines()[-1]
        version = distributions_in([str(packages)])["torch"].version
        raise PackageError(f"torch {version} was installed but cannot be imported: {why}") from None


def _link(distribution: importlib.metadata.Distribution, packages: Path) -> None:
    """Link the files of an installed package into another directory, or copy them if links are impossible."""
    if distribution.files is None:
        raise PackageError(
            f"{distribution.name} {distribution.version} does not list its files, so its libraries "
            "cannot be replaced. Name the interpreter of another environment"
        )
    for file in distribution.files:
        if ".." in file.parts or file.is_absolute():
            continue  # a command, which is not needed
        target = packages / file
        source = Path(str(distribution.locate_file(file)))
        if target.exists() or not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:  # the directories are on different disks
            shutil.copy2(source, target)
