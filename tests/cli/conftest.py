from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty git repository of one commit, as the current directory."""
    monkeypatch.chdir(tmp_path)
    for command in (
        ["init", "-q", "-b", "main"],
        ["config", "user.name", "Ada"],
        ["config", "user.email", "ada@example.org"],
        ["commit", "-q", "--allow-empty", "-m", "start"],
    ):
        subprocess.run(["git", *command], check=True)
    return tmp_path
