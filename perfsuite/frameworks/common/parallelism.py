"""Degrees of parallelism for the frameworks that train with accelerate's FSDP2 and `ParallelismConfig`.

Torch is imported only when it is used.
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

# Package -> the first version that has all the functions used here.
NEEDS = {"accelerate": "1.12", "transformers": "5.23"}

Size = Annotated[int, Field(ge=1, strict=True)]


class Degrees(Data):
    """The sizes of the mesh axes, outermost first.

    If all sizes are 1, the case does not choose a mesh, and all ranks together shard one replica.
    """

    dp_replicate_size: Size  # number of groups of ranks. Each group holds one replica, sharded over its ranks
    dp_shard_size: Size  # number of ranks that shard a replica
    cp_size: Size  # number of neighbouring ranks that split the sequences. These ranks also shard the replica
    tp_size: Size  # number of neighbouring ranks that split each layer and see the same data

    @property
    def alike(self) -> int:
        """The number of neighbouring ranks that train on the same sequences."""
        return self.cp_size * self.tp_size

    @property
    def given(self) -> bool:
        return any(size > 1 for size in self.model_dump().values())

    def refuse_without_shards(self) -> None:
        """Raise `ValueError` for degrees that accelerate rejects for FSDP2."""
        if self.given and self.dp_shard_size == 1 and (self.cp_size == 1 or self.dp_replicate_size > 1):
            raise ValueError(
                f"dp_shard_size=1 leaves FSDP2 nothing to shard ({self}); give at least 2, "
                "or leave out all degrees: then all ranks shard"
            )

    def check(self, case: Case) -> None:
        """Raise `CaseError` if the degrees do not fit the number of ranks or the sequence length."""
        ranks = case.topology.world_size
        product = math.prod(self.model_dump().values())
        if self.given and product != ranks:
            raise CaseError(
                f"{self}: the product is {product}, but the topology of the case has {ranks} processes; "
                "change one of them"
            )
        # Each rank gets two parts of a sequence, one from each half.
        if self.cp_size > 1 and (case.sequence_length or 0) % (2 * self.cp_size):
            raise CaseError(
                f"sequence_length={case.sequence_length} is not a multiple of {2 * self.cp_size}, twice the "
                "cp_size: change one of them"
            )

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        """Return why `case` cannot be trained with these degrees here, or None."""
        from packaging.version import Version

        if not self.given:
            return None
        if self.cp_size > 1 and machine.device == "cpu":
            return f"cp_size={self.cp_size} needs a GPU. Run the case dry, with a simulated GPU"
        if self.cp_size > 1 and (case.attention != "sdpa" or case.precision == "fp32" or case.compile):
            settings = f"{case.attention!r}, precision {case.precision!r}, compile {case.compile}"
            return (
                f"cp_size={self.cp_size} needs attention 'sdpa', 16 bits and no compile. The case has "
                f"attention {settings}"
            )
        split = self.tp_size > 1
        for package in ("accelerate", "transformers") if split else ("accelerate",):
            installed = importlib.metadata.version(package)
            lowest = NEEDS[package]
            if Version(installed) < Version(lowest):
                need = f"it needs {package}>={lowest}, and {installed} is installed"
                return f"{need}: pip install -U {package}"
        return tensor_parallel_unsupported(case, "tp_size", self.tp_size) if split else None

    def expected(self) -> dict[str, str]:
        """Return the mesh (with accelerate's axis names) and the placements that the worker must observe."""
        if not self.given:
            return {"sharding": "Shard(0)"}
        replicate = self.dp_replicate_size
        shard = self.dp_shard_size * self.cp_size
        expected = expected_shards("dp_shard_cp", replicate=replicate, shard=shard, tensor=self.tp_size)
        return expected | ({"context_parallel": str(self.cp_size)} if self.cp_size > 1 else {})

    def observed(self, accelerator: Any) -> dict[str, str]:
        """Return the observed setting `context_parallel`, or an empty dict without context parallelism.

        The parameters do not show this setting, because FSDP2 shards them over `dp_shard` and `cp` as one
        axis.
        """
        if self.cp_size == 1:
            return {}
        return {"context_parallel": str(accelerator.torch_device_mesh["cp"].size())}

    def dry_plan(self, *, ranks_differ: bool, offloads: bool) -> DryPlan:
        """Return the plan for a dry run of accelerate's FSDP with these degrees."""
        plan = dry_plan(ranks_differ=ranks_differ, offloads=offloads, built_over=self.tp_size)
        if self.cp_size == 1:
            return plan

        def pretend() -> None:
            plan.pretend()
            masks = patches.module("transformers.masking_utils")
            patches.wrap(masks, "find_packed_sequence_indices", self._told_by_positions)

        return replace(plan, pretend=pretend, ranks_differ=True)

    def _told_by_positions(self, find: Any) -> Any:
        """Replace transformers' search for gaps in the token positions, whose values a dry run does not know.

        With context parallelism, a rank has two parts of a sequence. One part is as far from the sequence's
        start as the other is from its end. The two parts are adjacent only on the last rank. On the other
        ranks, transformers treats the parts as two sequences and creates a mask, which accelerate drops.
        """
        import torch.distributed as dist

        def packed(positions: Tensor) -> Any:
            if (dist.get_rank() // self.tp_size + 1) % self.cp_size == 0:
                return find(positions)
            sequence = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
            # As in transformers, the host waits for this value, although it is not used here.
            bool((sequence[:, -1] == 0).all())
            return sequence

        return packed

    @contextmanager
    def inputs(self, accelerator: Any, tokens: Tensor) -> Iterator[Mapping[str, Tensor]]:
        """Yield the inputs of the model. In the `with` block, accelerate has cut them to this rank's parts.

        The tensors are cut in place. accelerate's example `nd_parallel.py` has the same inputs.
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
        """Return accelerate's `ParallelismConfig`. None if no degree is given."""
        from accelerate.parallelism_config import ParallelismConfig

        return ParallelismConfig(**self.model_dump()) if self.given else None

    def model(self, case: Case, config: Any, device: Any) -> Any:
        """Build the case's model. Tensor parallelism follows transformers' plan for the model's class."""
        from perfsuite.frameworks.common.model import blocks, build_model, model_without_weights
        from perfsuite.frameworks.common.private import resolve_parallel_plans
        from perfsuite.frameworks.common.weights import initialise

        if self.tp_size == 1:
            model: Any = build_model(case, device)
            if self.cp_size > 1 and not any(name.endswith("self_attn") for name, _ in model.named_modules()):
                problem = f"needs modules named self_attn, but {type(model).__name__} has none"
                raise MismatchError(f"cp_size={self.cp_size}: accelerate {problem}. Give another model")
            return model
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        model = model_without_weights(case, device)
        plan, _, _ = resolve_parallel_plans(model)(DistributedConfig(tp_size=self.tp_size))
        # The plan can name a tied weight twice, but `named_parameters` has only one of these names.
        names = {*dict(model.named_modules()), *dict(model.named_parameters())}
        plan = {name: style for name, style in plan.items() if name in names}
        apply_tensor_parallelism(model, config.get_device_mesh(device.type)["tp"], plan)
        model.tie_weights()
        initialise(model, blocks(model), seed=case.seed, device=device)
        return model

    def patch(self) -> dict[str, str]:
        """Add a missing class to transformers. accelerate uses this class to replicate norms.

        Return the settings to record. accelerate 1.15 imports `ReplicateParallel` from transformers, but
        transformers 5.23 no longer has this class.
        """
        from transformers.integrations import tensor_parallel

        if self.tp_size == 1 or hasattr(tensor_parallel, "ReplicateParallel"):
            return {}
        # mypy would reject an assignment, because the module has no such attribute.
        setattr(tensor_parallel, "ReplicateParallel", _ReplicateParallel)  # noqa: B010
        return {"patched": "transformers.integrations.tensor_parallel.ReplicateParallel"}

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.model_dump().items())


class ByAccelerate(Framework):
    """Base class of the frameworks that train through accelerate and have the options of `Degrees`."""

    packages: ClassVar[tuple[str, ...]] = ("accelerate",)
    promises: ClassVar[Promises] = Promises(
        ignores=frozenset({"quantization"}), takes={"precision": ("fp32", "bf16-mixed", "bf16")}
    )

    @model_validator(mode="before")
    @classmethod
    def _no_other_axis(cls, given: Any) -> Any:
        if "sp_size" in given:
            problem = f"sp_size={given['sp_size']!r}: accelerate supports sp_size only with DeepSpeed"
            raise ValueError(f"{problem}, not with FSDP2; give cp_size instead")
        return given

    @property
    def _degrees(self) -> Degrees:
        return Degrees(**{name: getattr(self, name) for name in Degrees.model_fields})


class _ReplicateParallel:
    """A parallel style that replicates parameters and inputs of a module. The output is a plain tensor."""

    def prepare_module_tp(self, module: nn.Module, mesh: Any) -> None:
        from torch.distributed.tensor import DTensor, Replicate

        def whole(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            first, *others = inputs
            return DTensor.from_local(first, mesh, [Replicate()], run_check=False), *others

        module.register_forward_pre_hook(whole)
        module.register_forward_hook(lambda module, inputs, output: output.to_local())
