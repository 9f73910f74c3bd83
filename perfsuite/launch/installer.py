"""Run pip or uv, and explain failures in one line. Imports neither torch nor pytest."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from perfsuite.errors import PackageError
from perfsuite.launch import pip_errors
from perfsuite.node.processes import captured

INSTALL_S = 3600
OTHER_PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
MISLEADING = frozenset(
    (
        *("PYTHONPATH", "PYTHONHOME", "FORCE_COLOR", "CLICOLOR_FORCE"),
        *(f"PIP_{name}" for name in ("PREFIX", "PYTHON", "REPORT", "ROOT", "TARGET")),
    )
)
"""Variables that would change where an installer searches, installs or prints. The variables that name
package indexes are kept."""
OURS = {
    "NO_COLOR": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    **{f"PIP_{name}": "0" for name in ("DRY_RUN", "QUIET", "REQUIRE_VIRTUALENV", "USER", "VERBOSE")},
    # Safe mode, because an installer must not import modules from the repository that it runs in.
    "PYTHONSAFEPATH": "1",
}
"""Variables for an installer. The variables for pip override pip's configuration files."""
LISTS = """
import contextlib, json, sys
from pip._internal.cli.main import main

file = sys.argv.pop(1)
with contextlib.suppress(ImportError, AttributeError, LookupError):
    from pip._internal.cli import cmdoptions
    from pip._internal.exceptions import InstallationError
    from pip._internal.operations.prepare import RequirementPreparer

    def listed(self, requirements, *words, **options):
        links = [(each.name, each.link) for each in requirements]
        found = [(name, of.filename, of.url_without_fragment, of.yanked_reason) for name, of in links]
        with open(file, "w") as kept:
            json.dump(found, kept)
        raise InstallationError("it is listed")

    RequirementPreparer.prepare_linked_requirements_more = listed
    if "fast-deps" in cmdoptions.use_new_feature.keywords["choices"]:
        sys.argv.append("--use-feature=fast-deps")
sys.exit(main(sys.argv[1:]))
"""
"""Code that makes pip write a list of the packages that it found into a file, and then stop.

Each entry has the package's name, file, address and, if the release was yanked, the reason.

The user must consent before a download. But in `pip install --dry-run`, some versions of pip download
everything before they report the packages (23.2 does, 26.3 does not). The names in `pip._internal` exist in
pip 23.2. If these names are missing, or if pip does not call the replaced method, perfsuite reads the
packages from the file of `--report`. Some versions of pip write this file only after the download. If an
index has no separate metadata, `fast-deps` reads the dependencies of a wheel without downloading all of the
wheel.
"""


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that pip would install."""

    name: str
    version: str  # empty if the file's name does not contain it
    url: str
    # The reason why the release was yanked, which can be an empty string. None if it was not yanked.
    yanked: str | None = None

    @property
    def is_here(self) -> bool:
        """Return whether the package's file is already on this machine."""
        return self.url.startswith("file:")


class InstallerError(PackageError):
    """Raised if an installer fails. Contains the whole output."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


def would_install(*requirements: str, python: str, cwd: Path | None = None) -> list[Package]:
    """Return the packages that pip would install, without installing them.

    Raises `PackageError` with the reason if pip fails.
    """
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "listed.json"
        report = Path(temporary) / "report.json"
        # `--quiet` would hide which packages conflict.
        words = ("install", "--dry-run", f"--report={report}", *requirements)
        try:
            run(python, "-c", LISTS, str(file), *words, cwd=cwd, shown=(python, "-m", "pip", *words))
        except InstallerError as error:
            if not file.exists():
                _explain(error, python)
        if file.exists():
            listed = json.loads(file.read_text(encoding="utf-8"))
            return [
                Package(name=name, version=_version(of), url=url, yanked=yanked)
                for name, of, url, yanked in listed
            ]
        return [_reported(entry) for entry in json.loads(report.read_text(encoding="utf-8"))["install"]]


def _reported(entry: Mapping[str, Any]) -> Package:
    """Return the package in an entry of pip's report. The report does not say why a release was yanked."""
    return Package(
        name=entry["metadata"]["name"],
        version=entry["metadata"]["version"],
        url=entry["download_info"]["url"],
        yanked="" if entry.get("is_yanked") else None,
    )


