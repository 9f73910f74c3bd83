"""Hugging Face accelerate: DDP, FSDP1 and FSDP2 through `Accelerator`, or by a user's own YAML file."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from perfsuite.case.case import Case
from perfsuite.case.framework import Promises, changed_fields
from perfsuite.case.hardware import Machine
from perfsuite.documents import Data, explain
from perfsuite.errors import CaseError, FileError
from perfsuite.frameworks.base import DryPlan, Framework, Ranks, StepClock, Workload
from perfsuite.frameworks.common import sharding
from perfsuite.frameworks.common.accelerate_env import clear_environment, force_fsdp, launcher_environment
from perfsuite.frameworks.common.config_file import ConfigFile
from perfsuite.frameworks.common.parallelism import Degrees, refuse_other_axes

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
Prefetch = Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]

MIXED_PRECISION = {"fp32": "no", "bf16-mixed": "bf16", "bf16": "no"}
_FSDP1_ONLY = (
    *("fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_forward_prefetch"),
    *("fsdp_use_orig_params", "fsdp_sync_module_states"),
)
_OPTIONS = {
    "fsdp1": ("sharding_strategy", "backward_prefetch", "cpu_offload"),
    "fsdp2": ("reshard_after_forward", "cpu_offload"),
}
"""Strategy -> its options, but for FSDP2's degrees. DDP has none, nor has a configuration file."""


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _unused(value: Any) -> Any:
    if value:
        raise ValueError("perfsuite drives accelerate's DDP and FSDP alone; remove it")
    return value


def _in_options(value: Any) -> Any:
    if value:
        raise ValueError("give Accelerate(strategy='fsdp2', dp_shard_size=..., tp_size=...) without a file")
    return value


_Unused = Annotated[Any, AfterValidator(_unused)]


class FsdpFields(Data):
    """The section `fsdp_config` of a file, with the defaults of `accelerate launch`."""

    fsdp_version: Literal[1, 2] = 1
    fsdp_sharding_strategy: Annotated[Sharding | None, BeforeValidator(_upper)] = None
    fsdp_reshard_after_forward: Annotated[bool | Sharding | None, BeforeValidator(_upper)] = None
    fsdp_backward_prefetch: Annotated[Prefetch | None, BeforeValidator(_upper)] = None
    fsdp_forward_prefetch: bool = False
    fsdp_auto_wrap_policy: Annotated[
        Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] | None, BeforeValidator(_upper)
    ] = None
    fsdp_transformer_layer_cls_to_wrap: str | None = None
    fsdp_min_num_params: int | None = None
    fsdp_offload_params: bool = False
    fsdp_use_orig_params: bool = True
    fsdp_sync_module_states: bool = True
    fsdp_cpu_ram_efficient_loading: bool = True
    fsdp_activation_checkpointing: bool = False
    fsdp_activation_checkpointing_offload: bool = False
    fsdp_state_dict_type: str | None = None

    @model_validator(mode="after")
    def _agree(self) -> FsdpFields:
        strategy, reshard = self.fsdp_sharding_strategy, self.fsdp_reshard_after_forward
        if self.fsdp_version == 2:
            for name in _FSDP1_ONLY:
                if name in self.model_fields_set:
                    raise ValueError(
                        f"{name} is of FSDP1, but fsdp_version is 2 and would ignore it; "
                        "remove it, or convert the file with `accelerate to-fsdp2`"
                    )
            if isinstance(reshard, str):
                raise ValueError(
                    f"fsdp_reshard_after_forward is true or false in FSDP2 (fsdp_version: 2), not {reshard}"
                )
        elif isinstance(reshard, bool):
            raise ValueError(
                f"fsdp_reshard_after_forward is one of {', '.join(get_args(Sharding))} in FSDP1 "
                f"(fsdp_version: 1), not {str(reshard).lower()}"
            )
        elif None not in (reshard, strategy) and reshard != strategy:
            raise ValueError(
                f"fsdp_sharding_strategy is {strategy}, but fsdp_reshard_after_forward, "
                f"its newer name, is {reshard}; keep one"
            )
        return self

    @property
    def sharding(self) -> str:
        """The strategy of FSDP1. accelerate 1.15 ignores the newer name alone; a worker refuses that run."""
        return str(self.fsdp_sharding_strategy or self.fsdp_reshard_after_forward or "FULL_SHARD")


