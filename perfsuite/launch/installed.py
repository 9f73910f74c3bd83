"""Install packages for an arm with pip or uv, once. Imports neither torch nor pytest."""

import contextlib
import fcntl
import http.client
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from perfsuite import documents
from perfsuite.errors import FileError, PackageError
from perfsuite.inputs import files
from perfsuite.node.processes import captured

INSTALL_S = 3600
UV_LOCK = "uv.lock"
DONE = ".installed"
NO_FILES = ("--hash", "--index-url", "--extra-index-url", "-i ", "--pre", "--no-binary", "--only-binary")
"""Options in requirements that do not refer to files of the commit."""
LARGE_BYTES = 10**9  # downloads from this size on need consent
SMALL_BYTES = 10**7  # downloads below this size are listed without it
NAMES_SHOWN = 8  # number of packages to list, the largest first
HEAD_S = 10  # seconds that a server has to return the size of a file
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
        found = [(each.name, each.link.filename, each.link.url_without_fragment) for each in requirements]
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
_LOCAL_SOURCE = re.compile(r'source = \{ (path|directory|editable|virtual) = "(?!\.")')
"""A package in a `uv.lock` that is inside the repository, but is not its project."""


Consent = Callable[[str, bool], bool]
"""Called with a text about pip's planned download, and whether it is large. Returns whether to proceed."""


def refuse_large(text: str, is_large: bool) -> bool:
    """Consent to small downloads only."""
    return not is_large


def environment(lock: Path, commit: str, store: Path) -> str:
    """Return the interpreter of the virtual environment for a lock file, created once in `store`.

    `lock` is in the worktree of `commit`. uv installs a `uv.lock`, without its project; any other file is
    installed with `pip install -r`. The same requirements share an environment at all commits. Raises
    `PackageError` with the installer's output.
    """
    here = str(Path(sys.executable).parent)  # where pip installs it; the environment need not be activated
    uv = shutil.which("uv", path=os.pathsep.join([here, os.environ.get("PATH", os.defpath)]))
    if lock.name == UV_LOCK and uv is None:
        raise PackageError(f"{lock.name} is installed by uv, which is not there: pip install uv")
    directory = (store / "environments" / _key(lock, commit)).absolute()
    python = directory / "bin" / "python"
    once(directory, lambda: _make(lock, directory, python, uv))
    return str(python)


def once(directory: Path, install: Callable[[], object]) -> None:
    """Fill a directory with `install`, once and completely; other commands wait. Raises `PackageError`."""
    try:
        with locked(directory):
            if not (directory / DONE).exists():
                if directory.exists():
                    shutil.rmtree(directory)
                install()
                (directory / DONE).touch()
    except OSError as error:
        raise PackageError(f"{directory}: {error.strerror or error}") from None


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a lock until the end of the `with`. Other commands that create the same directory wait for it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_name(f"{directory.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def release(requirements: Sequence[str], python: str, store: Path, consent: Consent = refuse_large) -> Path:
    """Return the directory with releases of packages, such as `accelerate==1.10.0`, for an interpreter.

    It also has their dependencies of which the interpreter's environment has another version. The
    environment's torch is kept unless torch is requested: releases that need another one are refused.
    `consent` is called before a download. Raises `PackageError` with pip's output, or if there is no consent.
    """
    of = "" if python == sys.executable else f"-{documents.digest([python])}"
    directory = (store / "packages" / f"{','.join(requirements)}{of}").absolute()

    def install() -> None:
        listed = pip("list", "--format=freeze", python=python).splitlines()
        torch = [each for each in listed if each.startswith("torch==")]
        held = [] if any(each.startswith("torch==") for each in requirements) else torch
        changes = would_install(*requirements, *held, python=python)
        downloads = [each for each in changes if not each.url.startswith("file:")]
        if downloads:
            ask_for(consent, downloads)
        named = [f"{each.name}=={each.version}" for each in changes if each.version]
        wanted = [*named, *(f"{each.name} @ {each.url}" for each in changes if not each.version)]
        wanted = wanted or [*requirements]
        into = ("--upgrade", "--target", str(directory))
        pip("install", "--quiet", "--no-deps", *into, *wanted, python=python)

    once(directory, install)
    return directory


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that pip would install."""

    name: str
    version: str  # empty if the file's name does not contain it
    url: str


def would_install(*requirements: str, python: str) -> list[Package]:
    """Return what pip would install, without installing it. Raises `PackageError` with pip's output."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "listed.json"
        report = Path(temporary) / "report.json"
        words = ("install", "--quiet", "--dry-run", f"--report={report}", *requirements)
        try:
            run(python, "-c", LISTS, str(file), *words, shown=(python, "-m", "pip", *words))
        except PackageError:
            if not file.exists():
                raise
        if file.exists():
            listed = json.loads(file.read_text(encoding="utf-8"))
            return [Package(name=name, version=_version(of), url=url) for name, of, url in listed]
        entries = json.loads(report.read_text(encoding="utf-8"))["install"]
        return [Package(**_known(each["metadata"]), url=each["download_info"]["url"]) for each in entries]


def _known(metadata: Mapping[str, str]) -> dict[str, str]:
    return {"name": metadata["name"], "version": metadata["version"]}


def _version(file: str) -> str:
    """Return the version in the name of a wheel or source distribution; empty if there is none."""
    with contextlib.suppress(InvalidWheelFilename):
        return str(parse_wheel_filename(file)[1])
    with contextlib.suppress(InvalidSdistFilename):
        return str(parse_sdist_filename(file)[1])
    return ""


def ask_for(consent: Consent, downloads: Sequence[Package]) -> None:
    """Ask for consent to downloads, with their sizes. Raises `PackageError` if it is not given."""
    with ThreadPoolExecutor(8) as threads:
        sizes = list(threads.map(lambda each: size_of(each.url), downloads))
    total = sum(size for size in sizes if size is not None)
    unknown = sizes.count(None)
    by_size = sorted(zip(downloads, sizes, strict=True), key=lambda pair: -(pair[1] or 0))
    names = [
        f"{each.name} {each.version}".rstrip()
        + (f" ({_amount(size)})" if size is not None and size >= SMALL_BYTES else "")
        for each, size in by_size
    ]
    left = len(names) - NAMES_SHOWN
    listed = ", ".join([*names[:NAMES_SHOWN], *([f"and {left} more"] if left > 0 else [])])
    size = _amount(total) if unknown < len(sizes) else "packages of unknown size"
    more = f", and {unknown} of a size that is not known" if 0 < unknown < len(sizes) else ""
    text = f"pip downloads {size}{more}: {listed}"
    if not consent(text, total >= LARGE_BYTES):
        needs = "A download this large needs --yes, an option of perfsuite compare, bisect and releases"
        raise PackageError(f"{text}. {needs}")


def size_of(url: str) -> int | None:
    """Return the size of a file on a server in bytes; None if the server does not report it."""
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=HEAD_S) as answer:
            length = answer.headers.get("Content-Length")
            return int(length) if length is not None else None
    except (OSError, ValueError, http.client.HTTPException):
        return None


