"""Degrees of accelerate's `ParallelismConfig`, for the frameworks that train through accelerate's FSDP2.

Imports torch when used.
"""

from __future__ import annotations

import importlib.metadata
import math
from typing import TYPE_CHECKING, Any

from perfsuite.case.case import Case
from perfsuite.documents import Data
from perfsuite.errors import CaseError
from perfsuite.frameworks.common.sharding import tensor_parallel_unsupported

if TYPE_CHECKING:
    from torch import nn

NEEDS = {"accelerate": "1.12", "transformers": "5.23"}
"""Package -> the first version whose mesh, or tensor parallelism, is the one that is used here."""


def refuse_other_axes(given: Any) -> Any:
    """Raise `ValueError` if options, as given, split sequences; return them."""
    for name in ("cp_size", "sp_size"):
        if name in given:
            raise ValueError(
                f"{name}={given[name]!r}: perfsuite does not split sequences by accelerate; leave it out, or "
                "take TorchTitan with --parallelism.context_parallel_degree (GPU or dry: a CPU has no kernel)"
            )
    return given


class Degrees(Data):
    """How many ranks replicate, shard, and split layers: the axes of the mesh, the outermost first."""

    dp_replicate_size: int
    dp_shard_size: int
    tp_size: int

    @property
    def given(self) -> bool:
        return any(size > 1 for size in self.model_dump().values())

    def refuse_without_shards(self) -> None:
        """Raise `ValueError` for degrees that accelerate refuses with FSDP2."""
        if self.given and self.dp_shard_size == 1:
            raise ValueError(
                f"dp_shard_size=1 leaves FSDP2 nothing to shard ({self}); give at least 2, "
                "or no degree to shard among all ranks"
            )

    def check(self, case: Case) -> None:
        """Raise `CaseError` if the degrees do not multiply to the ranks of the case."""
        ranks, product = case.topology.world_size, math.prod(self.model_dump().values())
        if self.given and product != ranks:
            raise CaseError(
                f"{self} multiply to {product}, but the topology of the case has {ranks} processes; "
                "change one of them"
            )

    def unsupported(self, case: Case) -> str | None:
        """Return why `case` cannot be trained so here, or None."""
        if not self.given:
            return None
        split = self.tp_size > 1
        for package in ("accelerate", *(["transformers"] if split else [])):
            if (reason := _too_old(package)) is not None:
                return reason
        return tensor_parallel_unsupported(case, "tp_size", self.tp_size) if split else None

    def expected(self) -> dict[str, str]:
        """Return the mesh and the placements that must be observed; accelerate names the mesh's axes."""
        if not self.given:
            return {"sharding": "Shard(0)"}
        axes = {"dp_replicate": self.dp_replicate_size, "dp_shard_cp": self.dp_shard_size, "tp": self.tp_size}
        placements = ["Shard(0)"]
        if self.tp_size > 1:  # norms; matrices split by their inputs; by their outputs
            placements = ["Shard(0), Replicate", "Shard(0), Shard(1)", "StridedShard(0), Shard(0)"]
        replicate = "Replicate, " * (self.dp_replicate_size > 1)
        return {
            "mesh": " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1),
            "sharding": " and ".join(replicate + placement for placement in placements),
        }

    def config(self) -> Any:
        """Return accelerate's `ParallelismConfig`; None without degrees."""
        from accelerate.parallelism_config import ParallelismConfig

        return ParallelismConfig(**self.model_dump()) if self.given else None

    def model(self, case: Case, config: Any, device: Any) -> Any:
        """Build the case's model; tensor parallelism splits it by the plan that transformers has for it."""
        from perfsuite.frameworks.common.model import blocks, build_model, model_without_weights
        from perfsuite.frameworks.common.weights import initialise

        if self.tp_size == 1:
            return build_model(case, device)
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        model: Any = model_without_weights(case, device)
        plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=self.tp_size))
        known = {*dict(model.named_modules()), *dict(model.named_parameters())}  # a tied weight by one name
        plan = {name: style for name, style in plan.items() if name in known}
        apply_tensor_parallelism(model, config.get_device_mesh(device.type)["tp"], plan)
        model.tie_weights()
        initialise(model, blocks(model), seed=case.seed, device=device)
        return model

    def patch(self) -> dict[str, str]:
        """Give accelerate the class by which it replicates norms, and return the settings to record.

        accelerate 1.15 imports it from transformers, which has it no longer in 5.23.
        """
        from transformers.integrations import tensor_parallel

        if self.tp_size == 1 or hasattr(tensor_parallel, "ReplicateParallel"):
            return {}
        setattr(tensor_parallel, "ReplicateParallel", _ReplicateParallel)  # noqa: B010  mypy: it has none
        return {"patched": "transformers.integrations.tensor_parallel.ReplicateParallel"}

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.model_dump().items())


class _ReplicateParallel:
    """A module whose parameters and input are whole on each rank, and which returns a plain tensor."""

    def prepare_module_tp(self, module: nn.Module, mesh: Any) -> None:
        from torch.distributed.tensor import DTensor, Replicate

        def whole(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            first, *others = inputs
            return DTensor.from_local(first, mesh, [Replicate()], run_check=False), *others

        module.register_forward_pre_hook(whole)
        module.register_forward_hook(lambda module, inputs, output: output.to_local())


def _too_old(package: str) -> str | None:
    from packaging.version import Version

    installed, lowest = importlib.metadata.version(package), NEEDS[package]
    if Version(installed) >= Version(lowest):
        return None
    return f"it needs {package}>={lowest}, and {installed} is installed: pip install -U {package}"
