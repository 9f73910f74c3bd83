import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from perfsuite.results.run_dir import MODEL_CODE
from perfsuite.worker import leash


@pytest.fixture
def tied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the fork server's actions are added in order. This process is not changed."""
    done: list[str] = []
    monkeypatch.setattr(leash, "die_with_parent", lambda: done.append("tied"))
    monkeypatch.delitem(sys.modules, "perfsuite.node.preload", raising=False)
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # importing the real torch takes seconds
    monkeypatch.setattr(sys, "done", done, raising=False)
    return done


@pytest.mark.parametrize(
    ("name", "code", "then"),
    [
        ("whole_code", "", ["loaded"]),
        ("broken_code", "raise RuntimeError('operator torchvision::nms does not exist')", ["loaded"]),
        ("nosuch", None, []),
        (None, None, []),
    ],
)
def test_preloads_model_code_in_a_bound_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tied: list[str],
    name: str | None,
    code: str | None,
    then: list[str],
) -> None:
    monkeypatch.delenv(MODEL_CODE, raising=False)
    if name is not None:
        monkeypatch.setenv(MODEL_CODE, name)
    if code is not None:
        (tmp_path / f"{name}.py").write_text(f"import sys\nsys.done.append('loaded')\n{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("perfsuite.node.preload")
    assert tied == ["tied", *then]