def _amount(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def versions(package: str) -> list[Version]:
    """Return the versions that pip finds, oldest first, with pre-releases but no yanked ones.

    Raises `PackageError` if it finds none.
    """
    said = pip("index", "versions", "--pre", package).splitlines()
    listed = next((line for line in said if line.startswith("Available versions:")), "").partition(":")[2]
    return sorted(Version(each.strip()) for each in listed.split(",") if each.strip())


def _text_of(file: Path) -> str:
    """Return the content of a file. Raises `FileError`."""
    try:
        return files.read_text(file, errors="backslashreplace")
    except OSError as error:
        raise FileError(f"cannot read {file}: {error.strerror}") from None


def _key(lock: Path, commit: str) -> str:
    """Return a key for environments: the requirements, Python and, if they refer to files, the commit."""
    text = _text_of(lock)
    project = lock.with_name("pyproject.toml")
    beside = _text_of(project) if lock.name == UV_LOCK and project.exists() else ""
    is_of_commit = _LOCAL_SOURCE.search(text) if lock.name == UV_LOCK else _names_files(text)
    of = commit if is_of_commit else None
    return documents.digest([lock.name, text, beside, of, platform.python_version()])


def _names_files(requirements: str) -> bool:
    """Return whether requirements refer to other files (`-r more.txt`), which may differ between commits."""
    words = (line.partition("#")[0].strip() for line in requirements.splitlines())
    return any(
        word == "." or word.startswith("-") or "file:" in word or ("/" in word and "://" not in word)
        for word in words
        if not word.startswith(NO_FILES)
    )


def _make(lock: Path, directory: Path, python: Path, uv: str | None) -> None:
    run(sys.executable, "-m", "venv", str(directory), cwd=lock.parent)
    if lock.name != UV_LOCK:
        pip("install", "--quiet", "-r", str(lock), python=str(python), cwd=lock.parent)
        return
    assert uv is not None
    words = ("sync", "--quiet", "--frozen", "--no-install-project", "--python", str(python))
    run(uv, *words, cwd=lock.parent, variables={"UV_PROJECT_ENVIRONMENT": str(directory)})


def pip(*words: str, python: str = sys.executable, cwd: Path | None = None) -> str:
    """Return pip's output. Raises `PackageError` with the line of the reason if it fails."""
    return run(python, "-m", "pip", *words, cwd=cwd)


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
        raise PackageError(f"{said}: {reason}")
    return done.stdout
