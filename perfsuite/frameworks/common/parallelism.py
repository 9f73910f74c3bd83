"""Degrees of accelerate's `ParallelismConfig`, for the frameworks that train with accelerate's FSDP2.

Imports torch when used.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from perfsuite.case.case import Case
from perfsuite.case.framework import Promises
from perfsuite.case.hardware import Machine
from perfsuite.documents import Data
from perfsuite.errors import CaseError, MismatchError
from perfsuite.frameworks.base import DryPlan, Framework
from perfsuite.frameworks.common import patches
from perfsuite.frameworks.common.sharding import dry_plan, expected_shards, tensor_parallel_unsupported

if TYPE_CHECKING:
    from torch import Tensor, nn

# Package -> first version with everything that is used here.
NEEDS = {"accelerate": "1.12", "transformers": "5.23"}

Size = Annotated[int, Field(ge=1, strict=True)]


class Degrees(Data):
    """How many ranks replicate, shard, split sequences, and split layers: the mesh axes, outermost first."""

    dp_replicate_size: Size  # groups of ranks that replicate, while each group shards
    dp_shard_size: Size  # ranks that shard; without any degree, all ranks do
    cp_size: Size  # neighbouring ranks that hold parts of the same sequences, and shard as well
    tp_size: Size  # neighbouring ranks that split each layer and see the same data

    @property
    def alike(self) -> int:
        """The number of neighbouring ranks that train on the same sequences."""
        return self.cp_size * self.tp_size

    @property
    def given(self) -> bool:
        return any(size > 1 for size in self.model_dump().values())

    def refuse_without_shards(self) -> None:
        """Raise `ValueError` for degrees that accelerate rejects with FSDP2."""
        if self.given and self.dp_shard_size == 1 and (self.cp_size == 1 or self.dp_replicate_size > 1):
            raise ValueError(
                f"dp_shard_size=1 leaves FSDP2 nothing to shard ({self}); give at least 2, "
                "or no degree to shard among all ranks"
            )

    def check(self, case: Case) -> None:
        """Raise `CaseError` if the degrees do not multiply to the ranks, or do not divide the sequence."""
        ranks = case.topology.world_size
        product = math.prod(self.model_dump().values())
        if self.given and product != ranks:
            raise CaseError(
                f"{self} multiply to {product}, but the topology of the case has {ranks} processes; "
                "change one of them"
            )
        # Each rank has a part from either end.
        if self.cp_size > 1 and (case.sequence_length or 0) % (2 * self.cp_size):
            raise CaseError(
                f"sequence_length={case.sequence_length} is no multiple of {2 * self.cp_size}, twice the "
                "cp_size: change one of them"
            )

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        """Return why `case` cannot be trained with these degrees here, or None."""
        from packaging.version import Version

        if not self.given:
            return None
        if self.cp_size > 1 and machine.device == "cpu":
            return f"cp_size={self.cp_size}: a CPU has no kernel for it: run the case dry, as on a GPU"
        if self.cp_size > 1 and (case.attention != "sdpa" or case.precision == "fp32" or case.compile):
            settings = f"{case.attention!r}, precision {case.precision!r}, compile {case.compile}"
            return f"cp_size={self.cp_size} needs attention 'sdpa' in 16 bits, not compiled, not {settings}"
        split = self.tp_size > 1
        for package in ("accelerate", "transformers") if split else ("accelerate",):
            installed = importlib.metadata.version(package)
            lowest = NEEDS[package]
            if Version(installed) < Version(lowest):
                need = f"it needs {package}>={lowest}, and {installed} is installed"
                return f"{need}: pip install -U {package}"
        return tensor_parallel_unsupported(case, "tp_size", self.tp_size) if split else None

    def expected(self) -> dict[str, str]:
        """Return the mesh and the placements that must be observed. accelerate names the mesh's axes."""
        if not self.given:
            return {"sharding": "Shard(0)"}
        replicate = self.dp_replicate_size
        shard = self.dp_shard_size * self.cp_size
        expected = expected_shards("dp_shard_cp", replicate=replicate, shard=shard, tensor=self.tp_size)
        return expected | ({"context_parallel": str(self.cp_size)} if self.cp_size > 1 else {})

    def observed(self, accelerator: Any) -> dict[str, str]:
        """Return what the parameters do not show: FSDP2 shards them over `dp_shard` and `cp` as one axis."""
        if self.cp_size == 1:
            return {}
        return {"context_parallel": str(accelerator.torch_device_mesh["cp"].size())}

    def dry_plan(self, *, ranks_differ: bool, offloads: bool) -> DryPlan:
        """Return how accelerate's FSDP runs dry with these degrees."""
        plan = dry_plan(ranks_differ=ranks_differ, offloads=offloads, built_over=self.tp_size)
        if self.cp_size == 1:
            return plan

        def pretend() -> None:
            plan.pretend()
            masks = patches.module("transformers.masking_utils")
            patches.wrap(masks, "find_packed_sequence_indices", self._told_by_positions)

        return replace(plan, pretend=pretend, ranks_differ=True)

    def _told_by_positions(self, find: Any) -> Any:
        """Let transformers find gaps in positions, whose values a dry run does not know.

        A rank has one part of a sequence counted from its beginning, and another one equally far from its
        end. On all ranks except the last these are not adjacent: transformers takes them for two sequences
        and creates a mask, which accelerate drops.
        """
        import torch.distributed as dist

        def packed(positions: Tensor) -> Any:
            if (dist.get_rank() // self.tp_size + 1) % self.cp_size == 0:
                return find(positions)
            sequence = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
            bool((sequence[:, -1] == 0).all())  # the host waits for this value
            return sequence

        return packed

    @contextmanager
    def inputs(self, accelerator: Any, tokens: Tensor) -> Iterator[Mapping[str, Tensor]]:
        """Yield the model's inputs for whole sequences. Inside the `with`, they are cut to this rank's parts.

        The tensors are those of accelerate's `nd_parallel.py`, and each is cut in place.
        """
        import torch
        from torch.nn import functional

        if self.cp_size == 1:
            yield {"input_ids": tokens, "labels": tokens}
            return
        given = {
            "input_ids": tokens.clone(),
            "labels": tokens.clone(),
            "shift_labels": functional.pad(tokens[:, 1:], (0, 1), value=-100),
            "position_ids": torch.arange(tokens.shape[1], device=tokens.device)[None],
        }
        cut = [*given.values()]
        with accelerator.maybe_context_parallel(cut, [1] * len(cut), no_restore_buffers=set(cut)):
            yield given

    def config(self) -> Any:
        """Return accelerate's `ParallelismConfig`; None without degrees."""
        from accelerate.parallelism_config import ParallelismConfig

        return ParallelismConfig(**self.model_dump()) if self.given else None

    def model(self, case: Case, config: Any, device: Any) -> Any:
        """Build the case's model. Tensor parallelism splits it with the plan that transformers has for it."""
        from perfsuite.frameworks.common.model import blocks, build_model, model_without_weights
        from perfsuite.frameworks.common.private import resolve_parallel_plans
        from perfsuite.frameworks.common.weights import initialise

        if self.tp_size == 1:
            model: Any = build_model(case, device)
            if self.cp_size > 1 and not any(name.endswith("self_attn") for name, _ in model.named_modules()):
                problem = f"drops the mask of modules named self_attn, which {type(model).__name__} has not"
                raise MismatchError(f"cp_size={self.cp_size}: accelerate {problem}: give another model")
            return model
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        model = model_without_weights(case, device)
        plan, _, _ = resolve_parallel_plans(model)(DistributedConfig(tp_size=self.tp_size))
        names = {*dict(model.named_modules()), *dict(model.named_parameters())}  # a tied weight has one name
        plan = {name: style for name, style in plan.items() if name in names}
        apply_tensor_parallelism(model, config.get_device_mesh(device.type)["tp"], plan)
        model.tie_weights()
        initialise(model, blocks(model), seed=case.seed, device=device)
        return model

    def patch(self) -> dict[str, str]:
        """Give accelerate the class with which it replicates norms, and return the settings to record.

        accelerate 1.15 imports it from transformers, where it no longer exists in 5.23.
        """
        from transformers.integrations import tensor_parallel

        if self.tp_size == 1 or hasattr(tensor_parallel, "ReplicateParallel"):
            return {}
        setattr(tensor_parallel, "ReplicateParallel", _ReplicateParallel)  # noqa: B010  mypy: it has none
        return {"patched": "transformers.integrations.tensor_parallel.ReplicateParallel"}

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.model_dump().items())


