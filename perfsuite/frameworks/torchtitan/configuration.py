"""Read a configuration from torchtitan's registry, in the same way as torchtitan's command line."""

# ruff: noqa: E402  compat.without_missing must run before torchtitan is imported

import functools
import importlib
import io
import re
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from typing import Any

import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from perfsuite.frameworks.torchtitan import compat

compat.without_missing()

from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.trainer import Trainer

from perfsuite.case.case import Case
from perfsuite.documents import did_you_mean
from perfsuite.errors import MismatchError
from perfsuite.frameworks.base import missing_package
from perfsuite.frameworks.common.float8 import low_precision
from perfsuite.frameworks.common.sharding import meshes_text

ATTENTION = {ScaledDotProductAttention: "sdpa", FlexAttention: "flex", VarlenAttention: "varlen"}
PRECISIONS = {"float32 float32": "fp32", "float32 bfloat16": "bf16-mixed", "bfloat16 bfloat16": "bf16"}
"""`training.dtype` and `training.mixed_precision_param` -> a case's precision."""
RECOMPUTED = {"NoneType": "none", "FullAC.Config": "full", "SelectiveAC.Config": "selective-op"}


def read(case: Case) -> Any:
    """Return the case's `Trainer.Config`. Raises `MismatchError` if torchtitan rejects it."""
    options: Any = case.framework
    graphs = f"--training.{'' if options.disable_cuda_graphs else 'no-'}disable-cuda-graphs"
    words = [f"--module={options.module}", f"--config={options.config}", graphs, f"--debug.seed={case.seed}"]
    words += options.overrides
    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(said):
            config = ConfigManager().parse_args(words)
    except (Exception, SystemExit) as error:
        text = str(error)
        if isinstance(error, SystemExit):
            # Remove the frame that torchtitan draws around the message.
            text = " ".join(re.sub("[\u2500-\u257f]", " ", said.getvalue()).split())
        names = (options.config, options.module)
        hints = [did_you_mean(name, {*re.findall(r"'(\w+)'", text)}.difference(names)) for name in names]
        if "torchao" in text:
            missing = missing_package("torchao")
            if missing:
                hints.append(f" {missing}")
        cause = _import_error(options.module) if isinstance(error, ImportError) else ""
        raise MismatchError(f"torchtitan rejects {' '.join(words)}: {text}{cause}{''.join(hints)}") from error
    sees = getattr(getattr(config.model_spec, "model", None), "vision_encoder", None)
    if getattr(config, "_owner", None) is not Trainer or sees is not None:
        raise MismatchError(
            f"{options.config} trains on images or has its own trainer. Choose a configuration for text"
        )
    return config


def _import_error(module: str) -> str:
    """Return why one of torchtitan's own models cannot be imported, or "". torchtitan does not report why."""
    try:
        importlib.import_module(f"torchtitan.models.{module}.config_registry")
    except ImportError as error:
        return f" ({error})"
    return ""


