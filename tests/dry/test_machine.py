from pathlib import Path
from typing import Any

import pytest

from perfsuite import DDP, FSDP, FSDP2, Accelerate, Lightning, LoRA, Topology, Trainer
from perfsuite.case.hardware import PRODUCTS
from perfsuite.dry.machine import pretended, pretended_gpu, product, telling_ranks, why_not_dry
from perfsuite.errors import CaseError, DryRunError
from tests.fake_torch import install_torch
from tests.samples import make_case, make_gpu_machine

NO_COMPILER = "there is no C++ compiler: install g++ (apt-get install g++)"


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
def test_pretends_the_first_gpu_of_the_case(hardware: tuple[str, ...], name: str) -> None:
    assert product(hardware) == name


@pytest.mark.usefixtures("with_compiler")
def test_pretends_one_gpu_for_each_process() -> None:
    case = make_case(hardware="a100-80gb")
    machine, instead = pretended(case)
    assert (machine.device, machine.hardware_class, machine.architecture) == ("cuda", "a100-80gb-sxm", "sm80")
    assert machine.devices == case.topology.processes_per_node
    assert machine.memory_bytes == round(79.25 * 2**30)
    assert instead is None
    on_cpu = make_case(hardware="cpu")
    assert [pretended(on_cpu, device)[0].architecture for device in (None, "cuda")] == ["cpu", "sm90"]


def test_pretends_nominal_memory_if_nothing_else_is_known() -> None:
    assert PRODUCTS["NVIDIA H800"].usable_gib is None
    assert pretended_gpu("NVIDIA H800", Topology(processes_per_node=1)).memory_bytes == 80 << 30


@pytest.mark.usefixtures("without_compiler")
def test_pretends_a_cpu_without_a_compiler() -> None:
    machine, instead = pretended(make_case(hardware="h100"))
    assert machine.device == "cpu"
    lost = "Kernels are therefore those of a CPU, and neither memory nor speed is predicted"
    assert instead == f"a CPU is simulated instead of a GPU, because {NO_COMPILER}. {lost}"
    assert pretended(make_case(hardware="h100"), "cpu")[1] is None
    with pytest.raises(DryRunError, match=r"--device cuda: there is no C\+\+ compiler.*Or give --device cpu"):
        pretended(make_case(hardware="h100"), "cuda")


SIZES = {"hardware": "h100", "topology": Topology(processes_per_node=8)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization": "4bit", "lora": LoRA(rank=8, alpha=16)}, "bitsandbytes' 4bit kernels"),
        ({"framework": {"name": "fake"}}, "fake does not define how it builds on fake tensors"),
        ({"framework": FSDP(sharding_strategy="FULL_SHARD", cpu_offload=True)}, "offloading keeps shards"),
        ({"framework": Accelerate(strategy="fsdp2", cpu_offload=True)}, "offloading keeps shards"),
        ({"framework": Trainer(fsdp="full_shard offload", fsdp_version=1)}, "offloading keeps shards"),
        ({"framework": Lightning(strategy="fsdp", cpu_offload=True)}, "offloading keeps shards"),
    ],
)
def test_says_why_a_case_cannot_run_dry(changes: dict[str, Any], said: str) -> None:
    reason = str(why_not_dry(make_case(**SIZES).replace(**changes), make_gpu_machine()))
    assert reason.startswith("a dry run cannot do this: ")
    assert said in reason


def test_only_framework_limits_prevent_a_dry_run() -> None:
    case = make_case(**SIZES).replace(framework=DDP(static_graph=True), gradient_accumulation=2)
    assert str(why_not_dry(case, make_gpu_machine())).startswith("static_graph must")
    case = make_case(**SIZES).replace(topology=Topology(nodes=64, processes_per_node=8), framework=FSDP2())
    assert why_not_dry(case, make_gpu_machine(count=1)) is None


@pytest.mark.parametrize(
    ("framework", "ranks"),
    [
        (DDP(), (0,)),
        (FSDP(sharding_strategy="FULL_SHARD"), (0, 7)),
        (Accelerate(strategy="fsdp1"), (0, 7)),
        (Accelerate(strategy="fsdp2"), (0,)),
        (Trainer(fsdp="full_shard", fsdp_version=1), (0, 7)),
        (Trainer(), (0,)),
    ],
)
def test_the_last_rank_runs_where_ranks_differ(framework: Any, ranks: tuple[int, ...]) -> None:
    case = make_case(**SIZES).replace(framework=framework)
    assert telling_ranks(case) == ranks
    assert telling_ranks(case.replace(topology=Topology(processes_per_node=1))) == (0,)


def test_an_old_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_torch(tmp_path, monkeypatch, version="2.10.1", cuda="12.8")
    with pytest.raises(CaseError, match=r"torch 2\.10\.1 is too old"):
        why_not_dry(make_case(**SIZES), make_gpu_machine())


def test_a_gpu_needs_no_torch_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_torch(tmp_path, monkeypatch, version="2.13.0+cpu")
    assert why_not_dry(make_case(**SIZES, framework=DDP()), make_gpu_machine()) is None