class ByAccelerate(Framework):
    """Base of frameworks that train through accelerate, and have the options of `Degrees`."""

    packages: ClassVar[tuple[str, ...]] = ("accelerate",)
    promises: ClassVar[Promises] = Promises(
        ignores=frozenset({"quantization"}), takes={"precision": ("fp32", "bf16-mixed", "bf16")}
    )

    @model_validator(mode="before")
    @classmethod
    def _no_other_axis(cls, given: Any) -> Any:
        if "sp_size" in given:
            problem = f"sp_size={given['sp_size']!r}: accelerate splits sequences so with DeepSpeed alone"
            raise ValueError(f"{problem}, not with FSDP2; give cp_size in its place")
        return given

    @property
    def _degrees(self) -> Degrees:
        return Degrees(**{name: getattr(self, name) for name in Degrees.model_fields})


class _ReplicateParallel:
    """A style for modules with whole parameters and input on each rank, which return a plain tensor."""

    def prepare_module_tp(self, module: nn.Module, mesh: Any) -> None:
        from torch.distributed.tensor import DTensor, Replicate

        def whole(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            first, *others = inputs
            return DTensor.from_local(first, mesh, [Replicate()], run_check=False), *others

        module.register_forward_pre_hook(whole)
        module.register_forward_hook(lambda module, inputs, output: output.to_local())
