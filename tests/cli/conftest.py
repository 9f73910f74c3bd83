from pathlib import Path

import pytest

from tests.synthetic import git, make_repository


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the directory of the test the current directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository of two empty commits, as the current directory."""
    make_repository(tmp_path, 2)
    git(tmp_path, "config", "user.name", "Ada")
    return tmp_path


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one commit with an empty origin, as the current directory."""
    here = tmp_path / "clone"
    make_repository(here, 1)
    git(tmp_path, "init", "--quiet", "--bare", "origin")
    git(here, "remote", "add", "origin", str(tmp_path / "origin"))
    monkeypatch.chdir(here)
    return here
