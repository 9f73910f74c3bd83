from pathlib import Path

import pytest

from tests.fake_torch import install_torch
from tests.features.conftest import _here

__all__ = ["_here"]


@pytest.fixture
def torch_for_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the installed torch look like a build without CUDA, which cannot use any GPU."""
    install_torch(tmp_path / "site-packages", monkeypatch, version="2.13.0+cpu")


@pytest.fixture
def torch_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the installed torch look like a build for CUDA."""
    install_torch(tmp_path / "site-packages", monkeypatch, version="2.13.0+cu130", cuda="13.0")