def _version(file: str) -> str:
    """Return the version in the name of a wheel or source distribution. Empty if it has none."""
    with contextlib.suppress(InvalidWheelFilename):
        return str(parse_wheel_filename(file)[1])
    with contextlib.suppress(InvalidSdistFilename):
        return str(parse_sdist_filename(file)[1])
    return ""


def _explain(error: InstallerError, python: str) -> NoReturn:
    """Raise `PackageError` with a sentence that explains pip's failure.

    If perfsuite cannot explain the failure, raise `error` itself.
    """
    missing = pip_errors.missing(error.output)
    if missing is not None and not missing.known:
        # pip lists no versions if the user's constraints name the package.
        with contextlib.suppress(PackageError):
            missing = replace(missing, known=tuple(map(str, versions(missing.name, python=python))))
    if missing is None or missing.needs_python or missing.version is None:
        why = pip_errors.reason(error.output) if missing is None else missing.sentence(_release_of(python))
    else:
        why = missing.sentence(_release_of(python), _other_pythons(missing.requirement, python))
    if why is None:
        raise error
    raise PackageError(why) from None


def _release_of(python: str) -> str:
    return run(python, "-c", "import platform; print(platform.python_version())").strip()


def _other_pythons(requirement: str, python: str) -> list[str]:
    """Return the versions of Python for which the package index has a wheel of a release."""

    def has_wheel(version: str) -> bool:
        wheels = ("--no-deps", "--only-binary=:all:", "--target=unused", f"--python-version={version}")
        with contextlib.suppress(PackageError), tempfile.TemporaryDirectory() as temporary:
            file = Path(temporary) / "listed.json"
            words = ("install", "--dry-run", *wheels, requirement)
            with contextlib.suppress(InstallerError):
                run(python, "-c", LISTS, str(file), *words)
                return True  # pip ended the dry run before it prepared the packages (seen in 26.3)
            return file.exists()
        return False

    with ThreadPoolExecutor(len(OTHER_PYTHONS)) as threads:
        holds = threads.map(has_wheel, OTHER_PYTHONS)
        return [version for version, has in zip(OTHER_PYTHONS, holds, strict=True) if has]


def versions(package: str, *, python: str = sys.executable) -> list[Version]:
    """Return the versions of a package that pip finds, oldest first.

    Pre-releases and releases without a wheel are included. By itself, pip 26.3 leaves out releases without a
    wheel if the user allows only wheels. Yanked releases are not included. Raises `PackageError` if pip finds
    no version.
    """
    of_all_kinds = {"PIP_ONLY_BINARY": ":none:"}
    said = pip("index", "versions", "--pre", package, python=python, variables=of_all_kinds).splitlines()
    listed = next((line for line in said if line.startswith("Available versions:")), "").partition(":")[2]
    return sorted(Version(version.strip()) for version in listed.split(",") if version.strip())


def pip(
    *words: str,
    python: str = sys.executable,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Run pip and return its output. Raises `PackageError`, with the reason in one line, if pip fails."""
    return run(python, "-m", "pip", *words, cwd=cwd, variables=variables)


def run(
    *command: str,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    shown: Sequence[str] = (),
) -> str:
    """Run an installer and return its output.

    If it fails, raises `PackageError` with the line that gives the reason. `shown` is the command as messages
    show it, if that is different from the command that runs.
    """
    said = " ".join(shown or command)
    kept = {name: value for name, value in os.environ.items() if name not in MISLEADING}
    try:
        environment = {**kept, **OURS, **(variables or {})}
        # The installer inherits the lock of the directory that it fills (`installed.locked`).
        done = captured(command, cwd=cwd, env=environment, timeout=INSTALL_S, close_fds=False)
    except subprocess.TimeoutExpired:
        raise PackageError(f"{said}: did not end within {INSTALL_S} s") from None
    if done.returncode:
        why = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        # pip's last line might only refer to its manual.
        lines = why.splitlines()
        errors = [line for line in lines if line.startswith("ERROR: ")]
        conflicts = [line for line in errors if line.startswith("ERROR: Cannot install")]
        reason = (conflicts[:1] or errors or lines)[-1]
        output = f"{done.stdout}\n{done.stderr}"
        if pip_errors.NO_SPACE in output:
            reason = f"the disk is full ({pip_errors.NO_SPACE}). Free some space"
        elif pip_errors.NO_PIP in output:
            reason = f"that environment has no pip. Run {command[0]} -m ensurepip or uv pip install pip"
        raise InstallerError(f"{said}: {reason}", output)
    return done.stdout
