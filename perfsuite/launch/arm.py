"""Resolve an arm, which is one of the two environments in a comparison. Imports neither torch nor pytest.

An arm is written as words that are separated by spaces, as in a shell. Each word is one of these:

    .                       this environment, which is also the default
    NAME=VALUE              an environment variable for the launches; it overrides values from elsewhere
    path/to/venv/bin/python an interpreter with perfsuite installed; the path must contain a slash
    image:ghcr.io/me/it:1   `python` in a container image that has perfsuite installed
    main, v1.2, 0123abc     a branch, tag or commit of the repository; launches run in a worktree of it
    main:requirements.lock  such a commit, with the packages in this file of the commit (or a uv.lock)
    accelerate==1.10.0      a release of a package, with each dependency that must be added or changed for it
    requirements.txt        the packages in this file, installed in the same way (or a uv.lock)

For example, `main NCCL_ALGO=Ring` is the branch main with one variable set.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from perfsuite import __version__
from perfsuite.errors import CaseError, GitError, PackageError
from perfsuite.inputs.git import git, revision
from perfsuite.launch import image
from perfsuite.launch.download import Consent, Plan, refuse_large
from perfsuite.launch.installed import DONE, environment, kept_environment, locked, plan_of_lock
from perfsuite.launch.overlay import Wanted, plan, python_in, release
from perfsuite.node.processes import captured
from perfsuite.redaction import is_secret, masked
from perfsuite.results.run_dir import MOVED

ANSWER_S = 60
LISTS = (".txt", ".lock")  # how the names of files with packages end
WORDS = (
    "Give one or more of these words, separated by spaces: . for this environment, NAME=VALUE, "
    "PACKAGE==VERSION, requirements.txt or uv.lock, path/to/python, image:NAME, a git commit, COMMIT:LOCKFILE"
)
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(?!=)(.*)", re.DOTALL)
_VERSION = re.compile(r"[=<>~!]*v?\d[\w.+*!-]*|nightly|latest|stable|dev", re.IGNORECASE)
"""Matches text that a user could intend as the version of a package."""
_CERTAIN_VERSION = re.compile(r"[=<>~!]*v?\d+\.\d+\.\d[\w.+*!-]*")
"""Matches text that is hardly ever the value of a variable, such as the version `0.18.0`."""
RELEASE = re.compile(r"[A-Za-z0-9][\w.-]*==[\w.!+-]+")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The interpreter, packages, variables and commit with which an arm's launches run."""

    text: str = "."
    python: str = sys.executable
    given: Mapping[str, str] = field(default_factory=dict)  # the variables that the user named (NAME=VALUE)
    paths: tuple[str, ...] = ()  # directories of the commit's worktree, which come first on PYTHONPATH
    # Directory with the releases that the user named (PACKAGE==VERSION). It follows `paths` on PYTHONPATH.
    # Empty if no release was named.
    packages: str = ""
    # The top directory of the repository, and the worktree of the commit. In the paths of scripts, the
    # worktree replaces the top directory.
    moved: tuple[str, str] | None = None
    directory: Path | None = None  # working directory of the launches; None: this process's directory
    commit: str | None = None  # the commit that is checked out in `directory`; None outside of git
    # The lock file from which the packages of the interpreter were installed: its path in the commit. Empty
    # without a lock file.
    lock: str = ""
    dirty: bool = False
    perfsuite: str = __version__
    # Packages of the repository that are installed without -e. An arm can import such a copy instead of the
    # code of its commit.
    copies: tuple[str, ...] = ()
    is_installed: bool = True  # False if packages that the user named must still be installed
    # A function that asks a package index, and returns the packages that must be installed. None if nothing
    # is missing.
    plan: Callable[[], Plan] | None = field(default=None, compare=False, repr=False)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that override the variables of this process, the case and perfsuite."""
        if not (self.paths or self.packages):
            return dict(self.given)
        # With a lock file, this process's PYTHONPATH would shadow the packages of the lock file.
        others = self.given.get("PYTHONPATH", None if self.lock else os.environ.get("PYTHONPATH"))
        path = os.pathsep.join(filter(None, [*self.paths, self.packages, others]))
        variables = {**self.given, "PYTHONPATH": path}
        return variables if self.moved is None else {**variables, MOVED: os.pathsep.join(self.moved)}

    @property
    def facts(self) -> dict[str, str]:
        """The facts in which arms can differ, by name."""
        changed = " with uncommitted changes" if self.dirty else ""
        return {
            "interpreter": self.python,
            "commit": f"{self.commit[:12]}{changed}" if self.commit else "not known to git",
            "perfsuite": self.perfsuite,
            **{
                name: "(not shown)" if is_secret(name, value) else value for name, value in self.given.items()
            },
        }

    def has_packages_of(self, second_arm: Arm) -> bool:
        """Return whether both arms use the same interpreter, packages and variables. Commits can differ.

        Values are compared, because a variable that only one arm sets can already have the same value in this
        process, from which the other arm inherits it.
        """
        names = {*self.given, *second_arm.given}
        mine, theirs = (
            (arm.python, arm.packages, [arm.given.get(name, os.environ.get(name)) for name in sorted(names)])
            for arm in (self, second_arm)
        )
        return mine == theirs

    def acts_as(self, second_arm: Arm) -> bool:
        """Return whether both arms have the same commit, interpreter, packages and variables."""
        is_same_commit = (self.commit, self.dirty) == (second_arm.commit, second_arm.dirty)
        return is_same_commit and self.has_packages_of(second_arm)


HERE = Arm()  # this environment, without the commit of a repository


def here(root: Path) -> Arm:
    """Return this environment as an arm, with the commit of the repository that contains `root`.

    An untracked Python file that git does not ignore also counts as an uncommitted change, because cases
    might run this file.
    """
    now = revision(root)
    others = ("ls-files", "--others", "--exclude-standard", "--", "*.py")
    is_new = now.commit is not None and not now.dirty and bool(git(*others, cwd=root))
    return Arm(commit=now.commit, dirty=now.dirty or is_new)


def resolve(
    option: str,
    text: str,
    *,
    root: Path,
    store: Path,
    consent: Consent = refuse_large,
    agreed: Plan | None = None,
    installs: bool = True,
) -> Arm:
    """Return the arm that `text` describes. A commit is checked out once, into a worktree in `store`.

    `option` is the option that the user gave, for messages. `root` is a directory in the repository that has
    the commits. `consent` is called with the planned downloads, unless they are already `agreed`.

    If `installs` is true, the packages that `text` names are installed. Otherwise, the returned arm has
    only a plan of these packages, and must be resolved again (see `Arm.is_installed`).

    Raises `CaseError` if the words do not describe an arm, and `GitError` if no worktree can be created.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        # Do not show the text, because it might contain a secret.
        raise CaseError(f"{option}: {error}. {WORDS}") from None
    if not words:
        raise CaseError(f"{option} is empty. {WORDS}")
    matches = [(word, _VARIABLE.fullmatch(word)) for word in words]
    shown = [
        f"{match[1]}=..." if match and is_secret(match[1], match[2]) else masked(word)
        for word, match in matches
    ]
    text = text if shown == words else shlex.join(shown)
    try:
        installing = _Installing(consent, agreed) if installs else None
        return _resolved(_Words.parsed(words), replace(here(root), text=text), root, store, installing)
    except (CaseError, PackageError) as error:
        raise CaseError(f"{option} {text!r}: {error}") from None


