from __future__ import annotations

from pathlib import Path

import pytest

from tests.synthetic import git, make_repository


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty git repository of two commits, as the current directory."""
    make_repository(tmp_path, 2)
    git(tmp_path, "config", "user.name", "Ada")
    monkeypatch.chdir(tmp_path)
    return tmp_path
