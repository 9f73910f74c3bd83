"""Measure the rates of a device in a matmul, a memory copy and an all-reduce.

The work is always the same. If a rate is lower than in another launch or on another node, the machine is
slower, not the code.
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
# Number of times that `node_probe` probes each device. Even if another program disturbs some of these rounds,
# the best result shows the device's true rate.
ROUNDS = 10


def device_probe(device: torch.device) -> dict[str, float]:
    """Return the rates of a `torch.device`. Every rank of the process group must call this at the same time.

    - `matmul_tflops`: on a GPU, the best of 5 matmuls of 4096 x 4096 in bf16 (fp16 if the GPU has no bf16).
      On a CPU, the median of 20 matmuls of 384 x 384 in fp32, with all threads of the process. A matmul of
      n x n matrices counts as 2 n^3 operations.
    - `copy_gb_s`: the best of 3 copies of 256 MiB (CPU: 64 MiB) within the device's memory. Bytes that
      are read and bytes that are written both count.
    - `all_reduce_gb_s`: the best of 20 all-reduces of 64 MiB (CPU: 4 MiB) in fp32, after a barrier. The rate
      is bytes divided by time ("algorithm bandwidth" in nccl-tests' PERFORMANCE.md). The rate is left out
      if there is only one rank or no process group.

    The probe keeps no memory, but on a CPU it temporarily raises peak memory by 128 MiB.
    """
    return {**_alone(device), **all_reduce_probe(device)}


def _alone(device: torch.device, *, best: bool = False) -> dict[str, float]:
    return _rounded({"matmul_tflops": _matmul_tflops(device, best=best), "copy_gb_s": _copy_gb_s(device)})


def all_reduce_probe(device: torch.device) -> dict[str, float]:
    """Return only the `all_reduce_gb_s` of `device_probe`, for a process group that a library has created."""
    has_peers = dist.is_initialized() and dist.get_world_size() > 1
    return _rounded({"all_reduce_gb_s": _all_reduce_gb_s(device)}) if has_peers else {}


def node_probe(
    device: torch.device, nodes: int, on_round: Callable[[int], object], *, rounds: int = ROUNDS
) -> dict[str, float]:
    """Return the rates of `device_probe`, and the rates of all-reduces between neighbouring nodes.

    The job must have two or more nodes, with consecutive ranks on each node. Every rank must call this.
    `on_round` is called with the number of rounds so far.

    The rates of matmul and copy are the best of `ROUNDS` rounds, in which all devices work at the same time.
    On a CPU, the best single matmul counts here, but the median counts in `device_probe`.

    `next_gb_s` and `previous_gb_s` are like `all_reduce_gb_s`, but between the ranks of two nodes: this node
    and the next or previous node in a ring of all nodes. If there are only two nodes, the first one has only
    a next node, and the second one has only a previous node.
    """
    best: dict[str, float] = {}
    for number in range(1, rounds + 1):
        dist.barrier()
        best = {name: max(rate, best.get(name, 0.0)) for name, rate in _alone(device, best=True).items()}
        on_round(number)
    return {**best, **all_reduce_probe(device), **_neighbour_probe(device, nodes)}


def pair_rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of neighbours in a ring of nodes, split into lists.

    Each node is in at most one pair of a list, so all pairs of a list can be probed at the same time.
    """
    pairs = [(0, 1)] if nodes == 2 else [(node, (node + 1) % nodes) for node in range(nodes)]
    even = pairs[: len(pairs) // 2 * 2]
    return [
        pairs_of_round for pairs_of_round in (even[::2], even[1::2], pairs[len(even) :]) if pairs_of_round
    ]


def _neighbour_probe(device: torch.device, nodes: int) -> dict[str, float]:
    per_node = dist.get_world_size() // nodes
    node = dist.get_rank() // per_node
    probed: dict[str, float] = {}
    for pairs in pair_rounds(nodes):
        ours = None
        name = ""
        for first, second in pairs:
            ranks = [place * per_node + rank for place in (first, second) for rank in range(per_node)]
            group = dist.new_group(ranks)  # every rank must call this for every group
            if node in (first, second):
                ours = group
                name = "next_gb_s" if node == first else "previous_gb_s"
        if ours is not None:
            probed[name] = _all_reduce_gb_s(device, ours)
        dist.barrier()
    return _rounded(probed)


def _rounded(probed: dict[str, float]) -> dict[str, float]:
    # Free the buffers and cuBLAS's workspace, which torch would keep.
    if torch.cuda.is_initialized():
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
    # Use random numbers, because a GPU draws less power if it multiplies zeros. Use a separate generator, so
    # that the random numbers of the workload do not change.
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
    target = torch.empty_like(source)  # the warm-up of `_seconds` touches the pages of `target`
    return 2 * size / min(_seconds(device, lambda: target.copy_(source), 3)) / 1e9


def _all_reduce_gb_s(device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    size = (64 if device.type == "cuda" else 4) * MIB
    buffer = torch.zeros(size // 4, device=device)
    dist.barrier(group)  # do not time the wait for a late rank
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