@dataclass(frozen=True)
class _Installing:
    """How packages are installed: `consent` is called first, unless the plan is already `agreed`."""

    consent: Consent
    agreed: Plan | None


@dataclass(frozen=True, kw_only=True)
class _Words:
    """The words that describe an arm, by kind."""

    given: Mapping[str, str]  # variables
    releases: Sequence[str]
    lists: Sequence[Path]  # files of packages
    # Each of the next three is None if there is no such word.
    python: str | None
    image: str | None
    commit: str | None
    lock: str  # the lock file in the commit; empty without one

    @classmethod
    def parsed(cls, words: Sequence[str]) -> _Words:
        """Sort the words. Raises `CaseError` for unknown words and for words that cannot be combined."""
        given = {match[1]: match[2] for match in map(_VARIABLE.fullmatch, words) if match}
        _refuse_versions(given)
        releases = [word for word in words if RELEASE.fullmatch(word)]
        images = [word for word in words if word.startswith(image.PREFIX)]
        lists = [word for word in words if _is_list(word)]
        recognized = (*releases, *lists, *images)
        others = [word for word in words if not (word in recognized or _VARIABLE.fullmatch(word))]
        pythons, commits = _environments(others)
        if images and (len(images) > 1 or pythons or releases or lists):
            raise CaseError(
                "an image has its own interpreter and packages. Combine it only with a commit or variables"
            )
        commit, colon, lock = commits[0].partition(":") if commits else ("", "", "")
        if colon and not lock:
            raise CaseError("there is no lock file after the colon. Name one, or leave out the colon")
        if lock and (pythons or images):
            raise CaseError("an interpreter and a lock file cannot be combined. Leave out one of them")
        return cls(
            given=given,
            releases=releases,
            lists=[Path(word).expanduser() for word in lists],
            # Symbolic links are not resolved, because the Python of a virtual environment is such a link.
            python=os.path.abspath(pythons[0]) if pythons else None,
            image=images[0].removeprefix(image.PREFIX) if images else None,
            commit=commit if commits else None,
            lock=lock,
        )


