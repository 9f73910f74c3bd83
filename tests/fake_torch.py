"""Helper: a torch of another version or build, as far as perfsuite reads it without importing torch."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

FILE = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda']
__version__ = '{version}'
debug = False
cuda: Optional[str] = {cuda!r}
hip: Optional[str] = None
"""


def install_torch(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, version: str = "2.13.0", cuda: str | None = None
) -> None:
    """Replace the installed torch with a package in `directory` that has nothing but a `version.py`."""
    directory.mkdir(exist_ok=True)
    (directory / "version.py").write_text(FILE.format(version=version, cuda=cuda))
    replace_torch(ModuleSpec("torch", None, origin=str(directory / "__init__.py")), monkeypatch)


def replace_torch(spec: ModuleSpec | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `find_spec` return this for torch. With None, torch is not installed."""
    torch: ModuleType | None = None
    if spec is not None:
        torch = ModuleType("torch")
        torch.__spec__ = spec
    monkeypatch.setitem(sys.modules, "torch", torch)
