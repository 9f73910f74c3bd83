"""Observe the wrapper, sharding, dtypes, attention and versions that are really in use.

A training run that does not match its case is refused. Some facts can be checked only by comparing ranks.
They are reported as `RankEvidence`.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from perfsuite.errors import MismatchError
from perfsuite.frameworks.base import framework_of
from perfsuite.frameworks.common import finetuning, float8
from perfsuite.frameworks.common.model import (
    COMPUTE_DTYPES,
    DTYPES,
    dtype_name,
    has_attention,
    is_checkpointed,
)
from perfsuite.frameworks.common.private import attn_implementation
from perfsuite.frameworks.common.sharding import meshes_text
from perfsuite.results.rank_report import Dtypes, Observed, RankEvidence
from perfsuite.worker.observation import engines, replicas, software
from perfsuite.worker.observation.dtypes import dtypes_of
from perfsuite.worker.observation.optimizers import living, parameters_of
from perfsuite.worker.observation.second_step import NO_LINEAR, NOT_OBSERVED, SecondStep, layers

if TYPE_CHECKING:
    from perfsuite.case.case import Case
    from perfsuite.frameworks.base import Workload

NO_CONFIGURATION = "not observed (the model is not transformers' own)"
GRAPHS_NOT_OBSERVED = "not observed (torch does not count graphs)"
# The value for a model without attention, such as Mamba. It matches only a case with the default attention.
NO_ATTENTION = "none"
ADAPTERS = ("trained", "lora", "adapters")
FIELDS = {  # observed setting -> field of a script's case
    "recomputing_blocks": "activation_checkpointing",
    "compute_dtype": "precision",
    "attention": "attention",
    **dict.fromkeys(ADAPTERS, "lora"),
    "quantised_layers": "quantization",
}


class Observer:
    """Observes the training before the first step, with hooks in the second step, and after the last step."""

    _second_step: SecondStep  # set before the first optimizer step

    def __init__(self, case: Case, workload: Workload, *, has_values: bool = True) -> None:
        """Observe the training of `workload`. `has_values` is False if tensors have no values (a dry run)."""
        self.case = case
        self._has_values = has_values
        self.workload = workload
        self.model: Any = workload.model
        self.optimizer: Any = None  # the first optimizer that stepped
        self._before: dict[str, float] = {}
        self._after: dict[str, float] = {}
        self._collectives_before: int | None = None
        self._settings: dict[str, str] = {}
        self.dtypes: Dtypes = {}  # the dtypes of the training state; set before the second optimizer step

    def before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Observe the training before a step. This is a hook for `register_optimizer_step_pre_hook`.

        Only the first optimizer that takes a step is observed.
        """
        if self.optimizer is None:
            if self.model is None:
                self.model = owner(optimizer)
            if self._has_values:
                self._before = replicas.fingerprint(self.model)
                self._collectives_before = replicas.collectives_begun()
            # Hooks inside a compiled model would change its graphs. If it is unknown whether the model is
            # compiled, treat it as compiled.
            may_be_compiled = self.case.compile or software.compiled_graphs() != 0
            self._second_step = SecondStep(self.model, inside=not may_be_compiled)
            self.optimizer = optimizer
        elif optimizer is self.optimizer and not self._settings:
            self._settings = self._look()
            self.dtypes = dtypes_of(self.model, optimizer, self._second_step.linear_layers())

    def skip_step(self) -> None:
        """Forget the tokens of the running step, because a scaler has skipped the optimizer's step."""
        if self.optimizer is not None and not self._settings:
            self._second_step.tokens.forget()

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings that were observed in the second step. Empty before that step."""
        return self._settings

    @property
    def steps_copies(self) -> bool:
        """Whether the optimizer updates only copies: tensors that are not parameters of the model."""
        if engines.of(self.optimizer) is not None:
            return False
        parameters = {id(p) for p in self.model.parameters()}
        return not any(id(p) in parameters for p in parameters_of(self.optimizer))

    def abandon(self) -> None:
        """Remove the hooks that are still on modules, if there are any."""
        if self.optimizer is not None:
            self._second_step.finish()

    def result(self) -> Observed:
        """Return all observations, after the run."""
        if not self._settings:
            raise MismatchError("nothing trained: no optimizer took two steps")
        self._after = replicas.fingerprint(self.model)
        settings = {
            **self._settings,
            # With FSDP1, a rank might hold only frozen parameters. Such a rank cannot see a change, so it
            # records `yes`.
            "parameters_changed": "yes" if self._after != self._before or not self._before else "no",
            "compiled": _compiled(),
        }
        environment = software.environment(self.case.framework.packages)
        # A script's attention kernel is not a setting, because it depends on the padding of the second batch.
        if not self.case.framework.promises.builds_model:
            environment["attention_kernel"] = settings.pop("attention_kernel")
        return Observed(settings=settings, environment=environment)

    def evidence(self) -> RankEvidence:
        """Return the facts to compare between ranks.

        Facts about parameters are included only if `result` has been called before.
        """
        count = replicas.collectives_begun()
        before = self._collectives_before
        norms = self._before.items()
        whole: set[str] = set()
        if dist.is_initialized() and self.workload.data_parallel == dist.get_world_size():
            whole = replicas.replicated(self.model) & self._after.keys()
        tokens = self._second_step.tokens
        return RankEvidence(
            data_parallel=self.workload.data_parallel,
            tokens=tokens.tokens or None,
            padding=tokens.padding() if self._has_values else 0,
            forwards=tokens.forwards,
            samples=tokens.samples or None,
            collectives=None if count is None or before is None else count - before,
            replicated={name: (norm, self._after[name]) for name, norm in norms if name in whole},
            replicated_bytes=sum(p.nbytes for name, p in self.model.named_parameters() if name in whole),
        )

    def check(self, observed: Observed) -> None:
        """Raise `MismatchError` if the training diverged or did not match the case."""
        infinite = [name for name, norm in self._after.items() if not math.isfinite(norm)]
        # If the loss is observed, do not report the divergence here, because the loss shows in which step the
        # training diverged.
        if infinite and self.case.framework.promises.loss is None:
            raise MismatchError(
                f"{infinite[0]} is {self._after[infinite[0]]} after the last step: the training diverged, so "
                "its measurements are useless. Check the learning rate and the data"
            )
        self._check_asked(observed.settings)

    def check_second_step(self) -> None:
        """Raise `MismatchError` if the second step did not match the case."""
        self._check_asked(self._settings, later=("parameters_changed", "compiled"))

    def _check_asked(self, settings: Mapping[str, str], later: Collection[str] = ()) -> None:
        case = self.case
        finetuning.check_asked(case, self.model, self._blocks(), settings)
        for key, asked in {**self._expected(settings), **framework_of(case).expected(case)}.items():
            if asked is not None and settings.get(key) != asked and key not in later:
                said = f"{key}: the case asks for {asked!r}, but {settings.get(key)!r} ran."
                if key not in ADAPTERS:  # the message about adapters is already long
                    said += " The measurements would not be those of this case."
                raise MismatchError(said + self._advice(key))

    def _advice(self, key: str) -> str:
        if self.case.framework.promises.builds_model:
            return ""
        if key == "world_size":
            return (
                " Start its processes with torchrun or accelerate as command=(...), so that they form a "
                "process group. Some scripts only create a process group on GPUs."
            )
        field = FIELDS.get(key)
        say = f"give another {field} in the case"
        if key == "trained" and self._settings.get(key) == finetuning.OTHERS:
            say = finetuning.advice_on_others(self.model)
        elif field == "lora":
            say = finetuning.advice(self.model, self._blocks())
        return f" If the script is as it should be, {say}." if field else ""

    def _blocks(self) -> list[nn.Module]:
        return layers(self.model) or [self.model]

    def _expected(self, settings: Mapping[str, str]) -> dict[str, str | None]:
        case = self.case
        attention = settings["attention"]
        may_be_any = attention == NO_CONFIGURATION or (attention == NO_ATTENTION and case.attention == "sdpa")
        expected: dict[str, str | None] = {
            "world_size": str(case.topology.world_size),
            "parameter_dtype": dtype_name(DTYPES[case.precision]) + ", int8" * (case.quantization == "8bit"),
            "optimizer_parameters": "the model's",
            "parameters_changed": "yes",
            "attention": None if may_be_any else case.attention,
            "compiled": "yes" if case.compile and settings.get("compiled") != GRAPHS_NOT_OBSERVED else None,
            **finetuning.expected(case, self.model, self._blocks(), settings.get("lora")),
        }
        builds_model = case.framework.promises.builds_model
        # A step that replays CUDA graphs runs no Python code of the model.
        may_replay = settings.get("cuda_graphs") == "yes" or not builds_model
        if self._second_step.inside and not (self._second_step.lacks_forward and may_replay):
            expected["recomputing_blocks"] = self._recomputing(settings["recomputing_blocks"])
            if builds_model or self._second_step.compute_dtype != NO_LINEAR:
                expected["compute_dtype"] = dtype_name(COMPUTE_DTYPES[case.precision])
        return expected

    def _recomputing(self, observed: str) -> str | None:
        """Return how many blocks should be recomputed according to the case, such as `2 of 4`.

        Returns None if this is unknown.
        """
        if observed == NOT_OBSERVED:
            return None
        mode = self.case.activation_checkpointing
        count = len(self._second_step.forwards)
        if not self.case.model.config and not self.case.framework.promises.builds_model:
            # Only the name of the model is known, so the modules that were found might not be its blocks. So
            # check only whether any of them is recomputed.
            if not count:
                return None
            if (mode != "none") == (not observed.startswith("0 of ")):
                return observed
        return f"{sum(is_checkpointed(mode, index) for index in range(count))} of {count}"

    def _look(self) -> dict[str, str]:
        parameters = _parameters_in(self.model)
        trained = {id(p) for p in parameters if p.requires_grad}
        owned = set(map(id, parameters_of(self.optimizer)))
        fused = " fused" if self.optimizer.defaults.get("fused") else ""
        has_group = dist.is_initialized()
        self._second_step.finish()
        device = parameters[0].device.type
        return {
            **wrapping(self.model),
            "world_size": str(dist.get_world_size()) if has_group else "1, no process group",
            "backend": dist.get_backend() if has_group else "none",
            "device": device,
            "parameter_dtype": ", ".join(sorted({dtype_name(p.dtype) for p in parameters})),
            "compute_dtype": self._second_step.computing(),
            **software.arithmetic(device),
            **_attention(self.model),
            "attention_kernel": self._second_step.attention_kernel,
            "recomputing_blocks": self._second_step.recomputing(),
            "optimizer": type(self.optimizer).__name__ + fused,
            "optimizer_parameters": "the model's" if owned == trained else "others",
            **finetuning.observed(self.model),
            **float8.observed(self.model),
            **self.workload.settings,
        }


class Owners(nn.ModuleList):
    """Several modules without a common parent, combined into one module because one optimizer steps them."""


def owner(optimizer: Any) -> nn.Module:
    """Return the outermost living module that has all parameters of `optimizer`: the wrapped model.

    If no module has all of them, return a few modules that together have all parameters, as `Owners`. If the
    optimizer updates copies of parameters, which belong to no module, return the modules with the original
    parameters.
    """
    engine = engines.of(optimizer)
    if engine is not None:
        return cast(nn.Module, engine)
    wanted = set(map(id, parameters_of(optimizer)))
    owned = {module: wanted & set(map(id, _parameters_in(module))) for module in living(nn.Module)}
    owners = []
    if not any(owned.values()):
        owned.clear()
        gc.collect()  # a model that the training has dropped must not count as living
        owners = _copied(optimizer, living(nn.Module))
    missing = set() if owners else set(wanted)
    while missing:
        most = max(
            owned, key=lambda module: (len(owned[module] & missing), len([*module.modules()])), default=None
        )
        if most is None or not owned[most] & missing:
            raise MismatchError(
                f"no module owns {len(missing)} of the {len(wanted)} tensors that {type(optimizer).__name__} "
                "steps. Put them into an nn.Module. Copies of parameters, such as fp32 master weights, are "
                "only recognised if the optimizer steps nothing else, and if no other optimizer steps the "
                "parameters themselves"
            )
        owners.append(most)
        missing -= owned[most]
    return owners[0] if len(owners) == 1 else Owners(owners)


def _parameters_in(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of any living module, without those that have no shape yet (`nn.LazyLinear`).

    The classes of some modules override `parameters` with another meaning. For these, the result is empty.
    """
    try:
        parameters = [*module.parameters()]
    except Exception:
        return []
    return [parameter for parameter in parameters if not is_lazy(parameter)]