def _refuse_versions(given: Mapping[str, str]) -> None:
    """Raise `CaseError` if a user probably means the release of a package and not a variable."""
    for name, value in given.items():
        is_version = _VERSION.fullmatch(value) and _is_package(name)
        if is_version or (_CERTAIN_VERSION.fullmatch(value) and not name.isupper()):
            what = f"{name} is a package" if is_version else f"{value} is a version"
            release = value.lstrip("=<>~!").removeprefix("v")
            raise CaseError(
                f"{name}={value} would set a variable, but {what}. To name a release, write "
                f"{name}=={release}. The name of a variable with such a value must be in capitals"
            )


def _resolved(words: _Words, arm: Arm, root: Path, store: Path, installing: _Installing | None) -> Arm:
    """Return the arm that these words describe. Without `installing`, nothing is installed.

    Neither this function nor the functions that it calls may put a secret into an error message.
    """
    arm = replace(arm, given=words.given)
    if words.image is not None:
        arm = replace(arm, python=image.interpreter(words.image, (_top(root), store), store))
    elif words.python is not None:
        arm = replace(arm, python=words.python)
    if words.commit is not None:
        commit = _commit(words.commit, root)
        worktree = _worktree(commit, root, store)
        if words.lock:
            arm, installing = _with_lock_file(arm, words.lock, worktree, commit, store, installing)
        arm = _moved(arm, commit, worktree, _top(root))
        if not arm.is_installed:
            # Releases that take precedence over the lock file's packages can be planned only once the
            # environment exists.
            return arm
    if words.releases or words.lists:
        wanted = Wanted(releases=tuple(words.releases), lists=tuple(words.lists), python=arm.python)
        arm = _over(arm, wanted, store, installing)
    is_elsewhere = words.image is not None or words.python is not None or words.commit is not None
    return replace(arm, perfsuite=_version(arm)) if is_elsewhere else arm


def _with_lock_file(
    arm: Arm, lock: str, worktree: Path, commit: str, store: Path, installing: _Installing | None
) -> tuple[Arm, _Installing | None]:
    """Return the arm with the packages of a lock file, and the `_Installing` for further packages."""
    file = worktree / lock
    if not file.is_file():
        raise CaseError(
            "that commit has no such file. Give its path from the top directory of the repository"
        )
    arm = replace(arm, lock=lock)
    kept = kept_environment(file, commit, store)
    if kept is not None:
        return replace(arm, python=kept), installing
    if installing is None:
        return replace(arm, is_installed=False, plan=lambda: plan_of_lock(file)), None
    python = environment(file, commit, store, installing.consent, installing.agreed)
    # The user agreed to the packages of the lock file, but not to the releases that replace some of them.
    return replace(arm, python=python), replace(installing, agreed=None)


def _is_package(name: str) -> bool:
    """Return whether a package of this environment has this name.

    A name that is all capitals is taken as the name of a variable, although pip ignores the case of names.
    """
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return not name.isupper()


