"""Hugging Face accelerate: DDP, FSDP1 and FSDP2 through `Accelerator`, or by a user's own YAML file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, model_validator

from perfsuite.case.framework import Promises, changed_fields
from perfsuite.errors import CaseError
from perfsuite.frameworks.accelerate.config import (
    MIXED_PRECISION,
    FsdpFields,
    LaunchConfig,
    Prefetch,
    Sharding,
)
from perfsuite.frameworks.base import DryPlan, Framework, Ranks, StepClock, Workload
from perfsuite.frameworks.common.accelerate_env import clear_environment, force_fsdp
from perfsuite.frameworks.common.sharding import (
    dry_plan,
    hybrid_within_nodes_unsupported,
    offload_unsupported,
)

if TYPE_CHECKING:
    from perfsuite.case.case import Case
    from perfsuite.case.hardware import Machine

_OPTIONS: dict[str | None, tuple[str, ...]] = {
    "ddp": (),
    "fsdp1": ("sharding_strategy", "backward_prefetch", "cpu_offload"),
    "fsdp2": ("reshard_after_forward", "cpu_offload"),
    None: (),
}
"""Strategy -> its options; with a configuration file (None) there are none."""


class Accelerate(Framework):
    """A strategy and its options by accelerate's names; or a file that `accelerate config` wrote.

    `Accelerate(strategy="fsdp2")`, `Accelerate(config="fsdp.yaml")`.
    """

    name: ClassVar[str] = "accelerate"
    packages: ClassVar[tuple[str, ...]] = ("accelerate",)
    promises: ClassVar[Promises] = Promises(ignores=frozenset({"quantization"}))

    strategy: Literal["ddp", "fsdp1", "fsdp2"] | None = None
    config: Annotated[
        LaunchConfig | None,
        BeforeValidator(lambda value: LaunchConfig.read(Path(value)) if _is_path(value) else value),
    ] = None
    """Path of a YAML file, read when the case is made."""
    sharding_strategy: Sharding = "FULL_SHARD"
    backward_prefetch: Prefetch = "NO_PREFETCH"
    reshard_after_forward: bool = True
    cpu_offload: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Accelerate:
        if (self.strategy is None) == (self.config is None):
            raise ValueError(
                "give either strategy ('ddp', 'fsdp1' or 'fsdp2') or config (the path of an accelerate YAML)"
            )
        allowed = _OPTIONS[self.strategy]
        for name in ("sharding_strategy", "backward_prefetch", "reshard_after_forward", "cpu_offload"):
            if name not in allowed and getattr(self, name) != type(self).model_fields[name].default:
                whose = f"strategy {self.strategy!r}" if self.strategy else "a configuration file"
                raise ValueError(
                    f"{name}={getattr(self, name)!r} does not go with {whose}, which takes "
                    f"{' and '.join(allowed) or 'no options'}"
                )
        return self

    def slug(self) -> str:
        """Return the id's part: name and changed options, or the name of the file."""
        parts = changed_fields(self, skip=frozenset({"config"}))
        return "-".join([self.name, *([Path(self.config.file).stem] if self.config else []), *parts])

    def unsupported(self, case: Case, machine: Machine) -> str | None:
        """Return why precision, sharding or offloading cannot run, or that the file wants a CPU for GPUs."""
        if case.precision not in MIXED_PRECISION:
            return f"precision {case.precision!r} is not one of {', '.join(MIXED_PRECISION)}"
        if self.config and self.config.fields.use_cpu and machine.device != "cpu":
            return f"{self.config.file}: use_cpu is true, but this machine trains on its GPUs"
        fsdp, processes = self._fsdp, case.topology.world_size
        is_offloaded = fsdp is not None and fsdp.fsdp_offload_params
        if is_offloaded and (reason := offload_unsupported("cpu_offload", machine)) is not None:
            return reason
        if fsdp is not None and fsdp.fsdp_version == 2:
            return None
        if processes < 2:
            return "accelerate wraps nothing in DDP, and torch shards nothing in FSDP1, on 1 process: needs 2"
        if fsdp is not None and fsdp.sharding.startswith("HYBRID"):
            return hybrid_within_nodes_unsupported(fsdp.sharding, case, machine)
        return None

    def check(self, case: Case) -> None:
        """Raise `CaseError` for a file that contradicts the case."""
        if self.config and (conflict := self.config.conflict(case)) is not None:
            raise CaseError(conflict)

    def dry(self, case: Case) -> DryPlan:
        """Return whether FSDP1 cuts flat parameters where ranks end."""
        fsdp = self._fsdp
        if fsdp is None:
            return dry_plan()
        offloads = fsdp.fsdp_offload_params or fsdp.fsdp_activation_checkpointing_offload
        return dry_plan(ranks_differ=fsdp.fsdp_version == 1, offloads=bool(offloads))

    def expected(self, case: Case) -> dict[str, str]:
        """Return the wrapper and the sharding of the strategy, or of the file."""
        fsdp = self._fsdp
        if fsdp is None:
            return {"wrapper": "DistributedDataParallel"}
        if fsdp.fsdp_version == 2:
            return {"wrapper": "FSDPModule", "sharding": "Shard(0)"}
        torch_name = fsdp.sharding.replace("HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2")
        return {"wrapper": "FullyShardedDataParallel", "sharding": torch_name}

    @property
    def _fsdp(self) -> FsdpFields | None:
        """FSDP's options as fields of a configuration file; None for DDP."""
        if self.config is not None:
            return self.config.fields.fsdp_config
        match self.strategy:
            case "fsdp1":
                return FsdpFields(
                    fsdp_version=1,
                    fsdp_sharding_strategy=self.sharding_strategy,
                    fsdp_backward_prefetch=self.backward_prefetch,
                    fsdp_offload_params=self.cpu_offload,
                )
            case "fsdp2":
                return FsdpFields(
                    fsdp_version=2,
                    fsdp_reshard_after_forward=self.reshard_after_forward,
                    fsdp_offload_params=self.cpu_offload,
                )
        return None

    def load(self, case: Case, device: Any) -> None:
        """Import accelerate, which takes little memory beyond transformers'."""
        import accelerate  # noqa: F401

    def build(self, case: Case, ranks: Ranks, clock: StepClock) -> Workload:
        """Build model and optimizer by `Accelerator.prepare`, and a loop of accelerate's calls."""
        from accelerate import Accelerator

        from perfsuite.frameworks.common.model import build_model, build_optimizer

        on_cpu = ranks.device.type == "cpu"
        settings = self._set_environment(on_cpu=on_cpu)
        plugin = self._plugin()
        accelerator = Accelerator(
            cpu=on_cpu,
            mixed_precision=MIXED_PRECISION[case.precision],
            gradient_accumulation_steps=case.gradient_accumulation,
            fsdp_plugin=plugin,
        )
        if plugin is not None:
            if on_cpu:
                settings["forced"] = force_fsdp(accelerator, plugin)
            if plugin.mixed_precision_policy is not None:
                settings["reduce_dtype"] = str(plugin.mixed_precision_policy.reduce_dtype)
            if plugin.activation_checkpointing:
                case = case.replace(activation_checkpointing="none")  # the plugin's own instead
        model: Any = build_model(case, ranks.device)
        if plugin is not None and plugin.fsdp_version == 1:
            model = accelerator.prepare(model)  # its parameters may be others than the optimizer would hold
            optimizer = accelerator.prepare(build_optimizer(case, model))
        else:
            model, optimizer = accelerator.prepare(model, build_optimizer(case, model))
        return Workload(
            run=_training_loop(case, ranks, accelerator, model, optimizer),
            data_parallel=ranks.world_size,
            model=model,
            settings=settings,
        )

    def _set_environment(self, *, on_cpu: bool) -> dict[str, str]:
        """Set accelerate's variables to what the file says, and no others. Return the settings to record."""
        clear_environment()
        if self.config is None:
            return {}
        os.environ.update(launcher_environment(self.config))
        settings = {"accelerate_config": self.config.digest}
        fsdp = self.config.fields.fsdp_config
        if on_cpu and fsdp is not None and fsdp.fsdp_version == 1:
            os.environ |= {"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
        return settings

    def _plugin(self) -> Any:
        from accelerate import FullyShardedDataParallelPlugin

        if self._fsdp is None:
            return None
        if self.config is not None:
            return FullyShardedDataParallelPlugin()  # from the environment
        options: dict[str, Any] = {
            "cpu_offload": self.cpu_offload,
            "auto_wrap_policy": "transformer_based_wrap",
        }
        if self.strategy == "fsdp2":
            return FullyShardedDataParallelPlugin(
                fsdp_version=2, reshard_after_forward=self.reshard_after_forward, **options
            )
        return FullyShardedDataParallelPlugin(
            fsdp_version=1,
            sharding_strategy=self.sharding_strategy,
            backward_prefetch=self.backward_prefetch,
            use_orig_params=True,
            **options,
        )


def _training_loop(
    case: Case, ranks: Ranks, accelerator: Any, model: Any, optimizer: Any
) -> Callable[[int], list[Any]]:
    """Return the loop with accelerate's `accumulate` and `backward`, as in its manual."""
    from perfsuite.frameworks.common.loop import next_token_loss, training_loop
    from perfsuite.frameworks.common.model import synthetic_batches

    def backward(loss: Any) -> Any:
        accelerator.backward(loss)  # divides by the number of micro-batches
        return loss.detach() / case.gradient_accumulation

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return training_loop(
        synthetic_batches(case, ranks.rank, ranks.device),
        case.gradient_accumulation,
        forward=partial(next_token_loss, model),
        backward=backward,
        sync=lambda is_last: accelerator.accumulate(model),
        step=step,
    )


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path)


def launcher_environment(config: LaunchConfig) -> dict[str, str]:
    """Return the variables that `accelerate launch --config_file` would set, by accelerate's own code.

    Variables for threads, ports and GPUs are left out: perfsuite's launch sets them.
    """
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(config.text)
        file.flush()
        arguments = launch.launch_command_parser().parse_args(["--config_file", file.name, "script.py"])
        arguments, _, _ = launch._validate_launch_command(arguments)
    if arguments.use_fsdp or arguments.multi_gpu:
        arguments.num_machines, arguments.main_process_port = 1, 0  # no port is taken: it launches nothing
        environment = prepare.prepare_multi_gpu_env(arguments)
    else:
        _, environment = prepare.prepare_simple_launcher_cmd_env(arguments)
    return {key: value for key, value in environment.items() if key.startswith(("ACCELERATE_", "FSDP_"))}
