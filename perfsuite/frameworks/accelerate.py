"""Hugging Face accelerate: DDP, FSDP1 and FSDP2, configured with options or with the user's own YAML file."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from perfsuite.case.case import Case
from perfsuite.case.framework import changed_fields
from perfsuite.case.hardware import Machine
from perfsuite.errors import CaseError
from perfsuite.frameworks.base import DryPlan, Ranks, StepClock, Workload
from perfsuite.frameworks.common import float8, sharding
from perfsuite.frameworks.common.accelerate_config import (
    MIXED_PRECISION,
    FsdpFields,
    LaunchConfig,
    Prefetch,
    Sharding,
    clear_environment,
    force_fsdp,
    launcher_environment,
)
from perfsuite.frameworks.common.float8 import Recipe
from perfsuite.frameworks.common.parallelism import ByAccelerate, Degrees, Size

_PLUGIN = {  # strategy -> options that are passed as arguments to accelerate's FSDP plugin
    "fsdp1": ("sharding_strategy", "backward_prefetch", "cpu_offload"),
    "fsdp2": ("reshard_after_forward", "cpu_offload"),
}
_OPTIONS = {"ddp": ("float8",), **_PLUGIN, "fsdp2": (*_PLUGIN["fsdp2"], *Degrees.model_fields, "float8")}
"""Strategy -> its options. A configuration file cannot be combined with any option."""


class Accelerate(ByAccelerate):
    """Either a strategy and its options, under accelerate's names, or a file that `accelerate config` wrote.

    Examples: `Accelerate(strategy="fsdp2", dp_shard_size=8, tp_size=8)`, `Accelerate(config="fsdp.yaml")`.
    """

    name: ClassVar[str] = "accelerate"

    strategy: Literal["ddp", "fsdp1", "fsdp2"] | None = None
    config: LaunchConfig | None = None
    """Path of a YAML file. It is read when the case is created."""
    sharding_strategy: Sharding = "FULL_SHARD"
    backward_prefetch: Prefetch = "NO_PREFETCH"
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    dp_replicate_size: Size = 1
    dp_shard_size: Size = 1
    cp_size: Size = 1
    tp_size: Size = 1
    float8: Recipe | None = None
    """torchao's recipe for float8 matmuls in all linear layers except the first one and the head. On a CPU,
    float8 is emulated. With FSDP2, `tensorwise` also gathers the weights of these layers in float8."""

    @model_validator(mode="after")
    def _fits_together(self) -> Accelerate:
        if (self.strategy is None) == (self.config is None):
            raise ValueError(
                "give either strategy ('ddp', 'fsdp1' or 'fsdp2') or config (the path of an accelerate YAML)"
            )
        allowed = _OPTIONS.get(self.strategy or "", ())
        for name, field in type(self).model_fields.items():
            if name not in ("strategy", "config", *allowed) and getattr(self, name) != field.default:
                whose = f"strategy {self.strategy!r}" if self.strategy else "a configuration file"
                raise ValueError(
                    f"{name}={getattr(self, name)!r} cannot be combined with {whose}, which allows "
                    f"{', '.join(allowed) or 'no options'}"
                )
        self._degrees.refuse_without_shards()
        return self

    def slug(self) -> str:
        parts = changed_fields(self, skip=frozenset({"config"}))
        return "-".join([self.name, *([Path(self.config.file).stem] if self.config else []), *parts])

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        reason = float8.unsupported(self.float8, case, machine, by_accelerate=True)
        if reason:
            return reason
        if self.config and self.config.fields.use_cpu and machine.device != "cpu":
            return f"{self.config.file}: use_cpu is true, but this machine trains on GPUs"
        fsdp = self._fsdp
        is_offloaded = fsdp is not None and fsdp.fsdp_offload_params
        if is_offloaded:
            reason = sharding.offload_unsupported("cpu_offload", machine)
            if reason is not None:
                return reason
        if fsdp is not None and fsdp.fsdp_version == 2:
            return self._degrees.unsupported(case, machine)
        if case.topology.world_size < 2:
            return "with 1 process, accelerate uses no DDP, and FSDP1 shards nothing: give at least 2"
        if fsdp is not None and fsdp.sharding.startswith("HYBRID"):
            return sharding.hybrid_within_nodes_unsupported(fsdp.sharding, case, machine)
        return None

    def check(self, case: Case) -> None:
        if self.config:
            conflict = self.config.conflict(case)
            if conflict is not None:
                raise CaseError(conflict)
        self._degrees.check(case)

    def dry(self, case: Case) -> DryPlan:
        fsdp = self._fsdp
        if fsdp is None:
            return sharding.dry_plan()
        offloads = fsdp.fsdp_offload_params or fsdp.fsdp_activation_checkpointing_offload
        return self._degrees.dry_plan(ranks_differ=fsdp.fsdp_version == 1, offloads=offloads)

    def expected(self, case: Case) -> dict[str, str]:
        low = float8.expected(self.float8, case, kept=1, gathered=self.strategy == "fsdp2")
        fsdp = self._fsdp
        if fsdp is None:
            return {"wrapper": "DistributedDataParallel", **low}
        if fsdp.fsdp_version == 2:
            return {"wrapper": "FSDPModule", **self._degrees.expected(), **low}
        torch_name = fsdp.sharding.replace("HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2")
        return {"wrapper": "FullyShardedDataParallel", "sharding": torch_name}

    @property
    def _fsdp(self) -> FsdpFields | None:
        """The options of FSDP, as in a configuration file. None for DDP."""
        if self.config is not None:
            return self.config.fields.fsdp_config
        if self.strategy == "ddp":
            return None
        fields: dict[str, Any] = {"fsdp_version": 2, "fsdp_offload_params": self.cpu_offload}
        if self.strategy == "fsdp1":
            fields |= {"fsdp_version": 1, "fsdp_sharding_strategy": self.sharding_strategy}
        return FsdpFields(**fields)

    def load(self, case: Case, device: Any) -> None:
        import accelerate  # noqa: F401

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Prepare model and optimizer with `Accelerator.prepare`, and build a loop that uses accelerate."""
        from accelerate import Accelerator

        from perfsuite.frameworks.common.loop import training
        from perfsuite.frameworks.common.model import build_optimizer

        on_cpu = ranks.device.type == "cpu"
        settings = self._set_environment(on_cpu=on_cpu) | self._degrees.patch()
        plugin = self._plugin()
        parallelism = self._degrees.config()
        mixed = MIXED_PRECISION[case.precision]
        recipes = []
        if self.float8 is not None:
            recipe = float8.accelerate_recipe(self.float8, ranks.device, gathered=plugin is not None)
            mixed = "fp8"
            recipes = [recipe]
        accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision=mixed,
            kwargs_handlers=recipes,
            gradient_accumulation_steps=case.gradient_accumulation,
            fsdp_plugin=plugin,
            parallelism_config=None if on_cpu else parallelism,
        )
        if plugin is not None:
            if on_cpu:
                settings["forced"] = force_fsdp(accelerator, plugin, parallelism)
            if plugin.mixed_precision_policy is not None:
                settings["reduce_dtype"] = str(plugin.mixed_precision_policy.reduce_dtype)
            if plugin.activation_checkpointing:
                case = case.replace(activation_checkpointing="none")  # the plugin checkpoints the blocks
        model: Any = self._degrees.model(case, parallelism, ranks.device)
        if plugin is not None and plugin.fsdp_version == 1:
            # Wrap the model first, because FSDP1 can replace the parameters that the optimizer must hold.
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(build_optimizer(case, model))
        else:
            model, optimizer = accelerator.prepare(model, build_optimizer(case, model))
            settings |= self._degrees.observed(accelerator)

        def backward(loss: Any) -> Any:
            accelerator.backward(loss)  # divides by the number of micro-batches
            return loss.detach() / case.gradient_accumulation

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return training(
            case,
            ranks,
            model,
            backward=backward,
            sync=lambda is_last: accelerator.accumulate(model),
            step=step,
            inputs=partial(self._degrees.inputs, accelerator),
            tensor_parallel=self._degrees.alike,
            settings=settings,
        )

    def _set_environment(self, *, on_cpu: bool) -> dict[str, str]:
        """Set accelerate's environment variables from the file, and remove all other variables of accelerate.

        Return the settings to record.
        """
        clear_environment()
        if self.config is None:
            return {}
        os.environ.update(launcher_environment(self.config.text))
        fsdp = self.config.fields.fsdp_config
        if on_cpu and fsdp is not None and fsdp.fsdp_version == 1:
            os.environ |= {"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
        return {"accelerate_config": self.config.digest}

    def _plugin(self) -> Any:
        from accelerate import FullyShardedDataParallelPlugin

        if self._fsdp is None:
            return None
        if self.config is not None:
            return FullyShardedDataParallelPlugin()  # reads its options from the environment
        names = _PLUGIN[str(self.strategy)]
        return FullyShardedDataParallelPlugin(
            fsdp_version=self._fsdp.fsdp_version,
            auto_wrap_policy="transformer_based_wrap",
            use_orig_params=True if self.strategy == "fsdp1" else None,
            **{name: getattr(self, name) for name in names},
        )