@functools.cache
def expected(case: Case) -> dict[str, str]:
    """Return the settings that the worker must observe.

    Raises `MismatchError` if the configuration contradicts the case.
    """
    config = read(case)
    world_size = case.topology.world_size
    try:
        dims = ParallelDims.from_config(config.parallelism, world_size)
    except AssertionError:
        degrees = ((name, value) for name, value in asdict(config.parallelism).items() if "_degree" in name)
        degrees_text = ", ".join(f"{name} {value}" for name, value in degrees if "expert" not in name)
        raise MismatchError(
            f"{degrees_text}: their product must be the number of processes of the case, {world_size}"
        ) from None
    model = config.model_spec.model
    experts = [moe.num_experts for _, moe, *_ in model.traverse(MoE.Config)]
    problems = [*_conflicts(config, dims, case), *_impossible(config, dims, experts)]
    if problems:
        raise MismatchError(f"{case.framework.slug()}: {'; '.join(problems)}")
    attention = {name for kind, name in ATTENTION.items() if any(model.traverse(kind.Config))}
    layers = (layer for kind in (Linear, GroupedExperts) for _, layer, *_ in model.traverse(kind.Config))
    return {
        "wrapper": "FSDPModule",
        "mesh": _mesh(dims),
        "context_parallel": str(dims.cp),
        "experts_per_rank": str(experts[0] // dims.ep) if experts else "none",
        "low_precision_modules": low_precision(layers),
        "pipeline": pipeline(dims.pp, get_schedule_class(config.parallelism.pipeline_parallel_schedule)),
        "attention": " and ".join(sorted(attention)) if torch.cuda.is_available() else "sdpa",
        "cuda_graphs": "no" if config.training.disable_cuda_graphs else "yes",
    }


def pipeline(stages: int, schedule: Any) -> str:
    """Return the number of a pipeline's ranks and the class of its schedule, as text.

    `schedule` is an object or a class.
    """
    kind = schedule if isinstance(schedule, type) else type(schedule)
    return f"{stages} ranks, {kind.__name__}" if stages > 1 else "none"


def _mesh(dims: ParallelDims) -> str:
    """Return the meshes of the parameters as text. With expert parallelism, experts have their own mesh."""
    shards = dims.dp_shard * dims.cp
    dense = {"fsdp": shards, **({"tp": dims.tp} if dims.tp > 1 else {})}
    meshes = [dense, {"efsdp": shards * dims.tp // dims.ep, "ep": dims.ep}] if dims.ep > 1 else [dense]
    outer = {"dp_replicate": dims.dp_replicate} if dims.dp_replicate > 1 else {}
    return meshes_text({**outer, **mesh} for mesh in meshes)


def _conflicts(config: Any, dims: ParallelDims, case: Case) -> Iterator[str]:
    training = config.training
    options = case.framework
    sequences = training.local_batch_size * dims.dp_replicate * dims.dp_shard
    recomputed = type(config.activation_checkpoint).__qualname__
    dtypes = f"{training.dtype} {training.mixed_precision_param}"
    says = {
        ("training.seq_len", "sequence_length"): training.seq_len,
        ("training.local_batch_size", "micro_batch"): training.local_batch_size,
        ("training.global_batch_size divided by the sequences of all ranks", "gradient_accumulation"): (
            max(training.global_batch_size, sequences) / sequences
        ),
        ("training.dtype, mixed_precision_param", "precision"): PRECISIONS.get(dtypes, dtypes),
        ("activation_checkpoint", "activation_checkpointing"): RECOMPUTED.get(recomputed, recomputed),
        ("compile.enable", "compile"): config.compile.enable,
        ("debug.seed", "seed"): config.debug.seed,
    }
    for field in ("learning_rate", "attention"):
        if getattr(case, field) != Case.model_fields[field].default:
            yield f"{field}: the configuration sets it, so remove it from the case"
    if case.model.config:
        yield (
            "model: the configuration has its own model, so give "
            f"model=Model.named({config.model_spec.flavor!r})"
        )
    for (path, field), has in says.items():
        needs = getattr(case, field)
        if has != needs:
            yield f"{path}: {has!r}, but the case's {field} needs {needs!r}"
    if training.disable_cuda_graphs is not options.disable_cuda_graphs:  # type: ignore[attr-defined]
        yield "training.disable_cuda_graphs: give TorchTitan(disable_cuda_graphs=...) instead of an override"
    if training.steps < case.total_steps:
        more = f"add --training.steps={case.total_steps} to overrides"
        yield f"training.steps: {training.steps}, but the case has {case.total_steps}: {more}"


def _impossible(config: Any, dims: ParallelDims, experts: list[int]) -> Iterator[str]:
    """Yield a message for each option that torch, this machine or the model does not support."""
    if any(group.optimizer_name == "DistMuon" for group in config.optimizer.param_groups):
        yield "DistMuon needs spmd_types, which torch 2.13 does not support: write a configuration with AdamW"
    if dims.cp > 1 and not torch.cuda.is_available():
        yield f"context_parallel_degree {dims.cp} needs a GPU. Run the case dry, with a simulated GPU"
    shared = {"dp_shard x cp x tp": dims.dp_shard * dims.cp * dims.tp}
    shared["the number of experts"] = experts[0] if experts else 0
    for what, count in shared.items():
        if (count or 1) % dims.ep:
            yield f"expert_parallel_degree {dims.ep} must divide {what}, {count}"
