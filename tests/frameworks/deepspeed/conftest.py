import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make DeepSpeed available to the processes of a test. `make` installs it apart from other packages."""
    apart = Path(sys.prefix) / "deepspeed"
    if apart.is_dir():
        monkeypatch.syspath_prepend(apart)
        monkeypatch.setenv("PYTHONPATH", str(apart), prepend=os.pathsep)
    elif find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (make .venv/installed)")
