"""Questions to git. Imports neither torch nor pytest."""

from __future__ import annotations

import subprocess
from pathlib import Path

from perfsuite.errors import GitError


def git(*arguments: str, cwd: Path) -> str:
    """What a git command prints. Raises `GitError` with what git said, or that it is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    except OSError as error:
        raise GitError(f"git {' '.join(arguments)}: {error.strerror}") from error
    if done.returncode:
        raise GitError(f"git {' '.join(arguments)}: {done.stderr.strip() or 'failed'}")
    return done.stdout
