"""The directions of import, as the design promises them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import perfsuite

PACKAGE = Path(perfsuite.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

WORKER_ONLY = {
    "frameworks/common/finetuning.py",
    "frameworks/common/loop.py",
    "frameworks/common/model.py",
    "frameworks/common/weights.py",
    "frameworks/nanotron/compat.py",
    "frameworks/nanotron/trainer.py",
    "frameworks/torchtitan/trainer.py",
    "launch/preload.py",
    "worker/attach.py",
    "worker/losses.py",
    "worker/observe.py",
    "worker/replicas.py",
    "worker/second_step.py",
    "worker/software.py",
}
"""Files that may import torch at their top, and that nothing on the driver's side imports."""
MAY_IMPORT_PYTEST = {"plugin.py"}


def top_level_imports(file: Path) -> set[str]:
    """Modules imported when `file` is imported, not inside functions nor for types only."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports_any(file: Path, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in top_level_imports(file))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_directions(file: Path) -> None:
    if str(file.relative_to(PACKAGE)) not in WORKER_ONLY:
        for heavy in ("torch", "transformers", "accelerate"):
            assert not imports_any(file, heavy)
        for module in WORKER_ONLY:
            name = module.removesuffix(".py").replace("/", ".")
            assert f"perfsuite.{name}" not in top_level_imports(file)
    if file.name not in MAY_IMPORT_PYTEST:
        assert not imports_any(file, "pytest")
        assert "perfsuite.plugin" not in top_level_imports(file)


def modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.launch
def test_the_driver_side_never_loads_torch() -> None:
    loaded = modules_after("import perfsuite, perfsuite.plugin, perfsuite.measure, perfsuite.cli.app")
    assert "perfsuite.plugin" in loaded
    assert not loaded & {"torch", "transformers", "numpy"}


@pytest.mark.launch
def test_the_worker_never_loads_pytest() -> None:
    loaded = modules_after(
        "import perfsuite.worker.main, perfsuite.launch.agent, perfsuite.launch.preload\n"
        "import perfsuite.worker.observe"
    )
    assert "torch" in loaded
    assert not loaded & {"pytest", "_pytest", "perfsuite.plugin"}
