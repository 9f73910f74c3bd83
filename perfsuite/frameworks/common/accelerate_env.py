"""accelerate's environment variables and state, for the frameworks that train through it."""

import os
import tempfile
from typing import Any

# How the names of the variables begin that accelerate reads.
VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def clear_environment() -> None:
    """Remove every variable that accelerate would read: the case alone decides."""
    for key in [key for key in os.environ if key.startswith(VARIABLES)]:
        del os.environ[key]


def launcher_environment(config: str) -> dict[str, str]:
    """Return the variables of `accelerate launch --config_file`, but those for threads, ports and GPUs."""
    from accelerate.commands import launch
    from accelerate.utils import launch as prepare

    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(config)
        file.flush()
        arguments = launch.launch_command_parser().parse_args(["--config_file", file.name, "script.py"])
        arguments, _, _ = launch._validate_launch_command(arguments)
    if arguments.use_fsdp or arguments.multi_gpu:
        arguments.num_machines, arguments.main_process_port = 1, 0  # no port is taken: it launches nothing
        environment = prepare.prepare_multi_gpu_env(arguments)
    else:
        _, environment = prepare.prepare_simple_launcher_cmd_env(arguments)
    return {key: value for key, value in environment.items() if key.startswith(VARIABLES)}


def force_fsdp(accelerator: Any, plugin: Any, parallelism: Any = None) -> str:
    """Turn FSDP on for a CPU, where accelerate trains DDP instead. Returns what to record.

    FSDP1's plugin must be without `sync_module_states`; each rank makes the same weights anyway.
    `parallelism` is a `ParallelismConfig`, which accelerate itself refuses on a CPU.
    """
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    # AcceleratorState copies PartialState's attributes whenever somebody asks for it.
    for state in (PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP
        state.device = torch.device("cpu")
    accelerator.state.fsdp_plugin = plugin
    if parallelism is not None:
        accelerator.state.parallelism_config = parallelism
        accelerator.state.device_mesh = parallelism.get_device_mesh("cpu")
        parallelism._validate_accelerator(accelerator)
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    forced = "FSDP on a CPU, where accelerate turns it into DDP"
    if plugin.fsdp_version == 1:
        forced += "; without sync_module_states, which broadcasts from a GPU"
    return forced
