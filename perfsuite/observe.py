"""What really runs: wrapper, sharding, dtypes, attention, versions. Worker side; imports torch.

Asked-for and observed can differ without an error (a library that falls back from FSDP to DDP on a CPU, an
optimizer that steps parameters nobody uses), so the worker looks, and refuses a run that is not the one asked
for.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from perfsuite.errors import MismatchError
from perfsuite.result import Observed
from perfsuite.torch_model import DTYPES, expected_recomputing_blocks

if TYPE_CHECKING:
    from perfsuite.case import Case
    from perfsuite.framework import Workload

COMPUTE_DTYPES = {"fp32": "float32", "bf16-mixed": "bfloat16", "bf16": "bfloat16"}


class Observer:
    """Looks at a workload before it runs, while it makes its first step, and after it ran."""

    def __init__(self, case: Case, workload: Workload) -> None:
        self.case = case
        self.workload = workload
        self.compute_dtype: str | None = None
        modules = workload.model.modules()
        self._forwards = [m.perfsuite_forwards for m in modules if "perfsuite_forwards" in vars(m)]
        self._parameters_before = _fingerprint(workload.optimizer)
        self._watch_compute_dtype()

    def _watch_compute_dtype(self) -> None:
        """The dtype that the first linear layer's output has, seen once."""
        if self.case.compile:
            return  # a hook inside a compiled block would change what is measured
        layer = next(m for m in self.workload.model.modules() if _is_linear(m))

        def see(module: nn.Module, args: Any, output: Tensor) -> None:
            self.compute_dtype = _dtype(output)
            handle.remove()

        handle = layer.register_forward_hook(see)

    def result(self) -> Observed:
        """Everything observed, after the run."""
        return Observed(settings=self._settings(), environment=environment())

    def check(self, observed: Observed) -> None:
        """Raises `MismatchError` where what was observed is not what the case asks for."""
        case = self.case
        expected = {
            **case.framework.expected(case),
            "world_size": str(case.topology.world_size),
            "parameter_dtype": _name(DTYPES[case.precision]),
            "optimizer_parameters": "the model's",
            "parameters_changed": "yes",
            "attention": case.attention,
        }
        if not case.compile:
            blocks = len(self._forwards)
            recomputing = expected_recomputing_blocks(case.activation_checkpointing, blocks)
            expected["recomputing_blocks"] = f"{recomputing} of {blocks}"
            expected["compute_dtype"] = COMPUTE_DTYPES[case.precision]
        for key, asked in expected.items():
            if observed.settings.get(key) != asked:
                raise MismatchError(
                    f"{key}: the case asks for {asked!r}, but {observed.settings.get(key)!r} ran. "
                    "Nothing measured this way would be what its name says."
                )

    def _recomputing(self) -> str:
        if self.case.compile:
            return "not observed (compiled)"
        once = self.case.total_steps * self.case.gradient_accumulation
        twice = sum(forwards.count == 2 * once for forwards in self._forwards)
        return f"{twice} of {len(self._forwards)}"

    def _settings(self) -> dict[str, str]:
        model, optimizer = self.workload.model, self.workload.optimizer
        parameters = list(model.parameters())
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        changed = _fingerprint(optimizer) != self._parameters_before
        attention = next(
            (m.config._attn_implementation for m in model.modules() if hasattr(m, "config")), "?"
        )
        return {
            **wrapping(model),
            "world_size": str(dist.get_world_size()),
            "backend": dist.get_backend(),
            "device": parameters[0].device.type,
            "parameter_dtype": ", ".join(sorted({_dtype(p) for p in parameters})),
            "compute_dtype": self.compute_dtype or "not observed (compiled)",
            "attention": attention,
            "recomputing_blocks": self._recomputing(),
            "optimizer": type(optimizer).__name__ + (" fused" if optimizer.defaults.get("fused") else ""),
            "optimizer_parameters": "the model's" if owned == {id(p) for p in parameters} else "others",
            "parameters_changed": "yes" if changed else "no",
        }


def wrapping(model: nn.Module) -> dict[str, str]:
    """Which wrapper really is around the model (or inside it), and how it shards."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    modules = list(model.modules())
    found: dict[str, list[Any]] = {
        kind.__name__: [module for module in modules if isinstance(module, kind)]
        for kind in (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    }
    wrapper = " + ".join(name for name, instances in found.items() if instances) or "none"
    shardings = {module.sharding_strategy.name for module in found["FullyShardedDataParallel"]}
    shardings |= {
        ", ".join(map(_placement, p.placements)) for p in model.parameters() if isinstance(p, DTensor)
    }
    wrapped = str(sum(len(instances) for instances in found.values()))
    return {
        "wrapper": wrapper,
        "sharding": " and ".join(sorted(shardings)) or "none",
        "wrapped_modules": wrapped,
    }


def environment() -> dict[str, str]:
    """Versions and settings that may explain a change but do not make runs incomparable."""
    seen = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "kernel": platform.release(),
        "threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available():
        seen["cuda"] = str(torch.version.cuda)
        seen["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        seen["cudnn"] = str(torch.backends.cudnn.version())
    kept = ("NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "OMP_", "GLOO_")
    seen |= {
        key: value for key, value in os.environ.items() if key.startswith(kept) and "TORCHELASTIC" not in key
    }
    return seen


def _fingerprint(optimizer: Any) -> list[float]:
    """A number per parameter of the optimizer's, over this rank's shard, that a step changes."""
    with torch.no_grad():
        return [
            float(torch.linalg.vector_norm(local, ord=1, dtype=torch.float32))
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (local := getattr(parameter, "_local_tensor", parameter)).numel()
        ]


def _placement(placement: Any) -> str:
    return f"Shard({placement.dim})" if placement.is_shard() else type(placement).__name__


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _dtype(tensor: Tensor) -> str:
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
