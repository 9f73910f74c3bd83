from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from perfsuite.results.run_dir import MODEL_CODE
from perfsuite.worker import leash


@pytest.fixture
def tied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the fork server does, in order. This process stays as it is."""
    done: list[str] = []
    monkeypatch.setattr(leash, "die_with_parent", lambda: done.append("tied"))
    monkeypatch.delitem(sys.modules, "perfsuite.node.preload", raising=False)
    monkeypatch.setattr(sys, "done", done, raising=False)
    return done


@pytest.mark.parametrize(
    ("name", "then"),
    [("whole_code", ""), ("broken_code", "raise RuntimeError('operator torchvision::nms does not exist')")],
)
def test_the_models_code_is_loaded_by_a_process_that_is_tied_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: list[str], name: str, then: str
) -> None:
    (tmp_path / f"{name}.py").write_text(f"import sys\nsys.done.append('loaded')\n{then}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(MODEL_CODE, name)
    importlib.import_module("perfsuite.node.preload")
    assert tied == ["tied", "loaded"]


@pytest.mark.parametrize("name", [None, "nosuch"])
def test_a_job_without_a_model_that_is_installed_needs_none(
    monkeypatch: pytest.MonkeyPatch, tied: list[str], name: str | None
) -> None:
    monkeypatch.delenv(MODEL_CODE, raising=False)
    if name is not None:
        monkeypatch.setenv(MODEL_CODE, name)
    importlib.import_module("perfsuite.node.preload")
    assert tied == ["tied"]
