import pytest

from perfsuite.case import torch_build
from tests.features.conftest import _here

__all__ = ["_here"]


@pytest.fixture
def torch_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the installed torch look like a build without CUDA, which cannot use any GPU."""
    monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.13.0+cpu", "cuda": None})
