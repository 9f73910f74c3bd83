"""Run pip or uv, and say in one line why it failed. Imports neither torch nor pytest."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
"""Variables that would make an installer look, install or print elsewhere. Those of indexes are kept."""
OURS = {
    "NO_COLOR": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    **{f"PIP_{name}": "0" for name in ("DRY_RUN", "QUIET", "REQUIRE_VIRTUALENV", "USER", "VERBOSE")},
    # Safe mode: an installer must not import modules from the repository that it runs in.
    "PYTHONSAFEPATH": "1",
}
"""Variables for an installer. pip also gives them precedence over its configuration files."""
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
"""Makes pip write its resolution to a file (name, file and address of each package) instead of downloading.

`pip install --dry-run` downloads everything before it reports what that is (seen in 23.2), but consent is
needed first. The names of `pip._internal` were seen in 23.2. Without them, or if pip does not call the first
one, `--report` gives the same, after a download if pip is old. `fast-deps` reads the dependencies of a wheel
without the rest of it, where an index has no separate metadata."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that pip would install."""

    name: str
    version: str  # empty if the file's name does not contain it
    url: str
    yanked: str | None = None  # why its maintainers withdrew it, maybe an empty text; None: they did not

    @property
    def is_here(self) -> bool:
        """Return whether its file is on this machine already."""
        return self.url.startswith("file:")


class InstallerError(PackageError):
    """An installer failed: has its whole output."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


def would_install(*requirements: str, python: str, cwd: Path | None = None) -> list[Package]:
    """Return what pip would install, without installing it. Raises `PackageError` with the reason."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "listed.json"
        report = Path(temporary) / "report.json"
        # Not quiet, because pip then hides which packages conflict.
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
    """Return the package of an entry in pip's report, which gives no reason for a yanked release."""
    return Package(
        name=entry["metadata"]["name"],
        version=entry["metadata"]["version"],
        url=entry["download_info"]["url"],
        yanked="" if entry.get("is_yanked") else None,
    )


def _version(file: str) -> str:
    """Return the version in the name of a wheel or source distribution; empty if there is none."""
    with contextlib.suppress(InvalidWheelFilename):
        return str(parse_wheel_filename(file)[1])
    with contextlib.suppress(InvalidSdistFilename):
        return str(parse_sdist_filename(file)[1])
    return ""


def _explain(error: InstallerError, python: str) -> NoReturn:
    """Raise `PackageError` with the reason of pip's failure in a sentence, or the error itself."""
    missing = pip_errors.missing(error.output)
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
    """Return the versions of Python for which the index has a wheel of a release."""

    def has_wheel(version: str) -> bool:
        wheels = ("--no-deps", "--only-binary=:all:", "--target=unused", f"--python-version={version}")
        with contextlib.suppress(PackageError), tempfile.TemporaryDirectory() as temporary:
            file = Path(temporary) / "listed.json"
            words = ("install", "--dry-run", *wheels, requirement)
            with contextlib.suppress(InstallerError):
                run(python, "-c", LISTS, str(file), *words)
            return file.exists()
        return False

    with ThreadPoolExecutor(len(OTHER_PYTHONS)) as threads:
        holds = threads.map(has_wheel, OTHER_PYTHONS)
        return [version for version, has in zip(OTHER_PYTHONS, holds, strict=True) if has]


def versions(package: str) -> list[Version]:
    """Return the versions that pip finds, oldest first, with pre-releases but no yanked ones.

    Raises `PackageError` if it finds none.
    """
    said = pip("index", "versions", "--pre", package).splitlines()
    listed = next((line for line in said if line.startswith("Available versions:")), "").partition(":")[2]
    return sorted(Version(each.strip()) for each in listed.split(",") if each.strip())


def pip(
    *words: str,
    python: str = sys.executable,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Return pip's output. Raises `PackageError` with the line of the reason if it fails."""
    return run(python, "-m", "pip", *words, cwd=cwd, variables=variables)


def run(
    *command: str,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    shown: Sequence[str] = (),
) -> str:
    """Return an installer's output. Raises `PackageError` with the line of the reason if it fails.

    `shown` is the command for messages, if it differs from the command itself.
    """
    said = " ".join(shown or command)
    kept = {name: value for name, value in os.environ.items() if name not in MISLEADING}
    try:
        done = captured(command, cwd=cwd, env={**kept, **OURS, **(variables or {})}, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise PackageError(f"{said}: no end after {INSTALL_S} s") from None
    if done.returncode:
        why = done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}"
        lines = why.splitlines()  # pip's last line may only refer to its manual
        reason = next((line for line in lines if line.startswith("ERROR: Cannot install")), lines[-1])
        output = f"{done.stdout}\n{done.stderr}"
        if pip_errors.NO_SPACE in output:
            reason = f"the disk is full ({pip_errors.NO_SPACE}): free some of it"
        elif pip_errors.NO_PIP in output:
            reason = f"that environment has no pip: {command[0]} -m ensurepip, or uv pip install pip"
        raise InstallerError(f"{said}: {reason}", output)
    return done.stdout
