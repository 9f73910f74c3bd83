"""Make `torch.cuda` behave as on a machine with GPUs, for fake tensors. Imports torch.

`guard.load` must be called first. Builds of torch for CPUs and for CUDA then behave alike, and no driver is
used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from perfsuite.case.hardware import Machine
from perfsuite.dry import attention, streams
from perfsuite.frameworks.common import private
from perfsuite.frameworks.common.patches import nothing, replace, replace_everywhere
from perfsuite.frameworks.common.private import FakeTensorMode
from perfsuite.results.device_log import DeviceLog, EmptyCache

ONE_KERNEL = ("_fused_rms_norm", "_fused_rms_norm_backward", "mish_backward", "silu_backward")
"""Operators in torch's `native_functions.yaml` that a build for CUDA computes with a single kernel. A build
for CPUs does not have these kernels, and composes most of the operators from other operators."""

# The simulated version of NCCL. Scripts check whether NCCL supports bf16, which it does since 2.10.
NCCL = (2, 27, 7)
# The state of a GPU's random generator consists of a seed and an offset, of 8 bytes each.
RANDOM_STATE = torch.zeros(16, dtype=torch.uint8)
# Keep this object, because its registrations end when it is deleted.
_LIBRARY = torch.library.Library("aten", "IMPL")


class _NoNccl:
    """Replace `ProcessGroupNCCL`, which builds for CPUs lack. Scripts only set options of its groups."""

    class Options(SimpleNamespace):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(config=SimpleNamespace())


class _Generator(torch.Generator):
    """The random state of a GPU. Like a fake tensor, it has no values."""

    def get_state(self) -> torch.Tensor:
        return RANDOM_STATE

    def set_state(self, new_state: torch.Tensor) -> _Generator:
        return self

    def graphsafe_set_state(self, state: torch.Generator) -> _Generator:
        return self

    def clone_state(self) -> _Generator:
        return self

    graphsafe_get_state = clone_state

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> _Generator:
        return self


def pretend(machine: Machine, log: DeviceLog) -> None:
    """Make `torch.cuda` behave as on `machine`, for the rest of this process.

    Streams and events write to `log`.
    """
    # Fake tensors must not initialise CUDA, although `is_available` returns True here.
    replace(FakeTensorMode, "avoid_device_init", True)
    # In torch 2.11, this function would create a real tensor.
    setattr(*private.place("init_gpu_context"), nothing)
    for name, value in _answers(machine, log).items():
        # Some names are also in a submodule, such as `torch.cuda.random.get_rng_state`.
        replace_everywhere(torch.cuda, name, value)
    replace(torch.cuda, "default_generators", tuple(_Generator() for _ in range(machine.devices)))
    replace(*private.place("is_in_bad_fork"), _constant(False))
    replace(*private.place("cuda_lazy_init"), _constant(None))
    for name, value in _answers_for_accelerators(machine, log).items():
        replace(torch.accelerator, name, value)
    cudnn: Any = torch.backends.cudnn
    # Torch's own kernels are counted instead of cuDNN's, as in a build for CPUs.
    replace(cudnn.m, "is_available", _constant(False))
    replace(cudnn.m, "version", _constant(None))
    replace(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    replace(torch.Tensor, "pin_memory", lambda self, *args: self)
    # Use `setattr`, because a build for CPUs might lack this name.
    setattr(*private.place("raw_stream"), lambda index: 0)
    for name in ("range_push", "range_pop", "mark"):
        replace(torch.cuda.nvtx, name, nothing)
    replace(torch.distributed, "is_nccl_available", _constant(True))
    if not hasattr(torch.distributed, "ProcessGroupNCCL"):
        setattr(torch.distributed, "ProcessGroupNCCL", _NoNccl)  # noqa: B010  mypy knows that it is missing
    replace(torch.cuda.nccl, "version", _constant(NCCL))
    attention.pretend(machine)
    # Torch needs a registered kernel for each of these operators, but never runs it.
    for name in ONE_KERNEL:
        _LIBRARY.impl(name, _never, "CUDA")


def hide() -> None:
    """Hide this machine's GPUs from a process that simulates a CPU.

    The GPUs stay hidden even if a script sets CUDA_VISIBLE_DEVICES later. A build of torch for CUDA counts
    the GPUs only once. This happens here, while CUDA_VISIBLE_DEVICES is empty.
    """
    if torch.version.cuda is None:
        return
    torch.cuda.is_available()
    replace(torch.cuda, "device_count", _constant(0))
    replace(*private.place("cuda_lazy_init"), _no_gpu)


def _no_gpu() -> NoReturn:
    raise RuntimeError("no CUDA GPU is available, because this dry run simulates a CPU")


def _never(*args: Any) -> NoReturn:
    raise AssertionError("a fake tensor has no values to compute with")


def _answers(machine: Machine, log: DeviceLog) -> dict[str, Any]:
    """Return the stand-ins for names in `torch.cuda`.

    No two names share an object, because dynamo's tables are keyed by object.
    """
    capability = machine.compute_capability
    assert capability is not None
    properties = SimpleNamespace(
        name=machine.device_name,
        total_memory=machine.memory_bytes,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        gcnArchName="",
        uuid="",
    )
    return {
        **{name: _constant(None) for name in _IDLE},
        **{name: _constant(0) for name in _NO_BYTES},
        "device": lambda *args, **kwargs: contextlib.nullcontext(),
        **streams.stand_ins(log),
        "empty_cache": lambda: log.add(EmptyCache()),
        "current_device": _constant(0),
        "device_count": _constant(machine.devices),
        "get_device_capability": _constant(capability),
        "get_device_name": _constant(machine.device_name),
        "get_device_properties": _constant(properties),
        "get_rng_state": _constant(RANDOM_STATE),
        "is_available": _constant(True),
        # By default, torch counts the emulation of bf16 on GPUs before Ampere as support.
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
        "is_current_stream_capturing": _constant(False),
        "is_initialized": _constant(True),
        "mem_get_info": _constant((machine.memory_bytes, machine.memory_bytes)),
        "memory_stats": lambda *args, **kwargs: {},
        "memory_stats_as_nested_dict": lambda *args, **kwargs: {},
        "memory_summary": _constant(""),
    }


def _answers_for_accelerators(machine: Machine, log: DeviceLog) -> dict[str, Any]:
    """Return the stand-ins for names in `torch.accelerator` that would use an allocator or a device."""
    of_streams = streams.stand_ins(log)
    return {
        # FSDP2 waits on the current stream after a frozen layer.
        **{name: of_streams[name] for name in ("current_stream", "set_stream", "synchronize")},
        "empty_cache": lambda: log.add(EmptyCache()),
        "device_count": _constant(machine.devices),
        "get_memory_info": _constant((machine.memory_bytes, machine.memory_bytes)),
        "memory_stats": lambda *args, **kwargs: {},
        **{name: _constant(None) for name in _IDLE_ACCELERATOR},
        **{name: _constant(0) for name in _NO_BYTES},
    }


_IDLE_ACCELERATOR = (*("reset_accumulated_memory_stats", "reset_peak_memory_stats"),)
_IDLE = (
    *("init", "manual_seed", "manual_seed_all", "reset_max_memory_allocated"),
    *("reset_peak_memory_stats", "set_device", "set_rng_state"),
)
_NO_BYTES = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value
