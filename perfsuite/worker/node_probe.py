"""Probes what the device can do before the workload is built: a matmul, a memory copy, an all-reduce.

Worker side; imports no pytest, and torch only inside functions. These are not the data sheet's figures but
always the same piece of work: compared with those of other launches they tell a slow machine from slow code,
and compared with those of other nodes a slow node (`perfsuite.results.preflight`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

MIB = 2**20
WAKE_S = 0.2
ROUNDS = 10
"""How often `node_probe` probes each device, over seconds: the best of them is what the node can do, whatever
others do on it now and then."""


def device_probe(device: Any) -> dict[str, float]:
    """Return rates of this rank's `torch.device`, higher is better. Every rank of the group must call it.

    - `matmul_tflops`: 4096 x 4096 in bf16 (fp16 where the GPU has no bf16), best of 5; on a CPU 384 x 384 in
      fp32 with the process's threads, median of 20. 2 n^3 operations each.
    - `copy_gb_s`: 256 MiB (CPU: 64) within the device's memory, best of 3; bytes read and written.
    - `all_reduce_gb_s`: 64 MiB (CPU: 4) in fp32, best of 20 after a barrier; bytes over time ("algorithm
      bandwidth", see nccl-tests' PERFORMANCE.md). Left out of one rank alone, and without a process group.

    It leaves no memory behind, but on a CPU raises the peak of it by 128 MiB meanwhile.
    """
    return {**_alone(device), **all_reduce_probe(device)}


def _alone(device: Any, *, best: bool = False) -> dict[str, float]:
    """Return the rates of `device_probe` that need no other rank; `best` takes a CPU's best matmul, too."""
    import torch

    on_gpu = device.type == "cuda"
    seconds: Callable[[Callable[[], object], int], list[float]] = _gpu_seconds if on_gpu else _cpu_seconds
    with torch.no_grad():
        probed = {
            "matmul_tflops": _matmul_tflops(device, seconds, best=best or on_gpu),
            "copy_gb_s": _copy_gb_s(device, seconds),
        }
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


def node_probe(device: Any, nodes: int, on_round: Callable[[int], object]) -> dict[str, float]:
    """Return what `device_probe` does, and rates of all-reduces between two nodes.

    Every rank of a job on `nodes` nodes, two or more, must call it; the ranks of a node follow each other.
    `on_round` is called with the number of rounds so far. Matmul and copy are the best of `ROUNDS`, in which
    all devices work at the same time; on a CPU the matmul is the best single one, too: what others do on the
    node meanwhile hides it less.

    - `next_gb_s`, `previous_gb_s`: as `all_reduce_gb_s`, over the ranks of this node and of the next or the
      previous one. Nodes are a ring; the first of two has a next one only, the second a previous one only.
    """
    import torch.distributed as dist

    best: dict[str, float] = {}
    for number in range(1, ROUNDS + 1):
        dist.barrier()
        best = {name: max(rate, best.get(name, 0.0)) for name, rate in _alone(device, best=True).items()}
        on_round(number)
    return {**best, **all_reduce_probe(device), **_neighbour_probe(device, nodes)}


def pair_rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of neighbours in a ring of nodes; those in one list have no node in common."""
    pairs = [(0, 1)] if nodes == 2 else [(node, (node + 1) % nodes) for node in range(nodes)]
    last = pairs[-1:] if len(pairs) % 2 else []
    even = pairs[: len(pairs) - len(last)]
    return [each for each in (even[::2], even[1::2], last) if each]


def _neighbour_probe(device: Any, nodes: int) -> dict[str, float]:
    """Return the rates of `node_probe` between nodes: pairs without a common node talk at the same time."""
    import torch
    import torch.distributed as dist

    on_gpu = device.type == "cuda"
    per_node = dist.get_world_size() // nodes
    node = dist.get_rank() // per_node
    probed: dict[str, float] = {}
    for pairs in pair_rounds(nodes):
        ours, name = None, ""
        for first, second in pairs:
            ranks = [each * per_node + rank for each in (first, second) for rank in range(per_node)]
            group = dist.new_group(ranks)  # every rank has to call it for every group
            if node in (first, second):
                ours, name = group, "next_gb_s" if node == first else "previous_gb_s"
        if ours is not None:
            with torch.no_grad():
                probed[name] = _all_reduce_gb_s(device, _gpu_seconds if on_gpu else _cpu_seconds, ours)
        dist.barrier()
    return _rounded(probed, on_gpu)


def _has_peers() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _rounded(probed: dict[str, float], on_gpu: bool) -> dict[str, float]:
    if on_gpu:
        _forget_gpu_memory()
    return {name: float(f"{rate:.4g}") for name, rate in probed.items()}


def _matmul_tflops(device: Any, seconds: Any, *, best: bool) -> float:
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
    return float(2 * size**3 / (min if best else median)(taken) / 1e12)


def _copy_gb_s(device: Any, seconds: Any) -> float:
    import torch

    size = (256 if device.type == "cuda" else 64) * MIB
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)  # touched by the warm-up
    return float(2 * size / min(seconds(lambda: target.copy_(source), 3)) / 1e9)


def _all_reduce_gb_s(device: Any, seconds: Any, group: Any = None) -> float:
    import torch
    import torch.distributed as dist

    size = (64 if device.type == "cuda" else 4) * MIB
    buffer = torch.zeros(size // 4, device=device)
    dist.barrier(group)  # who comes last would find the others waiting
    return float(size / min(seconds(lambda: dist.all_reduce(buffer, group=group), 20)) / 1e9)


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
