from __future__ import annotations

import pytest

from perfsuite.dry import guard
from perfsuite.dry.machine import pretended, product
from perfsuite.errors import DryRunError
from tests.samples import make_case

NO_COMPILER = "there is no C++ compiler: install g++"


@pytest.fixture(autouse=True)
def _can_pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "why_not", lambda: None)


@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        (("h100", "h200"), "NVIDIA H100 80GB HBM3"),
        (("a100-80gb", "h100"), "NVIDIA A100-SXM4-80GB"),
        (("v100-16gb",), "Tesla V100-SXM2-16GB"),
        (("gpu",), "NVIDIA H100 80GB HBM3"),
        (("cpu",), "NVIDIA H100 80GB HBM3"),
        (("cpu", "a10"), "NVIDIA A10"),
    ],
)
def test_the_first_gpu_that_a_case_is_meant_for_is_pretended(hardware: tuple[str, ...], name: str) -> None:
    assert product(hardware) == name


def test_a_gpu_has_its_memory_and_is_there_for_each_process() -> None:
    case = make_case(hardware="a100-80gb")
    machine, instead = pretended(case)
    assert (machine.device, machine.hardware_class, machine.architecture) == ("cuda", "a100-80gb-sxm", "sm80")
    assert (machine.memory_bytes, machine.devices) == (80 << 30, case.topology.processes_per_node)
    assert instead is None


def test_a_case_for_cpus_pretends_one_unless_told_otherwise() -> None:
    case = make_case(hardware="cpu")
    assert pretended(case)[0].architecture == "cpu"
    assert pretended(case, "cuda")[0].architecture == "sm90"


def test_without_a_compiler_a_cpu_is_pretended_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "why_not", lambda: NO_COMPILER)
    machine, instead = pretended(make_case(hardware="h100"))
    assert machine.device == "cpu"
    assert instead == f"a CPU is pretended in place of a GPU: {NO_COMPILER}"
    assert pretended(make_case(hardware="h100"), "cpu")[1] is None
    with pytest.raises(DryRunError, match=r"--device cuda: there is no C\+\+ compiler.*or give --device cpu"):
        pretended(make_case(hardware="h100"), "cuda")
