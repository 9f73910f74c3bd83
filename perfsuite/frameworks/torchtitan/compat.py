"""Patch torchtitan 0.3.0, in this process only, so that it runs with a released torch and on a CPU."""

import importlib.util
import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from perfsuite.frameworks.common import private
from perfsuite.frameworks.common.patches import nothing
from perfsuite.frameworks.common.private import schedule_stage, schedule_stages, step_microbatches

# Do not reword these texts. Results record them as settings, and compare them with the baseline's settings.
# The second text means that pipeline schedules accept micro-batches even if the version of torch itself
# accepts only a whole batch, which it then splits.
EVERYWHERE = (
    "torch.distributed.set_timeout is _set_pg_timeout where torch lacks it",
    "pipeline schedules take micro-batches where torch splits batches",
    "the log does not reset the device's peak memory, which the worker reads",
)
ON_CPU = (
    "torchtitan.tools.utils.device_module is a CPU's",
    "the kernels of minimal_async_ep are empty where Triton is not installed",
    "FSDP reduces by plain sums, gloo having no other",
)
# Describes what replaces parts of a registered configuration. `spmd_backend` is replaced because the
# `fully_shard` of torch 2.13 does not support `spmd_types`.
REPLACED = (
    "data and tokenizer by perfsuite's tokens; checkpoints, validation and profiler by nothing; the log by "
    "that of the last step; spmd_backend by partial_dtensor"
)
REPLACED_ON_CPU = "; attention by SDPA, without windows and sinks; the fused optimizer by a loop"
_IMAGES = "torchtitan.hf_datasets.multimodal.utils"
NEED = {  # package -> modules of torchtitan that import the package, but that no case uses
    "triton": ("torchtitan.distributed.minimal_async_ep.kernels",),
    "torchvision": (f"{_IMAGES}.image", f"{_IMAGES}.video"),  # imported even for Kimi's text models
}
_CPU = SimpleNamespace(  # a device module for torchtitan, with one device and no memory statistics
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), nothing),
    current_device=lambda: 0,
    device_count=lambda: 1,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1),
    memory_stats=lambda device: {},
)


def before_import(device_type: str) -> None:
    """Patch torch and torchtitan for a device, `cuda` or `cpu`. Call this before importing the Trainer.

    The Trainer calls `set_timeout` after its first step. In torch 2.13, this function is still called
    `_set_pg_timeout`. If there is no accelerator, torchtitan uses the device module of CUDA and queries its
    memory. `torch.cpu` cannot replace this module, because `torch.cpu` has no memory statistics, and because
    its `current_device` returns a name, but torchtitan needs an index.
    """
    import torch.distributed as dist

    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = private.set_pg_timeout  # type: ignore[attr-defined]
    if device_type == "cpu":
        from torchtitan.tools import utils

        utils.device_type = "cpu"
        utils.device_module = _CPU


def after_build(trainer: Any) -> None:
    """Patch a Trainer before it trains.

    torchtitan sets a gradient divisor, and FSDP would divide by it within the reduction. gloo cannot do this:
    it supports only plain sums.
    """
    from torch.distributed.fsdp import FSDPModule

    trainer.metrics_processor.device_memory_monitor.reset_peak_stats = nothing
    if trainer.parallel_dims.pp_enabled:
        _take_micro_batches(trainer.pp_schedule)
    if trainer.device.type == "cpu":
        for module in trainer.model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def _take_micro_batches(schedule: Any) -> None:
    """Make a pipeline schedule of torch 2.13 accept micro-batches instead of a batch, like later versions."""
    if "arg_mbs" in inspect.signature(schedule.step).parameters:
        return

    def step(
        *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, return_outputs: bool
    ) -> None:
        for stage in stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        step_microbatches(schedule)(
            arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs
        )

    has_several = hasattr(schedule, schedule_stages.name)
    stages = schedule_stages(schedule) if has_several else [schedule_stage(schedule)]
    schedule.step = step


def patches(device_type: str) -> str:
    """Describe the patches. The text is the same for every version of torch, to keep results comparable."""
    return "; ".join(EVERYWHERE + ON_CPU if device_type == "cpu" else EVERYWHERE)


def without_missing() -> None:
    """Make torchtitan importable without packages that only a few of its modules need.

    Each module that needs a missing package is replaced with an empty module. In such an empty module, every
    name has the value None.
    """
    for package, names in NEED.items():
        if importlib.util.find_spec(package) is None:
            for name in names:
                sys.modules[name] = empty = ModuleType(name)
                empty.__getattr__ = _none  # type: ignore[method-assign]


def _none(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)