def _is_list(word: str) -> bool:
    """Return whether a word is the path of an existing requirements file or lock file."""
    return word.endswith(LISTS) and Path(word).expanduser().is_file()


def _over(arm: Arm, wanted: Wanted, store: Path, installing: _Installing | None) -> Arm:
    """Return the arm with the wanted packages, which take precedence over those of its environment."""
    if installing is None:
        is_kept = wanted.is_kept(store)
        return replace(arm, is_installed=False, plan=None if is_kept else lambda: plan(wanted, store))
    directory = release(wanted, store, installing.consent, installing.agreed)
    python = python_in(directory)
    if python is not None:
        return replace(arm, python=python)
    has_packages = any(entry.name != DONE for entry in directory.iterdir())
    return replace(arm, packages=str(directory)) if has_packages else arm


def _moved(arm: Arm, commit: str, worktree: Path, top: Path) -> Arm:
    return replace(
        arm,
        paths=_import_paths(arm.python, top, worktree),
        moved=(str(top), str(worktree)),
        copies=_copies(arm.python, top),
        directory=_place(worktree, top),
        commit=commit,
        dirty=False,
    )


def merge_base(a: Arm, b: Arm, root: Path) -> str | None:
    """Return the commit at which two arms diverged, or None if `a` does not name a commit.

    If `b` does not name a commit, the commit that is checked out is used. Raises `GitError` if there is no
    common commit.
    """
    if a.moved is None or a.commit is None:
        return None
    commit_b = "HEAD" if b.moved is None or b.commit is None else b.commit
    try:
        return git("merge-base", a.commit, commit_b, cwd=root).strip()
    except GitError as error:
        raise GitError(f"{a.commit[:12]} and {commit_b[:12]} have no common commit here ({error})") from None


def at_commit(arm: Arm, commit: str, store: Path) -> Arm:
    """Return the arm at another commit. `arm` must name a commit. Raises the same errors as `resolve`."""
    assert arm.moved is not None
    top = Path(arm.moved[0])
    return _moved(arm, commit, _worktree(commit, top, store), top)


def _environments(words: Iterable[str]) -> tuple[list[str], list[str]]:
    pythons = []
    commits = []
    for word in words:
        if "/" in word and (path := Path(word).expanduser()).is_file():
            pythons.append(str(path))
        elif word.startswith(("/", "./", "../", "~")):
            what = "file" if word.endswith(LISTS) else "interpreter"
            raise CaseError(f"there is no {what} {word}. {WORDS}")
        elif word.startswith("-"):
            raise CaseError(f"{word!r} is an option, which is not allowed here. {WORDS}")
        elif word != ".":
            commits.append(word)
    for what, names in (("interpreters", pythons), ("commits", commits)):
        if len(names) > 1:
            raise CaseError(f"it names two {what}, {' and '.join(names[:2])}. Give only one of them")
    return pythons, commits


def _commit(name: str, root: Path) -> str:
    try:
        return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", cwd=root).strip()
    except GitError as error:
        is_not = "is neither a file nor a commit" if name.endswith(LISTS) else "is not a commit"
        raise CaseError(f"{name!r} {is_not} of {root} ({error}). {WORDS}") from None


def _top(root: Path) -> Path:
    """Return the top directory of the repository, or `root` outside of git."""
    try:
        return Path(git("rev-parse", "--show-toplevel", cwd=root).strip())
    except GitError:
        return root


def _worktree(commit: str, root: Path, store: Path) -> Path:
    """Return the worktree of a commit in the store. Changes to tracked files in it are undone."""
    directory = (store / "arms" / commit[:12]).absolute()
    # Processes of pytest-xdist create the same arms at the same time.
    with locked(directory):
        try:
            if (directory / ".git").exists():
                git("reset", "--quiet", "--hard", commit, cwd=directory)
                return directory
        except GitError:
            # The repository to which the worktree belonged no longer exists.
            shutil.rmtree(directory)
        add = ("worktree", "add", "--quiet", "--force", "--force", "--detach", str(directory), commit)
        git(*add, cwd=root)
        return directory


