import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from perfsuite.errors import PrivateNameError
from perfsuite.worker.observation import software
from tests.packages import Packages
from tests.processes import python
from tests.worker import motor


def test_reports_versions_installed_beside_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    have = {"triton": "3.6", "flash_attn": "2.8", "transformers": "5", "x": "1"}

    def version(package: str) -> str:
        if package not in have:
            raise importlib.metadata.PackageNotFoundError(package)
        return have[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    seen = software.environment(("x", "a-clone-on-pythonpath"))
    assert seen.items() >= have.items()
    assert not {"mamba_ssm", "peft", "bitsandbytes", "a-clone-on-pythonpath"} & set(seen)


def test_reports_versions_of_imported_libraries(packages: Packages) -> None:
    motor.install(packages)
    assert "perf-motor" not in software.environment()
    motor.driving()
    assert software.environment()["perf-motor"] == "1.5"


def test_records_gpu_libraries_and_rank_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 2))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91500)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 7})
    seen = software.environment()
    assert (seen["nccl"], seen["cudnn"], seen["cores"]) == ("2.29.2", "91500", "0-2,7")


@pytest.mark.parametrize("misses", [0, 3])
def test_graph_missing_in_the_cache_is_compiled(monkeypatch: pytest.MonkeyPatch, misses: int) -> None:
    counters = {"inductor": {"fxgraph_cache_miss": misses, "fxgraph_cache_hit": 1}}
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters=counters))
    assert software.is_compiled_anew() is (misses > 0)


@pytest.fixture
def precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("precision")
def test_tf32_is_seen_however_it_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {"fp32_matmul": "ieee", "fp32_convolution": "tf32", "deterministic": "no"}
    assert software.arithmetic("cuda") == usual
    torch.set_float32_matmul_precision("high")
    assert software.arithmetic("cuda")["fp32_matmul"] == "tf32"
    torch.set_float32_matmul_precision("medium")
    assert software.arithmetic("cuda")["fp32_matmul"] == "tf32"
    assert software.arithmetic("cpu")["fp32_matmul"] == "bf16"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert software.arithmetic("cuda")["fp32_matmul"] == "ieee"
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert software.arithmetic("cuda")["fp32_matmul"] == "tf32"
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    torch.backends.cuda.matmul.allow_tf32 = True
    assert software.arithmetic("cuda")["fp32_matmul"] == "tf32"
    torch.backends.cudnn.allow_tf32 = False
    assert software.arithmetic("cuda")["fp32_convolution"] == "ieee"
    torch.use_deterministic_algorithms(True)
    assert software.arithmetic("cuda")["deterministic"] == "yes"


NEWER_SWITCHES = """
import torch
from torch import backends
from perfsuite.worker.observation import software

def tell():
    print(software.arithmetic("cuda")["fp32_matmul"], end=" ")

tell()
for matmul, all_of_torch in (("ieee", "none"), ("tf32", "none"), ("none", "tf32"), ("none", "ieee")):
    backends.cuda.matmul.fp32_precision, backends.fp32_precision = matmul, all_of_torch
    tell()
"""


@pytest.mark.launch
@pytest.mark.usefixtures("precision")
def test_sees_tf32_by_variable_and_new_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """This runs in a new process, because torch refuses to mix the two kinds of switches."""
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    assert python(NEWER_SWITCHES) == "tf32 ieee tf32 tf32 ieee "


def test_graphs_of_torch_compile_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    dynamo = SimpleNamespace(counters={"stats": {"unique_graphs": 3, "calls_captured": 9}})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", dynamo)
    assert software.compiled_graphs() == 3
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    assert software.compiled_graphs() == 0


@pytest.fixture
def no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a torch whose counters of torch.compile have another name."""
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace())


@pytest.mark.usefixtures("no_counters")
def test_graphs_are_unknown_without_torchs_counters() -> None:
    assert software.compiled_graphs() is None
    assert not software.is_compiled_anew()


@pytest.mark.usefixtures("no_counters")
def test_unknown_graphs_are_not_counted_as_none() -> None:
    with pytest.raises(PrivateNameError, match=r"the kernels of torch\.compile are unknown"):
        software.compiled_counts()


def test_names_imported_distributions_and_versions() -> None:
    versions = software.imported()
    assert versions["torch"] == importlib.metadata.version("torch")
    assert versions["pytest"] == pytest.__version__
    assert "perfsuite" not in versions
    assert "nanotron" not in versions, "nanotron is installed, but not imported"


def test_omits_a_distribution_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    provided = {"torch": ["torch"], "pytest": [None, "no-such-distribution"]}
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: provided)
    assert software.imported() == {"torch": importlib.metadata.version("torch")}


def test_names_the_running_script_with_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(file), raising=False)
    assert software.program() == {}, "the script deleted itself"
    file.write_text("first")
    first = software.program()
    assert first["script"].startswith("train.py ")
    file.write_text("second")
    assert software.program() != first
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert software.program() == {}
