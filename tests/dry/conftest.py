from pathlib import Path

import pytest

from perfsuite.results.device_log import DeviceLog
from tests.processes import have_compiler


@pytest.fixture
def log() -> DeviceLog:
    return DeviceLog()


@pytest.fixture
def with_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_compiler(tmp_path / "compiler", monkeypatch)


@pytest.fixture
def without_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the C++ compiler and everything else from PATH, and what it has compiled earlier."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