def _import_paths(python: str, top: Path, worktree: Path) -> tuple[str, ...]:
    """Return the worktree directories that replace the repository's directories on `sys.path`.

    These are the top directory, `src`, and the directories from which the interpreter already imports.
    """
    said = ask(Arm(python=python), "import json, sys; print(json.dumps([sys.prefix, *sys.path]))")
    # The paths include those of editable installs. They can lead to the repository through a symbolic link.
    prefix, *paths = (Path(path).resolve() for path in json.loads(said) if os.path.isabs(path))
    # Skip the packages of a virtual environment that is inside the repository. Skip nothing if the repository
    # is inside the prefix of the interpreter, for example in /usr/src.
    is_inside = prefix.is_relative_to(top)
    ours = [
        path for path in paths if path.is_relative_to(top) and not (is_inside and path.is_relative_to(prefix))
    ]
    below = dict.fromkeys([Path(), Path("src"), *(path.relative_to(top) for path in ours)])
    return tuple(str(worktree / path) for path in below)


_ASK_ORIGINS = """
import importlib.metadata, json
origins = {}
for package in importlib.metadata.distributions():
    text = package.read_text("direct_url.json")
    if text:
        origins[package.metadata["Name"]] = json.loads(text)
print(json.dumps(origins))
"""
"""Code that prints the origins (PEP 610) of all packages that were not installed from an index."""


def _copies(python: str, top: Path) -> tuple[str, ...]:
    """Return the packages that were installed without -e from directories of the repository.

    Directories that git does not know, such as a clone of another project, do not belong to the commit.
    perfsuite itself is left out, because the facts about an arm already include its version.
    """
    copies = []
    for name, origin in json.loads(ask(Arm(python=python), _ASK_ORIGINS)).items():
        place = urlsplit(origin["url"])
        directory = Path(unquote(place.path))
        is_copy = "dir_info" in origin and not origin["dir_info"].get("editable", False)
        if not is_copy or name == "perfsuite" or not directory.is_relative_to(top):
            continue
        if git("ls-files", "--", str(directory), cwd=top):
            copies.append(name)
    return tuple(sorted(copies))


def _place(worktree: Path, top: Path) -> Path:
    here = Path.cwd()
    below = here.relative_to(top) if here.is_relative_to(top) else Path()
    if not (worktree / below).is_dir():
        raise CaseError(
            f"that commit has no directory {below}. Run perfsuite in the top directory of the repository, "
            f"{top}"
        )
    return worktree / below


_ASK_VERSION = """
import perfsuite
try:
    from perfsuite.extensions import own
except ImportError:  # a version without this module
    pass
else:
    own("perfsuite.frameworks")
print(perfsuite.__version__)
"""
"""Code that fails if ranks would not find perfsuite's frameworks, for example in a clone that is not
installed."""


def _version(arm: Arm) -> str:
    try:
        return ask(arm, _ASK_VERSION)
    except CaseError as error:
        is_image = image.PREFIX in arm.text
        if is_image and "No module named" not in str(error):
            by_hand = f"{arm.python} -c 'import perfsuite'"
            raise CaseError(
                f"the image does not run ({error}). To see why, or to wait until it is pulled, run {by_hand}"
            ) from None
        install = f"Install it: {arm.python} -m pip install perfsuite=={__version__}"
        way_out = f"Name it in {arm.lock}" if arm.lock else install
        if is_image:
            way_out = "Install it in the image"
        raise CaseError(f"{arm.python} cannot import perfsuite ({error}). {way_out}") from None


def ask(arm: Arm, code: str) -> str:
    """Return the last line that `code` prints in an arm's Python. Raises `CaseError` if it prints nothing."""
    try:
        environment = {**os.environ, **arm.variables}
        done = captured([arm.python, "-c", code], cwd=arm.directory, env=environment, timeout=ANSWER_S)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.splitlines()[-1]
        # Skip docker's hint to use --help.
        lines = [line for line in done.stderr.splitlines() if line.strip() and "--help" not in line]
        said = lines[-1] if lines else f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
        said = f"no output within {ANSWER_S} s"
    except OSError as error:
        said = str(error.strerror)
    raise CaseError(f"{arm.python}: {said}")
