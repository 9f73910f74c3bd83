"""Probe what the device can do before the workload is built: a matmul, a memory copy, an all-reduce.

The work is always the same. Compared with other launches or nodes, it separates a slow machine from slow
code.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist

from perfsuite.frameworks.common import private
from perfsuite.worker.clock.timers import CudaTimer, HostTimer

MIB = 2**20
WAKE_S = 0.2
# Probes of each device by `node_probe`; the best one shows what it can do, whatever else runs meanwhile.
ROUNDS = 10


def device_probe(device: torch.device) -> dict[str, float]:
    """Return rates of this rank's `torch.device`; higher is better. Every rank of the group must call it.

    - `matmul_tflops`: 4096 x 4096 in bf16 (fp16 where the GPU has no bf16), best of 5; on a CPU 384 x 384 in
      fp32 with the process's threads, median of 20. 2 n^3 operations each.
    - `copy_gb_s`: 256 MiB (CPU: 64) within the device's memory, best of 3; bytes read and written.
    - `all_reduce_gb_s`: 64 MiB (CPU: 4) in fp32, best of 20 after a barrier; bytes over time ("algorithm
      bandwidth", see nccl-tests' PERFORMANCE.md). Left out for a single rank, and without a process group.

    It keeps no memory, but on a CPU it temporarily raises peak memory by 128 MiB.
    """
    return {**_alone(device), **all_reduce_probe(device)}


def _alone(device: torch.device, *, best: bool = False) -> dict[str, float]:
    return _rounded({"matmul_tflops": _matmul_tflops(device, best=best), "copy_gb_s": _copy_gb_s(device)})


def all_reduce_probe(device: torch.device) -> dict[str, float]:
    """Return only `all_reduce_gb_s` of `device_probe`, for a process group that a library creates."""
    has_peers = dist.is_initialized() and dist.get_world_size() > 1
    return _rounded({"all_reduce_gb_s": _all_reduce_gb_s(device)}) if has_peers else {}


def node_probe(
    device: torch.device, nodes: int, on_round: Callable[[int], object], *, rounds: int = ROUNDS
) -> dict[str, float]:
    """Return the rates of `device_probe`, and those of all-reduces between two nodes.

    Every rank of a job on `nodes` nodes, two or more, must call it; the ranks of a node must be consecutive.
    `on_round` is called with the number of rounds so far. Matmul and copy are the best of `rounds`, in which
    all devices work at the same time; on a CPU the matmul is the best single one as well.

    - `next_gb_s`, `previous_gb_s`: like `all_reduce_gb_s`, over the ranks of this node and of the next or the
      previous one. The nodes form a ring. Of only two nodes, the first has a next one and the second a
      previous one.
    """
    best: dict[str, float] = {}
    for number in range(1, rounds + 1):
        dist.barrier()
        best = {name: max(rate, best.get(name, 0.0)) for name, rate in _alone(device, best=True).items()}
        on_round(number)
    return {**best, **all_reduce_probe(device), **_neighbour_probe(device, nodes)}


def pair_rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of neighbours in a ring of nodes. The pairs in one list have no node in common."""
    pairs = [(0, 1)] if nodes == 2 else [(node, (node + 1) % nodes) for node in range(nodes)]
    even = pairs[: len(pairs) // 2 * 2]
    return [each for each in (even[::2], even[1::2], pairs[len(even) :]) if each]


def _neighbour_probe(device: torch.device, nodes: int) -> dict[str, float]:
    per_node = dist.get_world_size() // nodes
    node = dist.get_rank() // per_node
    probed: dict[str, float] = {}
    for pairs in pair_rounds(nodes):
        ours = None
        name = ""
        for first, second in pairs:
            ranks = [each * per_node + rank for each in (first, second) for rank in range(per_node)]
            group = dist.new_group(ranks)  # every rank has to call it for every group
            if node in (first, second):
                ours = group
                name = "next_gb_s" if node == first else "previous_gb_s"
        if ours is not None:
            probed[name] = _all_reduce_gb_s(device, ours)
        dist.barrier()
    return _rounded(probed)


def _rounded(probed: dict[str, float]) -> dict[str, float]:
    if torch.cuda.is_initialized():  # otherwise torch would keep the buffers and cuBLAS's workspace
        torch.cuda.synchronize()
        clear = private.or_none("clear_cublas_workspaces")
        if clear is not None:
            clear()
        torch.cuda.empty_cache()
    return {name: float(f"{rate:.4g}") for name, rate in probed.items()}


def _matmul_tflops(device: torch.device, *, best: bool) -> float:
    on_gpu = device.type == "cuda"
    size, times, dtype = (4096, 5, torch.bfloat16) if on_gpu else (384, 20, torch.float32)
    if on_gpu and torch.cuda.get_device_capability(device) < (8, 0):
        dtype = torch.float16
    # Random numbers, since a GPU draws less power on zeros. The generator is our own, to keep the workload's.
    generator = torch.Generator(device).manual_seed(0)
    a = torch.rand(size, size, generator=generator, device=device).to(dtype)
    out = torch.empty_like(a)
    until = time.perf_counter() + WAKE_S
    while on_gpu and time.perf_counter() < until:  # brings the clocks up from idle
        torch.mm(a, a, out=out)
        torch.cuda.synchronize()
    taken = _seconds(device, lambda: torch.mm(a, a, out=out), times)
    return 2 * size**3 / (min if best or on_gpu else median)(taken) / 1e12


def _copy_gb_s(device: torch.device) -> float:
    size = (256 if device.type == "cuda" else 64) * MIB
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)  # the warm-up touches its pages
    return 2 * size / min(_seconds(device, lambda: target.copy_(source), 3)) / 1e9


def _all_reduce_gb_s(device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    size = (64 if device.type == "cuda" else 4) * MIB
    buffer = torch.zeros(size // 4, device=device)
    dist.barrier(group)  # a late rank would find the others waiting
    return size / min(_seconds(device, lambda: dist.all_reduce(buffer, group=group), 20)) / 1e9


@torch.no_grad()
def _seconds(device: torch.device, work: Callable[[], object], times: int) -> list[float]:
    timer, warm_ups = (CudaTimer(device), 3) if device.type == "cuda" else (HostTimer(), 1)
    for _ in range(warm_ups):
        work()
    marks = [timer.stamp()]
    for _ in range(times):
        work()
        marks.append(timer.stamp())
    timer.settle()
    return [timer.seconds(before, after) for before, after in pairwise(marks)]
