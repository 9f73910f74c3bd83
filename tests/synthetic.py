"""A made-up repository that is the same every time."""

import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import perfsuite.inputs.git

BEGIN = datetime(2024, 1, 1, tzinfo=UTC)


def git(where: Path, *arguments: str) -> str:
    """Return the output of a git command in a directory, run as the user Ada."""
    ada = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    return perfsuite.inputs.git.git(*ada, *arguments, cwd=where).strip()


def commit(where: Path, message: str = "a change") -> str:
    """Commit all changes in a repository, and return the hash."""
    git(where, "add", "--all")
    git(where, "commit", "--quiet", f"--message={message}")
    return git(where, "rev-parse", "HEAD")


def make_repository(path: Path, commits: int) -> list[str]:
    """Make a git repository with one commit a day. Returns the hashes, oldest first."""
    stream = []
    for number in range(commits):
        seconds = int((BEGIN + timedelta(days=number)).timestamp())
        message = f"change {number}"
        stream.append(
            f"commit refs/heads/main\ncommitter Ada <ada@example.org> {seconds} +0000\n"
            f"data {len(message)}\n{message}\n"
        )
    path.mkdir(parents=True, exist_ok=True)
    git(path, "init", "--quiet", "--initial-branch=main")
    subprocess.run(
        ["git", "-C", path, "fast-import", "--quiet"], input="".join(stream), text=True, check=True
    )
    return git(path, "rev-list", "--reverse", "main").split()
