"""Probes what the device can do before the workload is built: a matmul, a memory copy, an all-reduce.

Worker side; imports no pytest, and torch only inside functions. These are not the data sheet's figures but
always the same piece of work: compared with those of other launches they tell a slow machine from slow code.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

MIB = 2**20
WAKE_S = 0.2


def device_probe(device: Any) -> dict[str, float]:
    """Return rates of this rank's `torch.device`, higher is better. Every rank of the group must call it.

    - `matmul_tflops`: 4096 x 4096 in bf16 (fp16 where the GPU has no bf16), best of 5; on a CPU 384 x 384 in
      fp32 with the process's threads, median of 20. 2 n^3 operations each.
    - `copy_gb_s`: 256 MiB (CPU: 64) within the device's memory, best of 3; bytes read and written.
    - `all_reduce_gb_s`: 64 MiB (CPU: 4) in fp32, best of 20 after a barrier; bytes over time ("algorithm
      bandwidth", see nccl-tests' PERFORMANCE.md). Left out of one rank alone, and without a process group.

    It leaves no memory behind, but on a CPU raises the peak of it by 128 MiB meanwhile.
    """
    import torch

    on_gpu = device.type == "cuda"
    seconds: Callable[[Callable[[], object], int], list[float]] = _gpu_seconds if on_gpu else _cpu_seconds
    with torch.no_grad():
        probed = {
            "matmul_tflops": _matmul_tflops(device, seconds),
            "copy_gb_s": _copy_gb_s(device, seconds),
        }
        if _has_peers():
            probed["all_reduce_gb_s"] = _all_reduce_gb_s(device, seconds)
    return _rounded(probed, on_gpu)


def all_reduce_probe(device: Any) -> dict[str, float]:
    """Return `all_reduce_gb_s` of `device_probe` alone: if a library makes the process group itself."""
    import torch

    if not _has_peers():
        return {}
    on_gpu = device.type == "cuda"
    with torch.no_grad():
        rate = _all_reduce_gb_s(device, _gpu_seconds if on_gpu else _cpu_seconds)
    return _rounded({"all_reduce_gb_s": rate}, on_gpu)


def _has_peers() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _rounded(probed: dict[str, float], on_gpu: bool) -> dict[str, float]:
    if on_gpu:
        _forget_gpu_memory()
    return {name: float(f"{rate:.4g}") for name, rate in probed.items()}


def _matmul_tflops(device: Any, seconds: Any) -> float:
    import torch

    if device.type == "cuda":
        size = 4096
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    else:
        size, dtype = 384, torch.float32
    # Not zeros, on which a GPU draws less power; of an own generator, which leaves the workload's alone.
    generator = torch.Generator(device).manual_seed(0)
    a = torch.rand(size, size, generator=generator, device=device).to(dtype)
    out = torch.empty_like(a)
    if device.type == "cuda":
        _wake(lambda: torch.mm(a, a, out=out))
    taken = seconds(lambda: torch.mm(a, a, out=out), 5 if device.type == "cuda" else 20)
    best = min(taken) if device.type == "cuda" else median(taken)
    return float(2 * size**3 / best / 1e12)


def _copy_gb_s(device: Any, seconds: Any) -> float:
    import torch

    size = (256 if device.type == "cuda" else 64) * MIB
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)  # touched by the warm-up
    return float(2 * size / min(seconds(lambda: target.copy_(source), 3)) / 1e9)


def _all_reduce_gb_s(device: Any, seconds: Any) -> float:
    import torch
    import torch.distributed as dist

    size = (64 if device.type == "cuda" else 4) * MIB
    buffer = torch.zeros(size // 4, device=device)
    dist.barrier()  # who comes last would find the others waiting
    return float(size / min(seconds(lambda: dist.all_reduce(buffer), 20)) / 1e9)


def _cpu_seconds(work: Callable[[], object], times: int) -> list[float]:
    work()
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return taken


def _gpu_seconds(work: Callable[[], object], times: int) -> list[float]:
    """Time each call by events, without waiting between them."""
    import torch

    for _ in range(3):
        work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def _wake(work: Callable[[], object]) -> None:
    """Bring the clocks up from idle."""
    import torch

    until = time.perf_counter() + WAKE_S
    while time.perf_counter() < until:
        work()
        torch.cuda.synchronize()


def _forget_gpu_memory() -> None:
    """Free the buffers and cuBLAS's workspace, which torch would keep."""
    import torch

    torch.cuda.synchronize()
    clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear_workspaces is not None:
        clear_workspaces()
    torch.cuda.empty_cache()
