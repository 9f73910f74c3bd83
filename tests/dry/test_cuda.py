from importlib import resources
from typing import Any

import pytest
import torch
import yaml

from perfsuite.case.case import Topology
from perfsuite.case.hardware import PRODUCTS
from perfsuite.dry import cuda
from perfsuite.dry.cuda import ONE_KERNEL, _answers, _answers_for_accelerators
from perfsuite.dry.machine import ANY_GPU, pretended_gpu
from perfsuite.results.device_log import DeviceLog, EmptyCache, HostWait

FUNCTIONS = resources.files("torchgen") / "packaged/ATen/native/native_functions.yaml"


def test_torch_answers_as_on_the_machine() -> None:
    answers = _answers(pretended_gpu(ANY_GPU, Topology(processes_per_node=8)), DeviceLog())
    assert (answers["device_count"](), answers["get_device_name"](0)) == (8, "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("name", "in_hardware"),
    [("Tesla V100-SXM2-16GB", False), ("Tesla T4", False), ("NVIDIA A100-SXM4-80GB", True)],
)
def test_torch_counts_emulated_bf16_as_supported(name: str, in_hardware: bool) -> None:
    answers = _answers(pretended_gpu(name, Topology(processes_per_node=1)), DeviceLog())
    is_bf16_supported = answers["is_bf16_supported"]
    assert is_bf16_supported() is True
    assert is_bf16_supported(including_emulation=False) is in_hardware


def test_accelerators_answer_as_on_the_machine() -> None:
    answers = _answers_for_accelerators(pretended_gpu(ANY_GPU, Topology(processes_per_node=8)), DeviceLog())
    usable = PRODUCTS[ANY_GPU].memory_bytes
    assert (answers["device_count"](), answers["get_memory_info"](0)) == (8, (usable, usable))
    assert not [name for name in answers if not hasattr(torch.accelerator, name)]


@pytest.mark.parametrize("answers", [_answers, _answers_for_accelerators])
def test_logs_calls_that_empty_the_cache_or_wait(answers: Any) -> None:
    log = DeviceLog()
    stand_ins = answers(pretended_gpu(ANY_GPU, Topology(processes_per_node=8)), log)
    stand_ins["empty_cache"]()
    stand_ins["synchronize"]()
    assert log.entries == [EmptyCache(), HostWait(None)]


def test_hides_gpus_from_a_pretended_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    cuda.hide()
    assert torch.cuda.device_count() == 0
    with pytest.raises(RuntimeError, match="no CUDA GPU is available, because this dry run simulates a CPU"):
        torch.cuda.current_device()


def test_knows_every_one_kernel_gpu_operator() -> None:
    """These keywords of torch decide whether an operator is one kernel or a chain of other operators."""
    functions = {
        entry["func"].partition("(")[0]: entry for entry in yaml.load(FUNCTIONS.read_text(), yaml.CSafeLoader)
    }

    def dispatch(name: str) -> set[str]:
        words = functions[name].get("dispatch", {})
        return {key.strip() for keys in words for key in keys.split(",")}

    split = {
        name
        for name, entry in functions.items()
        if "CompositeImplicitAutograd" in dispatch(name)
        and "CUDA" in dispatch(name) | dispatch(entry.get("structured_delegate", name))
    }
    assert split >= {"silu_backward"}
    assert split <= set(ONE_KERNEL)
    assert set(ONE_KERNEL) - split == {"_fused_rms_norm_backward"}, "it has a kernel for CUDA, and no other"
