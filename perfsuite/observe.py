"""What really runs: wrapper, sharding, dtypes, attention, versions. Worker side; imports torch.

Asked-for and observed can differ without an error (a library that falls back from FSDP to DDP on a CPU, an
optimizer that steps parameters nobody uses), so the worker looks, and refuses a run that is not the one asked
for.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from perfsuite import finetuning
from perfsuite.errors import MismatchError
from perfsuite.result import Observed
from perfsuite.torch_model import COMPUTE_DTYPES, DTYPES, expected_recomputing_blocks, has_attention

if TYPE_CHECKING:
    from perfsuite.case import Case
    from perfsuite.framework import Workload

NOT_OBSERVED = "not observed (compiled)"
NO_LINEAR = "not observed (no linear layer)"
NO_ATTENTION = "none"
"""Observed of a model that has none, such as Mamba: it runs what a case asks for by default, and no other."""


class Observer:
    """Looks at what trains: before the first optimizer step, through the second step, after the last.

    Its hooks on modules are there during the second step alone; the other steps run untouched.
    """

    def __init__(self, case: Case, workload: Workload) -> None:
        self.case = case
        self.workload = workload
        self.model: Any = workload.model
        self._optimizer: Any = None
        self._parameters_before: list[float] = []
        self._second_step: _SecondStep | None = None
        self._settings: dict[str, str] = {}

    def before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """For `register_optimizer_step_pre_hook`. The first optimizer seen is the one that is looked at."""
        if self._optimizer is None:
            self._optimizer = optimizer
            if self.model is None:
                self.model = owner(optimizer)
            self._parameters_before = _fingerprint(self.model)
            if not self.case.compile:  # a hook inside a compiled block would change what is measured
                self._second_step = _SecondStep(self.model)
        elif optimizer is self._optimizer and not self._settings:
            self._settings = self._look()

    def result(self) -> Observed:
        """Everything observed, after the run."""
        if not self._settings:
            raise MismatchError("nothing trained: no optimizer made two steps")
        changed = _fingerprint(self.model) != self._parameters_before
        settings = {**self._settings, "parameters_changed": "yes" if changed else "no"}
        return Observed(settings=settings, environment=environment(self.case.framework.packages))

    def check(self, observed: Observed) -> None:
        """Raises `MismatchError` where what was observed is not what the case asks for."""
        case = self.case
        asks_for_attention = observed.settings["attention"] != NO_ATTENTION or case.attention != "sdpa"
        expected: dict[str, str | None] = {
            "world_size": str(case.topology.world_size),
            "parameter_dtype": _name(DTYPES[case.precision]) + (", int8" * (case.quantization == "8bit")),
            "optimizer_parameters": "the model's",
            "parameters_changed": "yes",
            "attention": case.attention if asks_for_attention else NO_ATTENTION,
        }
        expected |= finetuning.expected(case, layers(self.model))
        if self._second_step is not None:
            blocks = len(self._second_step.forwards)
            recomputing = expected_recomputing_blocks(case.activation_checkpointing, blocks)
            expected["recomputing_blocks"] = f"{recomputing} of {blocks}"
            if case.framework.builds_model or self._second_step.compute_dtype != NO_LINEAR:
                expected["compute_dtype"] = _name(COMPUTE_DTYPES[case.precision])
        for key, asked in {**expected, **case.framework.expected(case)}.items():
            if asked is not None and observed.settings.get(key) != asked:
                raise MismatchError(
                    f"{key}: the case asks for {asked!r}, but {observed.settings.get(key)!r} ran. "
                    "Nothing measured this way would be what its name says."
                )

    def _look(self) -> dict[str, str]:
        parameters = list(self.model.parameters())
        trained = {id(p) for p in parameters if p.requires_grad}
        owned = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        fused = " fused" if self._optimizer.defaults.get("fused") else ""
        recomputing = compute_dtype = NOT_OBSERVED
        if self._second_step is not None:
            self._second_step.finish()
            recomputing = self._second_step.recomputing(self.case.gradient_accumulation)
            compute_dtype = self._second_step.compute_dtype
        return {
            **wrapping(self.model),
            "world_size": str(dist.get_world_size()) if dist.is_initialized() else "1, no process group",
            "backend": dist.get_backend() if dist.is_initialized() else "none",
            "device": parameters[0].device.type,
            "parameter_dtype": ", ".join(sorted({_dtype(p) for p in parameters})),
            "compute_dtype": compute_dtype,
            **_attention(self.model),
            "recomputing_blocks": recomputing,
            "optimizer": type(self._optimizer).__name__ + fused,
            "optimizer_parameters": "the model's" if owned == trained else "others",
            **finetuning.observed(self.model),
            **self.workload.settings,
        }


class _SecondStep:
    """Hooks on linear layers for the length of one step: what dtype they compute in, how often they run."""

    def __init__(self, model: nn.Module) -> None:
        self.compute_dtype = NO_LINEAR
        firsts = [linear for block in layers(model) if (linear := _first_linear(block)) is not None]
        self.forwards = [0] * len(firsts)
        """Of the first linear layer of each block: twice a micro-batch where it is recomputed."""
        self._handles = [
            linear.register_forward_pre_hook(self._counter(index)) for index, linear in enumerate(firsts)
        ]
        linears = filter(finetuning.is_linear, model.modules())
        plain = next((m for m in linears if finetuning.quantization_of(m) is None), None)
        if plain is not None:  # a quantised layer gives back the dtype that it was given
            self._handles.append(plain.register_forward_hook(self._see))

    def _counter(self, index: int) -> Any:
        def count(module: nn.Module, args: Any) -> None:
            self.forwards[index] += 1

        return count

    def _see(self, module: nn.Module, args: Any, output: Any) -> None:
        self.compute_dtype = _dtype(output if isinstance(output, Tensor) else output[0])

    def finish(self) -> None:
        for handle in self._handles:
            handle.remove()

    def recomputing(self, micro_batches: int) -> str:
        return f"{sum(count == 2 * micro_batches for count in self.forwards)} of {len(self.forwards)}"


def owner(optimizer: Any) -> nn.Module:
    """The outermost living module that has all parameters of `optimizer`: what it trains, as wrapped."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    living: Any = (thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module))
    owners: list[nn.Module] = [module for module in living if wanted <= {id(p) for p in module.parameters()}]
    if not owners:
        raise MismatchError(f"no module owns the parameters that {type(optimizer).__name__} steps")
    return max(owners, key=lambda module: sum(1 for _ in module.modules()))


