"""The cases of a first night, for as many GPUs or cores as the machine has."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from perfsuite.case.case import Case, Topology
from perfsuite.case.hardware import Machine
from perfsuite.case.model import Model
from perfsuite.doctor.injected import small_case
from perfsuite.errors import CaseError

Size = Literal["full", "tiny", "simulated"]
"""`full`: Llamas of 1 and 8 billion parameters. `tiny`: a tiny Llama. `simulated`: no training at all."""

SIMULATED = "simulated on CPUs: nothing here says anything about GPUs"
"""The first sentence on the page and in the terminal if the training is simulated."""
LARGE = "llama-3.1-8b"
MIDDLE = "llama-3.2-1b"
PARAMETERS = {LARGE: 8.0e9, MIDDLE: 1.24e9}
BYTES_PER_PARAMETER = 16  # in fp32: parameter, gradient and the two moments of AdamW
MAX_SHARE = 0.5  # maximum share of a GPU's memory for parameters and their state; activations need the rest
LAUNCH_TIMEOUT_S = 600  # long, because a framework can compile or import for minutes
SMALL_BATCH = ("--training.seq_len=64", "--training.local_batch_size=2")
"""Arguments of torchtitan for its own small models."""


def usual_size(machine: Machine) -> Size:
    """Return the size for a machine: `full` on GPUs, `tiny` on a CPU."""
    return "full" if machine.device == "cuda" else "tiny"


def spread_case(machine: Machine, size: Size) -> Case:
    """Return the case whose launches show the noise. It uses every GPU, or two cores."""
    small = small_case(machine)
    if size == "simulated":
        return small.replace(framework="fake", topology=Topology(processes_per_node=2))
    if size == "tiny":
        return small.replace(framework="fsdp2")
    return _full(machine, small.topology.world_size)


def _full(machine: Machine, ranks: int) -> Case:
    model = _largest(machine, ranks)
    if model is None:
        return small_case(machine).replace(framework="fsdp2")
    return small_case(machine).replace(
        model=model,
        framework="fsdp2",
        sequence_length=4096,
        micro_batch=1,
        precision="fp16-mixed" if machine.emulates("bf16") else "bf16-mixed",
        activation_checkpointing="full",
        max_warmup_steps=20,
        steps=40,
        timeout_s=600,
        learning_rate=3e-4,
    )


def _largest(machine: Machine, shards: int) -> str | None:
    """Return the largest model whose state fits if it is divided into this many shards."""
    room = MAX_SHARE * machine.memory_bytes * shards
    return next((name for name, count in PARAMETERS.items() if BYTES_PER_PARAMETER * count <= room), None)


def framework_cases(machine: Machine, size: Size) -> list[tuple[str, Case | None, str]]:
    """Return the cases of the step `frameworks`: a name, the case or None, and why there is no case."""
    spread = spread_case(machine, size)
    ranks = spread.topology.world_size
    if size == "simulated":
        return [("fake", spread, ""), ("fake with another batch", spread.replace(micro_batch=2), "")]
    short = spread.replace(max_warmup_steps=10, steps=20, timeout_s=LAUNCH_TIMEOUT_S)
    replicated = _replicated(machine, short) if size == "full" else short
    cases: list[tuple[str, Case | None, str]] = []
    for name, divisor, options, fields in _rows(ranks, short):
        base = replicated if name == "DDP" else short
        if ranks % divisor:
            why = f"it needs a multiple of {divisor} ranks, and this machine has {ranks}"
            cases.append((name, None, why))
            continue
        try:
            cases.append((name, base.replace(framework=options, **fields), ""))
        except CaseError as error:  # for example, the framework was removed
            cases.append((name, None, str(error)))
    return cases


def _replicated(machine: Machine, case: Case) -> Case:
    """Return a case that each GPU can hold without sharding."""
    model = _largest(machine, 1)
    if model is None:
        return small_case(machine)
    return case.replace(model=model)


def _rows(ranks: int, case: Case) -> Sequence[tuple[str, int, Any, Mapping[str, Any]]]:
    """Return the name, a divisor, the framework and the fields of each case.

    A case can run only if the number of ranks is a multiple of its divisor.
    """
    half = max(ranks // 2, 1)
    pipeline_of_titan = _titan("llama3", "pipeline_parallel_degree=2", case)
    experts = _titan("deepseek_v3", "expert_parallel_degree=2", case)
    context = _titan("llama3", "context_parallel_degree=2", case)
    own = {
        "sequence_length": 64,
        "micro_batch": 2,
        "precision": "fp32" if case.precision == "fp32" else "bf16-mixed",
        "activation_checkpointing": "selective-op",
    }
    pipeline = {"activation_checkpointing": "none", "micro_batch": 1, "gradient_accumulation": 4}
    return [
        ("DDP", 1, "ddp", {}),
        ("FSDP1", 1, {"name": "fsdp", "sharding_strategy": "FULL_SHARD"}, {}),
        ("FSDP2 in two groups", 4, {"name": "fsdp2", "shard_group": half}, {}),
        ("Trainer", 1, {"name": "trainer", "fsdp": "full_shard auto_wrap"}, {}),
        ("accelerate, tensor parallel", 4, _accelerate(half, "tp_size"), {}),
        ("accelerate, context parallel", 2, _accelerate(half, "cp_size"), {}),
        ("nanotron", 2, {"name": "nanotron", "tp": half, "pp": 2}, {**pipeline, "precision": _pure(case)}),
        ("torchtitan", 1, "torchtitan", {}),
        ("torchtitan, tensor parallel", 2, {"name": "torchtitan", "tensor_parallel": 2}, {}),
        ("torchtitan, pipeline", 2, pipeline_of_titan, _named("llama3", own)),
        ("torchtitan, experts", 2, experts, _named("deepseek", own)),
        ("torchtitan, context parallel", 2, context, _named("llama3", own)),
        ("torchtitan, CUDA graphs", 1, {"name": "torchtitan", "disable_cuda_graphs": False}, {}),
        ("DeepSpeed, ZeRO 3", 1, {"name": "deepspeed", "config": {"zero_optimization": {"stage": 3}}}, {}),
    ]  # fmt: skip


def _accelerate(shards: int, other: str) -> dict[str, object]:
    return {"name": "accelerate", "strategy": "fsdp2", "dp_shard_size": shards, other: 2}


def _titan(module: str, degree: str, case: Case) -> dict[str, object]:
    """Return torchtitan's settings for the debug model in the registry of a module, such as `llama3`.

    The model trains for as many steps as `case`. On a CPU, it trains in fp32, because experts in bf16 take
    minutes there.
    """
    balanced = ("--debug.moe_force_load_balance",) if "expert" in degree else ()
    precision = ("--training.mixed_precision_param=float32",) if case.precision == "fp32" else ()
    steps = f"--training.steps={case.total_steps}"
    overrides = (*SMALL_BATCH, steps, *precision, f"--parallelism.{degree}", *balanced)
    return {"name": "torchtitan", "module": module, "config": f"{module}_debugmodel", "overrides": overrides}


def _named(model: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": Model.named(model),
        "learning_rate": Case.model_fields["learning_rate"].default,
        **fields,
    }


def _pure(case: Case) -> str:
    """Return the precision of nanotron, which trains in pure bf16 or in fp32."""
    return "bf16" if case.precision == "bf16-mixed" else "fp32"
