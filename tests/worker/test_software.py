import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perfsuite.worker import software


def test_versions_of_what_is_installed_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    have = {"triton": "3.6", "flash_attn": "2.8", "transformers": "5", "x": "1"}

    def version(package: str) -> str:
        if package not in have:
            raise importlib.metadata.PackageNotFoundError(package)
        return have[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    seen = software.environment(("x", "a-clone-on-pythonpath"))
    assert seen.items() >= have.items()
    assert not {"mamba_ssm", "deepspeed", "peft", "bitsandbytes", "a-clone-on-pythonpath"} & set(seen)


def test_on_a_gpu_the_libraries_and_the_cores_of_a_rank_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 2))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91500)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 7})
    seen = software.environment()
    assert (seen["nccl"], seen["cudnn"], seen["cores"]) == ("2.29.2", "91500", "0-2,7")


@pytest.fixture
def precision() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("precision")
def test_tf32_is_seen_however_it_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    usual = {"fp32_matmul": "ieee", "fp32_convolution": "tf32", "deterministic": "no"}
    assert software.arithmetic("cuda") == usual
    for precision in ("high", "medium"):
        torch.set_float32_matmul_precision(precision)
        assert software.arithmetic("cuda")["fp32_matmul"] == "tf32"
    assert software.arithmetic("cpu")["fp32_matmul"] == "bf16"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = True
    assert software.arithmetic("cuda")["fp32_matmul"] == "tf32"
    torch.backends.cudnn.allow_tf32 = False
    assert software.arithmetic("cuda")["fp32_convolution"] == "ieee"
    torch.use_deterministic_algorithms(True)
    assert software.arithmetic("cuda")["deterministic"] == "yes"


@pytest.mark.parametrize(
    ("switch", "variables", "matmul"),
    [
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", {}, "tf32"),
        ("torch.backends.fp32_precision = 'tf32'", {}, "tf32"),
        ("", {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, "tf32"),
        ("", {"NVIDIA_TF32_OVERRIDE": "1"}, "tf32"),
        ("torch.set_float32_matmul_precision('high')", {"NVIDIA_TF32_OVERRIDE": "0"}, "ieee"),
    ],
)
@pytest.mark.launch
def test_tf32_by_variables_and_by_torchs_newer_switches(
    monkeypatch: pytest.MonkeyPatch, switch: str, variables: dict[str, str], matmul: str
) -> None:
    """In a process of its own: torch refuses to mix the two kinds of switches."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = (
        f"import torch\n{switch}\nfrom perfsuite.worker import software\nprint(software.arithmetic('cuda'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"'fp32_matmul': '{matmul}'" in done.stdout


def with_counters(monkeypatch: pytest.MonkeyPatch, counters: dict[str, dict[str, int]]) -> None:
    stand_in: Any = SimpleNamespace(counters=counters)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", stand_in)


def test_graphs_of_torch_compile_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with_counters(monkeypatch, {"stats": {"unique_graphs": 3, "calls_captured": 9}})
    assert software.compiled_graphs() == 3
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    assert software.compiled_graphs() == 0


def test_every_distribution_that_is_imported_is_named_with_its_version() -> None:
    found = software.imported()
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["pytest"] == pytest.__version__
    assert "perfsuite" not in found
    assert "nanotron" not in found, "installed, and not imported"


def test_a_distribution_without_its_metadata_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    provided = {"torch": ["torch"], "pytest": [None, "no-such-distribution"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: provided)
    assert software.imported() == {"torch": importlib.metadata.version("torch")}


def test_the_script_that_runs_is_named_with_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(file), raising=False)
    assert software.program() == {}, "it deleted itself"
    file.write_text("first")
    first = software.program()
    assert first["script"].startswith("train.py ")
    file.write_text("second")
    assert software.program() != first
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert software.program() == {}
