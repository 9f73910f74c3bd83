import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from tests.features.conftest import _here

__all__ = ["_here"]


@pytest.fixture
def torch_for_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the installed torch look like a build without CUDA, which cannot use any GPU."""
    install(monkeypatch, tmp_path / "site-packages", version="2.13.0+cpu", cuda=None)


@pytest.fixture
def torch_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the installed torch look like a build for CUDA."""
    install(monkeypatch, tmp_path / "site-packages", version="2.13.0+cu130", cuda="13.0")


def install(monkeypatch: pytest.MonkeyPatch, directory: Path, *, version: str, cuda: str | None) -> None:
    """Install a fake torch that has nothing but a `version.py`, which is all that the driver reads."""
    directory.mkdir()
    (directory / "version.py").write_text(f"__version__ = {version!r}\ncuda = {cuda!r}\n")
    module = ModuleType("torch")
    module.__spec__ = ModuleSpec("torch", None, origin=str(directory / "__init__.py"))
    monkeypatch.setitem(sys.modules, "torch", module)