def layers(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, in a model of any library: the longest list of modules with linear layers."""
    return max(_containers(model), key=len, default=[])


def _containers(module: nn.Module) -> Iterator[list[nn.Module]]:
    for child in module.children():
        members = list(child.children())
        linear = [_first_linear(member) is not None for member in members]
        # A pipeline stage keeps places for the blocks of others; a dictionary may also hold what is no block.
        is_blocks = any(linear) if isinstance(child, nn.ModuleList) else all(linear)
        if is_blocks and isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield members
        else:
            yield from _containers(child)


def _first_linear(module: nn.Module) -> nn.Module | None:
    return next((m for m in module.modules() if finetuning.is_linear(m)), None)


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


def _attention(model: nn.Module) -> dict[str, str]:
    """Which attention runs; in a Mamba, whether the scan runs by mamba_ssm or by transformers' own loop."""
    configs: Any = (getattr(module, "config", None) for module in model.modules())
    config: Any = next((config for config in configs if hasattr(config, "_attn_implementation")), None)
    if config is None:
        return {"attention": "?"}
    if has_attention(config):
        return {"attention": config._attn_implementation}
    # transformers takes the package if it can be imported, and says nothing if it cannot.
    return {"attention": NO_ATTENTION, "mamba_ssm": "loaded" if "mamba_ssm" in sys.modules else "none"}


def environment(packages: tuple[str, ...] = ()) -> dict[str, str]:
    """Versions and settings that may explain a change but do not make runs incomparable."""
    seen = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{package: importlib.metadata.version(package) for package in ("transformers", *packages)},
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


def _fingerprint(model: nn.Module) -> list[float]:
    """A number per trained parameter, over this rank's shard, that a step changes."""
    with torch.no_grad():
        return [
            float(torch.linalg.vector_norm(local, ord=1, dtype=torch.float32))
            for parameter in model.parameters()
            if parameter.requires_grad and (local := getattr(parameter, "_local_tensor", parameter)).numel()
        ]


def _placement(placement: Any) -> str:
    # By its dimension: where FSDP shards what tensor parallelism has sharded, torch has another class for it.
    name, dim = type(placement).__name__.removeprefix("_"), getattr(placement, "dim", None)
    return name if dim is None else f"{name}({dim})"


def _dtype(tensor: Tensor) -> str:
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
