import os
from pathlib import Path

import pytest

from perfsuite.results.device_log import DeviceLog
from tests.processes import executable


@pytest.fixture
def log() -> DeviceLog:
    return DeviceLog()


@pytest.fixture
def with_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a C++ compiler on PATH, so that a GPU can be simulated. It compiles nothing."""
    (tmp_path / "compiler").mkdir()
    executable(tmp_path / "compiler" / "g++", "exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'compiler'}:{os.environ['PATH']}")


@pytest.fixture
def without_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the C++ compiler and everything else from PATH, and what it has compiled earlier."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
