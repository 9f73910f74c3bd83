"""Runs git, and asks it where commits stand in their branch. Imports neither torch nor pytest."""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from perfsuite.errors import GitError

OF_A_HOOK = frozenset(  # what git sets where it runs a hook: git would work on that repository everywhere
    ("GIT_COMMON_DIR", "GIT_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX", "GIT_WORK_TREE")
)


def git(*arguments: str, cwd: Path) -> str:
    """What a git command prints. Raises `GitError` with what git said, or that it is not there."""
    try:
        done = _run(arguments, cwd)
        if done.returncode and "safe.directory" in done.stderr:  # before 2.38 git takes it from files alone
            with tempfile.TemporaryDirectory() as home:
                (Path(home) / "git").mkdir()
                (Path(home) / "git" / "config").write_text("[safe]\ndirectory = *\n")
                done = _run(arguments, cwd, XDG_CONFIG_HOME=home)
    except OSError as error:
        raise GitError(f"git {' '.join(arguments)}: {error.strerror}") from error
    if done.returncode:
        raise GitError(f"git {' '.join(arguments)}: {done.stderr.strip() or 'failed'}")
    return done.stdout


def _run(arguments: Sequence[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    usual = {name: value for name, value in os.environ.items() if name not in OF_A_HOOK}
    # In a container the checkout belongs to another user; code of it runs here anyway.
    command, told = ["git", "-c", "safe.directory=*", *arguments], usual | variables
    # Files and their names need not be UTF-8.
    return subprocess.run(command, cwd=cwd, env=told, capture_output=True, errors="backslashreplace")


class Revision(NamedTuple):
    """What is checked out in a repository."""

    commit: str | None  # none outside of git
    dirty: bool  # whether tracked files have uncommitted changes
    problem: str | None = None  # why git could not tell, inside of a repository


def revision(directory: Path) -> Revision:
    """The revision that is checked out where `directory` lies; outside of git, one without a commit."""
    try:
        told = git("status", "--porcelain=v2", "--branch", "--untracked-files=no", cwd=directory).splitlines()
    except GitError as error:
        here = directory.resolve()
        is_inside = any((each / ".git").exists() for each in (here, *here.parents))
        workspace = os.environ.get("GITHUB_WORKSPACE")
        if workspace and not is_inside and here.is_relative_to(Path(workspace).resolve()):
            return Revision(os.environ.get("GITHUB_SHA"), False)  # in an image without git nothing has a .git
        return Revision(None, False, str(error) if is_inside else None)
    commit = next(line.split()[2] for line in told if line.startswith("# branch.oid "))
    if commit == "(initial)":
        return Revision(None, False, "there is no commit yet")
    return Revision(commit, any(not line.startswith("# ") for line in told))


def changes(directory: Path) -> str | None:
    """A digest of the uncommitted changes to tracked files; None without any, and outside of git."""
    try:
        diff = git("diff", "--binary", "--no-ext-diff", "--no-textconv", "HEAD", cwd=directory)
    except GitError:
        return None
    return hashlib.sha256(diff.encode()).hexdigest()[:16] if diff else None


def current_branch(repo: Path) -> str:
    """What is checked out: a branch, or HEAD where none is."""
    return git("rev-parse", "--abbrev-ref", "HEAD", cwd=repo).strip()


def dates(repo: Path, branch: str) -> dict[str, int]:
    """The commits of a branch itself (its first parents), oldest first, with their dates in seconds."""
    lines = git("log", "--first-parent", "--reverse", "--format=%H %ct", branch, "--", cwd=repo).splitlines()
    return {commit: int(seconds) for commit, seconds in map(str.split, lines)}


def unplaced(commits: set[str], repo: Path, branch: str) -> dict[str, str]:
    """Why these are not among `dates`. Raises `GitError` if it is because the clone is not whole."""
    if not commits:
        return {}
    missing = commits - set(git("rev-list", "--all", cwd=repo).split())
    if missing and git("rev-parse", "--is-shallow-repository", cwd=repo).strip() == "true":
        raise GitError(
            f"{repo} is a shallow clone, which lacks commits of the history ({len(missing)}). "
            "Fetch all of it: git fetch --unshallow"
        )
    return {
        commit: f"not in {repo}" if commit in missing else f"not on {branch} itself (git log --first-parent)"
        for commit in sorted(commits)
    }
