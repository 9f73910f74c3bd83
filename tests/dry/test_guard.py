import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perfsuite.case import torch_build
from perfsuite.dry import guard
from perfsuite.errors import DryRunError
from tests.processes import python

FOR_CPUS = {"__version__": "2.13.0+cpu"}
"""What a build of torch without CUDA tells of itself: the tests may run with another."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def compiler(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a compiler of our own before all others."""
    file = directory / "g++"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_without_a_compiler_the_reason_says_what_to_install_unless_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_build, "installed", lambda: FOR_CPUS)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert guard.why_not() == "there is no C++ compiler: install g++ (apt-get install g++)"
    guard.library().parent.mkdir(parents=True)
    guard.library().touch()
    assert guard.why_not() is None


def test_a_build_for_gpus_is_not_pretended_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.13.0", "cuda": "13.0"})
    told = "torch 2.13.0 is built for CUDA 13.0: CUDA is pretended in a build for CPUs only"
    assert guard.why_not() == told


def test_the_library_is_another_for_each_torch_and_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = guard.library()
    assert first.parent == tmp_path / "cache" / "perfsuite"
    monkeypatch.setattr(guard, "_torch", lambda: tmp_path / "another environment" / "torch")
    second = guard.library()
    monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.99.0"})
    third = guard.library()
    other = tmp_path / "guard.cpp"
    other.write_text("// another")
    monkeypatch.setattr(guard, "SOURCE", other)
    assert len({first, second, third, guard.library()}) == 4


def test_a_compiler_that_fails_is_an_error_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, "echo 'guard.cpp: no such header' >&2; exit 1", monkeypatch)
    with pytest.raises(DryRunError, match=r"(?s)g.. cannot build .*It said: guard.cpp: no such header"):
        guard.build(guard.library())
    assert list(guard.library().parent.iterdir()) == []


def test_two_processes_may_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo built > "$2"', monkeypatch)
    with ThreadPoolExecutor() as pool:
        list(pool.map(guard.build, [guard.library()] * 4))
    assert [file.read_text() for file in guard.library().parent.iterdir()] == ["built\n"]


BACKWARD = """
from perfsuite.dry import guard
guard.load()
import torch
from perfsuite.case.case import Topology
from perfsuite.dry import cuda
from perfsuite.dry.machine import ANY_GPU, pretended_gpu
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

class Operators(TorchDispatchMode):
    names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(str(operator.overloadpacket))
        return operator(*args, **(kwargs or {}))

cuda.pretend(pretended_gpu(ANY_GPU, Topology(processes_per_node=8)))
with FakeTensorMode():
    q = torch.ones(2, 4, 64, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    out.sum().backward()
    norm = torch.nn.functional.rms_norm(q, (128,), torch.ones(128, dtype=q.dtype, device="cuda"))
    norm.sum().backward()
    print(type(norm.grad_fn).__name__)
    with Operators() as seen:
        torch.autograd.grad(torch.nn.functional.silu(q).sum(), q)
    print("aten.silu_backward" in seen.names)
    print(q.grad.device, torch.cuda.get_device_name(), torch.cuda.device_count(), type(out.grad_fn).__name__)
import os, sys
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.launch
@pytest.mark.skipif(guard.why_not() is not None, reason=str(guard.why_not()))
def test_backward_runs_on_a_pretended_gpu() -> None:
    norm, silu, device, *name, count, node = python(BACKWARD).split()
    assert (device, count) == ("cuda:0", "8")
    assert " ".join(name) == "NVIDIA H100 80GB HBM3"
    assert "Cudnn" in node
    assert (norm, silu) == ("FusedRmsNormBackward0", "True"), "one kernel each, as on a GPU"
