from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from perfsuite.case import torch_build
from tests.fake_torch import install_torch, replace_torch
from tests.samples import make_gpu_machine, make_machine


def test_the_installed_torch_is_read() -> None:
    import torch

    build = torch_build.installed()
    assert (build["__version__"], build["cuda"]) == (str(torch.__version__), torch.version.cuda)


WITHOUT_CUDA = (
    "torch 2.13.0+cpu was built without CUDA and cannot use the GPUs of this machine "
    "(8 x NVIDIA H100 80GB HBM3). Install the build from the public index "
    "(pip uninstall --yes torch && PIP_EXTRA_INDEX_URL= pip install torch==2.13.0), "
    "or run only the cases meant for cpu (-m cpu)"
)
TOO_OLD = "is too old: perfsuite needs 2.11 or newer: pip install 'torch>=2.11'"


@pytest.mark.parametrize(
    ("version", "cuda", "expected"),
    [
        ("2.13.0+cu130", "13.0", ("built for CUDA 13.0", (2, 13), None, None)),
        ("2.13.0+cpu", None, ("built without CUDA", (2, 13), WITHOUT_CUDA, None)),
        ("2.10.1", "12.8", ("built for CUDA 12.8", (2, 10), *[f"torch 2.10.1 {TOO_OLD}"] * 2)),
        ("1.13.1+cu117", "11.7", ("built for CUDA 11.7", (1, 13), *[f"torch 1.13.1+cu117 {TOO_OLD}"] * 2)),
    ],
)
def test_build_reports_its_version_and_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, cuda: str | None, expected: tuple[Any, ...]
) -> None:
    install_torch(tmp_path, monkeypatch, version=version, cuda=cuda)
    summary, release, on_gpus, on_a_cpu = expected
    assert torch_build.summary() == f"{version}, {summary}"
    assert torch_build.release() == release
    assert torch_build.wrong_build(make_gpu_machine()) == on_gpus
    assert torch_build.wrong_build(make_machine()) == on_a_cpu


@pytest.mark.parametrize("spec", [None, ModuleSpec("torch", None)], ids=["missing", "unreadable"])
def test_a_missing_torch_is_an_error(monkeypatch: pytest.MonkeyPatch, spec: ModuleSpec | None) -> None:
    replace_torch(spec, monkeypatch)
    assert torch_build.summary() == "not installed"
    assert torch_build.release() == (0, 0)
    problem = "torch is not installed: perfsuite needs 2.11 or newer: pip install 'torch>=2.11'"
    assert torch_build.wrong_build(make_gpu_machine()) == torch_build.wrong_build(make_machine()) == problem
