"""accelerate's configuration: a file from `accelerate config`, environment variables, and state objects."""

from __future__ import annotations

import os
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from perfsuite.case.case import Case
from perfsuite.documents import Data, explain
from perfsuite.errors import FileError
from perfsuite.frameworks.common.config_file import ConfigFile

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
Prefetch = Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]

VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")  # prefixes of the variables that accelerate reads
MIXED_PRECISION = {"fp32": "no", "bf16-mixed": "bf16", "bf16": "no"}
_FSDP1_ONLY = (
    *("fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_forward_prefetch"),
    *("fsdp_use_orig_params", "fsdp_sync_module_states"),
)


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _unused(value: Any) -> Any:
    if value:
        raise ValueError("perfsuite supports only accelerate's DDP and FSDP; remove this field")
    return value


def _in_options(value: Any) -> Any:
    if value:
        raise ValueError("give Accelerate(strategy='fsdp2', dp_shard_size=..., tp_size=...) without a file")
    return value


_Unused = Annotated[Any, AfterValidator(_unused)]


class FsdpFields(Data):
    """The section `fsdp_config` of a configuration file, with the defaults of `accelerate launch`."""

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
        strategy = self.fsdp_sharding_strategy
        reshard = self.fsdp_reshard_after_forward
        if self.fsdp_version == 2:
            for name in _FSDP1_ONLY:
                if name in self.model_fields_set:
                    raise ValueError(
                        f"{name} is an option of FSDP1, which FSDP2 (fsdp_version: 2) ignores; "
                        "remove it, or convert the file with `accelerate to-fsdp2`"
                    )
            if isinstance(reshard, str):
                raise ValueError(
                    "fsdp_reshard_after_forward must be true or false for FSDP2 (fsdp_version: 2), "
                    f"not {reshard}"
                )
        elif isinstance(reshard, bool):
            raise ValueError(
                f"fsdp_reshard_after_forward must be one of {', '.join(get_args(Sharding))} for FSDP1 "
                f"(fsdp_version: 1), not {str(reshard).lower()}"
            )
        elif None not in (reshard, strategy) and reshard != strategy:
            raise ValueError(
                f"fsdp_sharding_strategy is {strategy}, but fsdp_reshard_after_forward, "
                f"the newer name of the same option, is {reshard}; keep one of them"
            )
        return self

    @property
    def sharding(self) -> str:
        """The sharding strategy of FSDP1.

        accelerate 1.15 ignores `fsdp_reshard_after_forward` if the file does not also have
        `fsdp_sharding_strategy`. The worker rejects a run with such a file.
        """
        return str(self.fsdp_sharding_strategy or self.fsdp_reshard_after_forward or "FULL_SHARD")


class LaunchFields(Data):
    """The fields of a file that `accelerate config` wrote."""

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

    # These fields say how `accelerate launch` starts and connects processes. perfsuite ignores them, because
    # it starts the processes itself.
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    main_training_function: str = "main"
    rdzv_backend: str = "static"
    same_network: bool = False

    # Options of hardware and libraries that perfsuite does not support.
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
                f"distributed_type is {self.distributed_type}, but fsdp_config is "
                f"{'given' if self.fsdp_config else 'missing'}: use FSDP and fsdp_config together"
            )
        if self.use_cpu and self.distributed_type == "MULTI_GPU":
            raise ValueError("use_cpu is true, but distributed_type is MULTI_GPU; correct one of them")
        return self


class LaunchConfig(ConfigFile):
    """A file that `accelerate config` wrote. It is read once."""

    kind: ClassVar[str] = "a YAML file that `accelerate config` wrote"

    file: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file. Raises `FileError`, which names the field, its value, and the allowed values."""
        config = cls(file=path.name, text=cls.read_text(path))
        try:
            _ = config.fields
        except ValidationError as error:
            field_names = ", ".join((*LaunchFields.model_fields, *FsdpFields.model_fields))
            raise FileError(f"{path}: {explain(error)}. Known fields: {field_names}.") from None
        return config

    @cached_property
    def fields(self) -> LaunchFields:
        return LaunchFields.model_validate(self.content)

    def conflict(self, case: Case) -> str | None:
        fields = self.fields
        topology = case.topology
        precision = case.precision
        mixed = fields.mixed_precision or "no", MIXED_PRECISION.get(precision)
        for field, got, wanted, by in (
            ("num_processes", fields.num_processes, topology.world_size, "the topology"),
            ("num_machines", fields.num_machines, topology.nodes, "the topology"),
            ("mixed_precision", *mixed, f"precision {precision!r}"),
        ):
            if got != wanted:
                return f"{self.file}: {field} is {got!r}, but {by} of the case needs {wanted!r}"
        recomputes = fields.fsdp_config is not None and fields.fsdp_config.fsdp_activation_checkpointing
        if recomputes and case.activation_checkpointing != "full":
            return (
                f"{self.file}: fsdp_activation_checkpointing is true, but activation_checkpointing of the "
                f"case is {case.activation_checkpointing!r}; it must be 'full'"
            )
        return None


def clear_environment() -> None:
    """Remove every environment variable that accelerate reads, because only the case may configure it."""
    for key in [key for key in os.environ if key.startswith(VARIABLES)]:
        del os.environ[key]


def launcher_environment(config: str) -> dict[str, str]:
    """Return the environment that `accelerate launch --config_file` sets for accelerate itself.

    Variables for threads, ports and GPUs are left out. `config` is the text of the file.
    """
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    from perfsuite.frameworks.common.private import validate_launch_command

    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(config)
        file.flush()
        arguments = launch.launch_command_parser().parse_args(["--config_file", file.name, "script.py"])
        arguments, _, _ = validate_launch_command(arguments)
    if arguments.use_fsdp or arguments.multi_gpu:
        arguments.num_machines = 1
        arguments.main_process_port = 0  # nothing is launched, so no port is needed
        environment = prepare.prepare_multi_gpu_env(arguments)
    else:
        _, environment = prepare.prepare_simple_launcher_cmd_env(arguments)
    return {key: value for key, value in environment.items() if key.startswith(VARIABLES)}


def force_fsdp(accelerator: Any, plugin: Any, parallelism: Any = None) -> str:
    """Turn on FSDP on a CPU, where accelerate would train with DDP. Return the text of the setting `forced`.

    With FSDP1, `sync_module_states` of the plugin must be false. Each rank creates the same weights anyway.
    `parallelism` is a `ParallelismConfig`, which accelerate itself rejects on a CPU.
    """
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    from perfsuite.frameworks.common.private import validate_accelerator

    # Change both state objects, because each new AcceleratorState copies the attributes of PartialState.
    for state in (PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP
        state.device = torch.device("cpu")
    accelerator.state.fsdp_plugin = plugin
    if parallelism is not None:
        accelerator.state.parallelism_config = parallelism
        accelerator.state.device_mesh = parallelism.get_device_mesh("cpu")
        validate_accelerator(parallelism)(accelerator)
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    forced = "FSDP on a CPU, where accelerate turns it into DDP"
    if plugin.fsdp_version == 1:
        forced += "; without sync_module_states, which broadcasts from a GPU"
    return forced
