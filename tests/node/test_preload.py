import ctypes
import importlib
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

from perfsuite.results.run_dir import MODEL_CODE
from tests.node.conftest import exit_code_of

PR_GET_PDEATHSIG = 2  # prctl(2)
NOTES = """
from pathlib import Path
from tests.node.test_preload import signal_at_parents_end

Path(__file__).with_name("loaded").write_text(str(signal_at_parents_end()))
"""
"""A module of model code. It notes whether the fork server is already bound to its parent."""


def signal_at_parents_end() -> int:
    """Return the signal that the kernel sends to this process when its parent ends. 0 if none is sent."""
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value


def preload(report: Path) -> None:
    """Import the module as the fork server does, and report what happens at the end of the parent."""
    sys.modules.pop("perfsuite.node.preload", None)
    sys.modules["torch"] = ModuleType("torch")  # importing the real torch takes seconds
    importlib.import_module("perfsuite.node.preload")
    report.write_text(str(signal_at_parents_end()))


@pytest.mark.parametrize(
    ("name", "code", "is_loaded"),
    [
        ("whole_code", "", True),
        ("broken_code", "raise RuntimeError('operator torchvision::nms does not exist')", True),
        ("nosuch", None, False),
        (None, None, False),
    ],
)
def test_preloads_model_code_in_a_bound_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, code: str | None, is_loaded: bool
) -> None:
    monkeypatch.delenv(MODEL_CODE, raising=False)
    if name is not None:
        monkeypatch.setenv(MODEL_CODE, name)
    if code is not None:
        (tmp_path / f"{name}.py").write_text(f"{NOTES}\n{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert exit_code_of(preload, tmp_path / "report") == 0
    killed = str(int(signal.SIGKILL))
    assert (tmp_path / "report").read_text() == killed
    loaded = tmp_path / "loaded"
    assert (loaded.read_text() if loaded.exists() else None) == (killed if is_loaded else None)