class LaunchFields(Data):
    """The fields that `accelerate config` writes."""

    distributed_type: Literal["MULTI_GPU", "MULTI_CPU", "FSDP"]
    num_processes: int = Field(ge=1)
    num_machines: int = Field(default=1, ge=1)
    mixed_precision: Literal["no", "bf16"] | None = None
    fsdp_config: FsdpFields | None = None
    use_cpu: bool = False
    debug: bool = False
    enable_cpu_affinity: bool = False
    compute_environment: Literal["LOCAL_MACHINE"] = "LOCAL_MACHINE"
    gpu_ids: Literal["all"] | None = None

    # How `accelerate launch` starts and connects processes, which perfsuite does itself.
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    main_training_function: str = "main"
    rdzv_backend: str = "static"
    same_network: bool = False

    # For other machines and libraries.
    deepspeed_config: _Unused = None
    dynamo_config: _Unused = None
    fp8_config: _Unused = None
    megatron_lm_config: _Unused = None
    mpirun_config: _Unused = None
    parallelism_config: Annotated[Any, AfterValidator(_in_options)] = None
    downcast_bf16: Literal["no", False] = False
    tpu_env: _Unused = None
    tpu_use_cluster: _Unused = False
    tpu_use_sudo: _Unused = False

    @model_validator(mode="after")
    def _agree(self) -> LaunchFields:
        if (self.fsdp_config is not None) != (self.distributed_type == "FSDP"):
            raise ValueError(
                f"distributed_type is {self.distributed_type}, fsdp_config is "
                f"{'given' if self.fsdp_config else 'missing'}: the one needs the other"
            )
        if self.use_cpu and self.distributed_type == "MULTI_GPU":
            raise ValueError("use_cpu is true, but distributed_type is MULTI_GPU; correct one of them")
        return self


