"""What torchtitan 0.3.0 needs to run with a released torch, and on a CPU. Worker side; torch when used.

torchtitan 0.3.0 is written for a nightly torch on an accelerator. Nothing of the installed package is edited:
the worker applies these patches to its own process, before it imports torchtitan, and the result names each.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any


def apply(device_type: str) -> list[str]:
    """Patch this process for `device_type` (`cuda` or `cpu`). Returns what was patched, and why."""
    patched = [_set_timeout()]
    if device_type == "cpu":
        patched += [_device_module(), _kernels_of_experts()]
    return [patch for patch in patched if patch is not None]


def _set_timeout() -> str | None:
    """On every machine: after its first step the Trainer calls `torch.distributed.set_timeout`.

    torch 2.13 has the function, as `_set_pg_timeout`; without the public name training ends with an
    AttributeError after one step.
    """
    import torch.distributed as dist

    if hasattr(dist, "set_timeout"):
        return None
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
    return "torch.distributed.set_timeout is _set_pg_timeout: this torch lacks the public name"


def _device_module() -> str:
    """On a CPU: torchtitan takes a machine without an accelerator for one with CUDA, and asks for its memory.

    `torch.cpu` has no memory statistics, and its `current_device` is a name where torchtitan wants an index.
    """
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = cpu_device_module()
    return "torchtitan.tools.utils.device_module is a CPU's: torchtitan knows accelerators only"


def cpu_device_module() -> Any:
    """What torchtitan uses of `torch.cuda`, for a CPU: one device, no memory statistics."""

    def nothing(*args: object) -> None:
        pass

    return SimpleNamespace(
        set_device=nothing,
        synchronize=nothing,
        empty_cache=nothing,
        reset_peak_memory_stats=nothing,
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_name=lambda device: "cpu",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1),
        memory_stats=lambda device: {},
    )


def _kernels_of_experts() -> str | None:
    """On a CPU: torch brings no Triton, and torchtitan imports its Triton kernels whatever the model.

    They serve mixtures of experts only; a use of one fails, for it is None.
    """
    if importlib.util.find_spec("triton") is not None:
        return None
    kernels = ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
    kernels.__getattr__ = _none  # type: ignore[method-assign]
    sys.modules[kernels.__name__] = kernels
    return f"{kernels.__name__} is empty: Triton is not installed, and a dense model needs none of it"


def _none(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)