def _copied(optimizer: Any, modules: Collection[nn.Module]) -> list[nn.Module]:
    """Return the outermost modules whose parameters `optimizer` might update through copies. Can be empty.

    Copies can be fp32 master weights, or this rank's shard of them (in Megatron's distributed optimizer).
    Copies therefore have at most as many elements as the trained parameters. A module is left out if an
    optimizer steps the module's own parameters.
    """
    inner = {child for module in modules for child in module.children()}
    stepped = set(map(id, parameters_of(*living(torch.optim.Optimizer))))
    trained = {
        module: {id(p): p.numel() for p in _parameters_in(module) if p.requires_grad}
        for module in modules
        if module not in inner
    }
    copied = {module: sizes for module, sizes in trained.items() if sizes and not sizes.keys() & stepped}
    elements = sum({id(p): p.numel() for p in parameters_of(optimizer)}.values())
    of_modules = sum({key: size for sizes in copied.values() for key, size in sizes.items()}.values())
    return [*copied] if elements <= of_modules else []


def wrapping(model: nn.Module) -> dict[str, str]:
    """Return the wrapper that is really around the model or inside it, with its sharding and its mesh."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    modules = list(model.modules())
    wrappers: dict[str, list[Any]] = {
        kind.__name__: [module for module in modules if isinstance(module, kind)]
        for kind in (DistributedDataParallel, FullyShardedDataParallel, FSDPModule)
    }
    shardings = {module.sharding_strategy.name for module in wrappers["FullyShardedDataParallel"]}
    tensors = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    shardings |= {", ".join(map(_placement, tensor.placements)) for tensor in tensors}
    meshes = [tensor.device_mesh for tensor in tensors if tensor.device_mesh.mesh_dim_names]
    axes = [dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)) for mesh in meshes]
    for kind, instances in engines.among(modules):
        wrappers[kind.path.rpartition(":")[2]] = instances
        shardings |= {*filter(None, map(kind.sharding, instances))}
    return {
        "wrapper": " + ".join(name for name, instances in wrappers.items() if instances) or "none",
        "sharding": " and ".join(sorted(shardings)) or "none",
        **({"mesh": meshes_text(axes)} if axes else {}),
        "wrapped_modules": str(sum(map(len, wrappers.values()))),
    }


def _attention(model: nn.Module) -> dict[str, str]:
    """Return the attention implementation that runs.

    For a Mamba, also return whether the scan runs in mamba_ssm or in transformers' own loop.
    """
    configs: Any = (getattr(module, "config", None) for module in model.modules())
    config: Any = next((config for config in configs if hasattr(config, attn_implementation.name)), None)
    if config is None:
        return {"attention": NO_CONFIGURATION}
    if has_attention(config):
        return {"attention": attn_implementation(config)}
    # transformers uses mamba_ssm if it can be imported. Otherwise, it uses its own loop, and does not say so.
    return {"attention": NO_ATTENTION, "mamba_ssm": "loaded" if "mamba_ssm" in sys.modules else "none"}


def _compiled() -> str:
    """Return whether torch.compile has made a graph."""
    graphs = software.compiled_graphs()
    if graphs is None:
        return GRAPHS_NOT_OBSERVED
    return "yes" if graphs else "no"


def _placement(placement: Any) -> str:
    # Remove the underscore of `_StridedShard`. This is torch's private placement for tensors that FSDP shards
    # after tensor parallelism.
    name = type(placement).__name__.removeprefix("_")
    dim = getattr(placement, "dim", None)
    return name if dim is None else f"{name}({dim})"