class LaunchConfig(ConfigFile):
    """A file that `accelerate config` wrote, read once."""

    kind: ClassVar[str] = "a YAML file that `accelerate config` wrote"

    file: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises `FileError` naming the file, the field, its value, and what is allowed."""
        config = cls(file=path.name, text=cls.read_text(path))
        try:
            _ = config.fields
        except ValidationError as error:
            known = ", ".join((*LaunchFields.model_fields, *FsdpFields.model_fields))
            raise FileError(f"{path}: {explain(error)}. Known fields: {known}.") from None
        return config

    @cached_property
    def fields(self) -> LaunchFields:
        return LaunchFields.model_validate(self.content)

    def conflict(self, case: Case) -> str | None:
        fields, topology, precision = self.fields, case.topology, case.precision
        mixed = fields.mixed_precision or "no", MIXED_PRECISION.get(precision)
        for field, got, wanted, by in (
            ("num_processes", fields.num_processes, topology.world_size, "the topology"),
            ("num_machines", fields.num_machines, topology.nodes, "the topology"),
            ("mixed_precision", *mixed, f"precision {precision!r}"),
        ):
            if got != wanted:
                return f"{self.file}: {field} is {got!r}, but {by} of the case asks for {wanted!r}"
        recomputes = fields.fsdp_config is not None and fields.fsdp_config.fsdp_activation_checkpointing
        if recomputes and case.activation_checkpointing != "full":
            return (
                f"{self.file}: fsdp_activation_checkpointing is true, but activation_checkpointing of the "
                f"case is {case.activation_checkpointing!r}; only 'full' agrees"
            )
        return None


class Accelerate(Framework):
    """A strategy and its options by accelerate's names; or a file that `accelerate config` wrote.

    `Accelerate(strategy="fsdp2", dp_shard_size=8, tp_size=8)`, `Accelerate(config="fsdp.yaml")`.
    """

    name: ClassVar[str] = "accelerate"
    packages: ClassVar[tuple[str, ...]] = ("accelerate",)
    promises: ClassVar[Promises] = Promises(ignores=frozenset({"quantization"}))

    strategy: Literal["ddp", "fsdp1", "fsdp2"] | None = None
    config: LaunchConfig | None = None
    """Path of a YAML file, read when the case is made."""
    sharding_strategy: Sharding = "FULL_SHARD"
    backward_prefetch: Prefetch = "NO_PREFETCH"
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    dp_replicate_size: int = Field(default=1, ge=1, strict=True)
    """Groups of ranks that replicate, while each group shards."""
    dp_shard_size: int = Field(default=1, ge=1, strict=True)
    """Ranks that shard. Without any degree all ranks do."""
    tp_size: int = Field(default=1, ge=1, strict=True)
    """Neighbouring ranks that split each layer and see the same data."""

    _axes = model_validator(mode="before")(refuse_other_axes)

    @model_validator(mode="after")
    def _fits_together(self) -> Accelerate:
        if (self.strategy is None) == (self.config is None):
            raise ValueError(
                "give either strategy ('ddp', 'fsdp1' or 'fsdp2') or config (the path of an accelerate YAML)"
            )
        allowed = _OPTIONS.get(self.strategy or "", ())
        if self.strategy == "fsdp2":
            allowed += (*Degrees.model_fields,)
        for name, field in type(self).model_fields.items():
            if name not in ("strategy", "config", *allowed) and getattr(self, name) != field.default:
                whose = f"strategy {self.strategy!r}" if self.strategy else "a configuration file"
                raise ValueError(
                    f"{name}={getattr(self, name)!r} does not go with {whose}, which takes "
                    f"{', '.join(allowed) or 'no options'}"
                )
        self._degrees.refuse_without_shards()
        return self

    def slug(self) -> str:
        parts = changed_fields(self, skip=frozenset({"config"}))
        return "-".join([self.name, *([Path(self.config.file).stem] if self.config else []), *parts])

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        if case.precision not in MIXED_PRECISION:
            return f"precision {case.precision!r} is not one of {', '.join(MIXED_PRECISION)}"
        if self.config and self.config.fields.use_cpu and machine.device != "cpu":
            return f"{self.config.file}: use_cpu is true, but this machine trains on its GPUs"
        fsdp = self._fsdp
        is_offloaded = fsdp is not None and fsdp.fsdp_offload_params
        if is_offloaded and (reason := sharding.offload_unsupported("cpu_offload", machine)) is not None:
            return reason
        if fsdp is not None and fsdp.fsdp_version == 2:
            return self._degrees.unsupported(case)
        if case.topology.world_size < 2:
            return "accelerate wraps nothing in DDP, and torch shards nothing in FSDP1, on 1 process: needs 2"
        if fsdp is not None and fsdp.sharding.startswith("HYBRID"):
            return sharding.hybrid_within_nodes_unsupported(fsdp.sharding, case, machine)
        return None

    def check(self, case: Case) -> None:
        if self.config and (conflict := self.config.conflict(case)) is not None:
            raise CaseError(conflict)
        self._degrees.check(case)

    def dry(self, case: Case) -> DryPlan:
        if (fsdp := self._fsdp) is None:
            return sharding.dry_plan()
        offloads = fsdp.fsdp_offload_params or fsdp.fsdp_activation_checkpointing_offload
        return sharding.dry_plan(
            ranks_differ=fsdp.fsdp_version == 1, offloads=offloads, built_over=self.tp_size
        )

    def expected(self, case: Case) -> dict[str, str]:
        if (fsdp := self._fsdp) is None:
            return {"wrapper": "DistributedDataParallel"}
        if fsdp.fsdp_version == 2:
            return {"wrapper": "FSDPModule", **self._degrees.expected()}
        torch_name = fsdp.sharding.replace("HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2")
        return {"wrapper": "FullyShardedDataParallel", "sharding": torch_name}

    @property
    def _degrees(self) -> Degrees:
        return Degrees(**{name: getattr(self, name) for name in Degrees.model_fields})

    @property
    def _fsdp(self) -> FsdpFields | None:
        """FSDP's options as fields of a configuration file; None for DDP."""
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
        """Build model and optimizer by `Accelerator.prepare`, and a loop of accelerate's calls."""
        from accelerate import Accelerator

        from perfsuite.frameworks.common.loop import training
        from perfsuite.frameworks.common.model import build_optimizer

        on_cpu = ranks.device.type == "cpu"
        settings = self._set_environment(on_cpu=on_cpu) | self._degrees.patch()
        plugin, parallelism = self._plugin(), self._degrees.config()
        accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision=MIXED_PRECISION[case.precision],
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
                case = case.replace(activation_checkpointing="none")  # the plugin's own instead
        model: Any = self._degrees.model(case, parallelism, ranks.device)
        if plugin is not None and plugin.fsdp_version == 1:
            model = accelerator.prepare(model)  # its parameters may be others than the optimizer would hold
            optimizer = accelerator.prepare(build_optimizer(case, model))
        else:
            model, optimizer = accelerator.prepare(model, build_optimizer(case, model))

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
            tensor_parallel=self.tp_size,
            settings=settings,
        )

    def _set_environment(self, *, on_cpu: bool) -> dict[str, str]:
        """Set accelerate's variables to what the file says, and no others. Return the settings to record."""
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
            return FullyShardedDataParallelPlugin()  # from the environment
        names = _OPTIONS[str(self.strategy)]
        return FullyShardedDataParallelPlugin(
            fsdp_version=self._fsdp.fsdp_version,
            auto_wrap_policy="transformer_based_wrap",
            use_orig_params=True if self.strategy == "fsdp1" else None,
            **{name: getattr(self, name) for name in names},
        )
