"""A dry run on pretended CPU tensors does what a real launch of a tiny twin does, by every framework."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from perfsuite import (
    DDP,
    FSDP,
    FSDP2,
    Accelerate,
    Case,
    Lightning,
    LoRA,
    Nanotron,
    Topology,
    TorchTitan,
    Trainer,
)
from perfsuite.dry.driver import dry_run
from perfsuite.launch.machine import detect_cpu
from perfsuite.measure import launch_once
from perfsuite.results.counts import Counts, of_rank
from perfsuite.results.run import Run

YAML = Path(__file__).parents[2] / "bench_cases" / "configs" / "fsdp_cpu.yaml"
LLAMA = Case(
    model="llama-tiny",
    framework=DDP(bucket_cap_mb=1),
    sequence_length=64,
    micro_batch=4,
    topology=Topology(processes_per_node=2),
    hardware="cpu",
    max_warmup_steps=5,
    steps=10,
    timeout_s=600,
)
TWINS = {
    "ddp, small buckets": LLAMA,
    "ddp, accumulation, bf16": LLAMA.replace(gradient_accumulation=2, precision="bf16-mixed"),
    "ddp, lora": LLAMA.replace(framework=DDP(), lora=LoRA(rank=8, alpha=16)),
    "fsdp": LLAMA.replace(framework=FSDP(sharding_strategy="FULL_SHARD")),
    "fsdp2, recomputing": LLAMA.replace(
        framework=FSDP2(), precision="bf16-mixed", activation_checkpointing="selective-op"
    ),
    "fsdp2, tensor parallel": LLAMA.replace(framework=FSDP2(tensor_parallel=2)),
    "accelerate, ddp": LLAMA.replace(framework=Accelerate(strategy="ddp")),
    "accelerate, fsdp by a file": LLAMA.replace(framework=Accelerate(config=YAML)),
    "accelerate, fsdp2": LLAMA.replace(framework=Accelerate(strategy="fsdp2")),
    "trainer": LLAMA.replace(framework=Trainer(fsdp="full_shard auto_wrap")),
    "lightning, ddp": LLAMA.replace(framework=Lightning(strategy="ddp")),
    "lightning, fsdp2": LLAMA.replace(framework=Lightning(strategy="fsdp2")),
    "torchtitan": LLAMA.replace(framework=TorchTitan()),
    "torchtitan, tensor parallel": LLAMA.replace(framework=TorchTitan(tensor_parallel=2)),
    "nanotron, data parallel": LLAMA.replace(framework=Nanotron(dp=2)),
    "nanotron, tensor parallel": LLAMA.replace(framework=Nanotron(tp=2)),
}


def launched(case: Case, directory: Path) -> Run:
    run = launch_once(case, detect_cpu("a twin"), directory)
    assert run.failure is None, run.failure
    return run


def without_gloos_copies(counts: Counts) -> tuple[Counter[str], Counter[str]]:
    """Kernels by phase and calls by operator. Gloo first copies what it is to scatter; NCCL does not."""
    kernels, ops = Counter[str](counts.kernels), Counter[str](counts.ops)
    for each in counts.collectives:
        if each.kind == "reduce_scatter":
            kernels[each.phase] -= each.count
            ops["aten.copy_"] -= each.count
    return kernels, ops


def divided_by_the_hook(ops: Counter[str]) -> Counter[str]:
    """With a hook DDP copies gradients into its buckets and divides these; without it does both in one."""
    together = ops["aten.mul"] + ops["aten.copy_"]
    return ops + Counter({"aten.mul": -ops["aten.mul"], "aten.copy_": together - ops["aten.copy_"]})


@pytest.mark.launch
@pytest.mark.parametrize("name", TWINS)
def test_a_dry_run_does_what_a_launch_of_the_twin_does(name: str, tmp_path: Path) -> None:
    case = TWINS[name]
    real, dry = launched(case, tmp_path / "real"), dry_run(case, tmp_path / "dry")
    assert dry.failure is None, dry.failure
    for entry in dry.counts:
        for rank in entry.ranks:
            of_launch = of_rank(real.counts, rank)
            assert of_launch is not None
            check(
                entry.counts, of_launch, is_ddp="DistributedDataParallel" in seen(dry), name=name, case=case
            )


def seen(run: Run) -> str:
    assert run.observed is not None
    return run.observed.settings["wrapper"]


def twice_held(case: Case) -> int:
    """Bytes that a dry run holds twice: the mask (bool) of nanotron's batch, a real tensor of its data loader
    that becomes a fake one when the step uses it."""
    return case.micro_batch * case.sample_length if case.framework.name == "nanotron" else 0


def check(dry: Counts, real: Counts, *, is_ddp: bool, name: str, case: Case) -> None:
    assert dry.collectives == real.collectives
    assert dry.flops == real.flops
    assert dry.host_reads == real.host_reads
    assert dry.device_copies == real.device_copies
    splits_tensors = "tensor parallel" in name  # by DTensor's collectives, whose copies no mode sees
    kernels, ops = Counter[str](real.kernels), Counter[str](real.ops)
    if not splits_tensors:
        kernels, ops = without_gloos_copies(real)
    assert Counter[str](dry.kernels) == kernels
    if is_ddp:
        assert divided_by_the_hook(Counter(dry.ops)) == divided_by_the_hook(ops)
    else:
        assert Counter(dry.ops) == ops
    assert dry.memory is not None
    assert real.memory is not None
    if not splits_tensors:  # there gloo's threads hold tensors for a while: unlike in two launches
        assert dry.memory.peak == real.memory.peak + twice_held(case)
    assert dry.memory.growth == real.memory.growth
