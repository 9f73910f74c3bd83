import json
import os
from pathlib import Path

import pytest

from tests.processes import executable
from tests.synthetic import git, make_repository


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the current directory be that of the test."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An empty git repository of two commits, the current directory."""
    make_repository(tmp_path, 2)
    git(tmp_path, "config", "user.name", "Ada")
    return tmp_path


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a repository of one commit, and an empty origin."""
    here = tmp_path / "clone"
    make_repository(here, 1)
    git(tmp_path, "init", "--quiet", "--bare", "origin")
    git(here, "remote", "add", "origin", str(tmp_path / "origin"))
    monkeypatch.chdir(here)
    return here


class Gh:
    """A stand-in for `gh` in a directory: keeps its words and what came on its standard input."""

    def __init__(self, directory: Path) -> None:
        self.program = executable(
            directory / "gh",
            f'cd "{directory}"; echo "$@" >> calls',
            'case "$*" in *"-file -"* | *"@-"* | *"--input -"*) cat >> calls ;; esac',
            'case "$2" in view | list) cat answer ;; create) echo https://example.org/made ;; esac',
            'case "$2" in repos/*/commits/*) cat commit ;; esac',
        )
        self._calls = directory / "calls"
        self._answer = directory / "answer"
        self._commit = directory / "commit"

    @property
    def calls(self) -> str:
        return self._calls.read_text() if self._calls.exists() else ""

    def answers(self, content: object) -> None:
        """Let it print this as JSON where it is asked for a pull request or for issues."""
        self._answer.write_text(json.dumps(content))

    def knows_commit(self, *parents: str) -> None:
        """Let it say that any commit it is asked for has these parents."""
        self._commit.write_text(json.dumps({"parents": [{"sha": sha} for sha in parents]}))


@pytest.fixture
def gh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gh:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return Gh(tmp_path / "bin")
