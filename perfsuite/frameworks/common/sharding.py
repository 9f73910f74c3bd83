"""Check whether a case can be sharded, and describe shards and meshes. Imports torch only when needed."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.frameworks.base import DryPlan
from perfsuite.frameworks.common.llama import USUAL_SHAPE

ShardingStrategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"]
Prefetch = Literal["BACKWARD_PRE", "BACKWARD_POST", "none"]


def dry_plan(
    *, ranks_differ: bool = False, offloads: bool = False, builds_whole: bool = True, built_over: int = 1
) -> DryPlan:
    """Return the plan for a dry run of torch's DDP or FSDP.

    The plan does not depend on the library that applies DDP or FSDP.
    """
    pinned = "offloading keeps shards in pinned host memory, which is not simulated"
    return DryPlan(
        impossible=pinned if offloads else None,
        pretend=_pretend,
        ranks_differ=ranks_differ,
        builds_whole=builds_whole,
        built_over=built_over,
    )


def _pretend() -> None:
    from perfsuite.frameworks.common import pretend

    pretend.ddp()
    pretend.fsdp1()


def prefetch(name: Prefetch) -> Any:
    """Return torch's `BackwardPrefetch` with this name. None for `none`."""
    from torch.distributed.fsdp import BackwardPrefetch

    return None if name == "none" else BackwardPrefetch[name]


def fsdp1_unsupported(
    case: Case,
    machine: Machine,
    strategy: ShardingStrategy,
    *,
    shard_group: int | None = None,
    cpu_offload: bool = False,
) -> str | None:
    """Return why FSDP1 cannot shard `case` with these options, or None.

    `shard_group` is the number of ranks in a group of HYBRID_SHARD. None: the ranks of a node are a group.
    """
    offload = offload_unsupported("cpu_offload", machine) if cpu_offload else None
    reason = offload or sharded_quantization_unsupported(case)
    if reason is not None:
        return reason
    if strategy in ("FULL_SHARD", "SHARD_GRAD_OP") and case.topology.world_size < 2:
        return f"{strategy} needs at least 2 processes (with 1, torch changes it to NO_SHARD)"
    if strategy == "HYBRID_SHARD":
        return hybrid_unsupported(shard_group or case.topology.processes_per_node, case)
    if shard_group is not None:
        return f"shard_group={shard_group} is for HYBRID_SHARD, not for {strategy}"
    return None


def hybrid_unsupported(group: int, case: Case) -> str | None:
    """Return why ranks cannot form at least two sharding groups of `group` ranks each, or None."""
    ranks = case.topology.world_size
    if group >= 2 and ranks % group == 0 and ranks // group >= 2:
        return None
    return (
        f"hybrid sharding in groups of {group} needs at least 2 groups of at least 2 processes, "
        f"but there are {ranks} processes"
    )


def hybrid_within_nodes_unsupported(strategy: str, case: Case, machine: Machine) -> str | None:
    """Return why `strategy`, which shards among the GPUs of each node, cannot run on `machine`, or None."""
    if machine.device == "cpu":
        return f"{strategy} shards among the GPUs of a node, but this machine has none"
    return hybrid_unsupported(case.topology.processes_per_node, case)


def offload_unsupported(option: str, machine: Machine) -> str | None:
    """Return why `option`, which keeps shards in host memory, cannot be used on `machine`, or None."""
    if machine.device == "cpu":
        return f"{option} copies from pinned memory to a GPU, but this machine has none"
    return None


def sharded_quantization_unsupported(case: Case) -> str | None:
    """Return why the case's quantised weights cannot be sharded, or None."""
    if case.quantization == "8bit":
        return (
            "8bit weights cannot be sharded, because the tensor of a weight does not contain the weight's "
            "scales. Use '4bit' or DDP"
        )
    if case.quantization == "4bit" and "mixed" in case.precision:
        return f"{case.precision} casts sharded weights, but packed 4bit weights cannot be cast. Give 'bf16'"
    return None


def tensor_parallel_unsupported(case: Case, option: str, ranks: int) -> str | None:
    """Return why tensor parallelism cannot split the case's model over `ranks` ranks, or None.

    `ranks` is the value of the framework's option `option`.
    """
    config = {**USUAL_SHAPE, **case.model.config}
    name = case.model.name
    # With torch 2.13 and compiled blocks, the loss of the second step differs by 0.2% from the loss with DDP.
    # Without compilation, the two losses are the same.
    if case.compile:
        return f"with {option} and compiled blocks, the loss differs from that with DDP: leave compile off"
    if case.lora is not None:
        return f"{option} cannot split lora adapters"
    model_type = config.get("model_type")
    if model_type != "llama":
        return f"{option} can split only llama models, but {name} is a {model_type}"
    heads = config["num_attention_heads"]
    split: dict[str, Any] = {
        "processes": case.topology.world_size,
        "attention heads": heads,
        "key-value heads": config.get("num_key_value_heads") or heads,
        "MLP columns": config["intermediate_size"],
        "tokens in the vocabulary": config["vocab_size"],
    }
    for what, count in split.items():
        if count % ranks:
            return f"{option}={ranks} must divide the {count} {what} of {name}"
    return None


def meshes_text(meshes: Iterable[Mapping[str, int]]) -> str:
    """Return meshes as text, with the name and size of each axis: `efsdp 8 x ep 8 and fsdp 64`."""
    texts = {" x ".join(f"{name} {size}" for name, size in mesh.items()) for mesh in meshes}
    return " and ".join(sorted(texts))


def expected_shards(axis: str, *, replicate: int, shard: int, tensor: int) -> dict[str, str]:
    """Return the mesh and the placements that the worker must observe with FSDP2.

    `axis` is the name of the axis over which parameters are sharded.
    """
    mesh = {"dp_replicate": replicate, axis: shard, "tp": tensor}
    placements = ["Shard(0)"]
    if tensor > 1:  # the placements of norms, row-parallel matrices and column-parallel matrices
        placements = ["Shard(0), Replicate", "Shard(0), Shard(1)", "StridedShard(0), Shard(0)"]
    return {
        "mesh": meshes_text([{name: size for name, size in mesh.items() if size > 1 or name == axis}]),
        "sharding": " and ".join("Replicate, " * (replicate > 1) + placement for placement in placements),
    }
