from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.distributed.tensor.experimental._context_parallel import _cp_custom_ops as in_parts

from tests.fake_group import fake_group
from tests.worker.loops import counted

WORLD = 4
ALL = list(range(WORLD))
FULL = torch.zeros(8)
SHARD = torch.zeros(2)


def world() -> str:
    """Return the name of the group of all ranks."""
    return str(dist.distributed_c10d._get_default_group().group_name)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # functions that torch is about to rename
@pytest.mark.parametrize(
    ("call", "kind", "calls", "size"),
    [
        (lambda: dist.all_reduce(torch.zeros(8)), "all_reduce", 1, 32),
        (lambda: dist.all_reduce(torch.eye(8).to_sparse()), "all_reduce", 1, 256),
        (lambda: dist.broadcast(torch.zeros(8), 0), "broadcast", 1, 32),
        (lambda: dist.all_gather_into_tensor(torch.zeros(8), SHARD), "all_gather", 1, 32),
        (lambda: dist.all_gather([torch.zeros(2) for _ in ALL], SHARD), "all_gather", 1, 32),
        (lambda: dist.reduce_scatter_tensor(torch.zeros(2), FULL), "reduce_scatter", 1, 32),
        (lambda: dist.reduce_scatter(torch.zeros(2), list(FULL.split(2))), "reduce_scatter", 1, 32),
        (lambda: dist.all_to_all_single(torch.zeros(8), FULL), "all_to_all", 1, 32),
        (lambda: dist.send(FULL, 1), "send", 1, 32),
        (lambda: dist.recv(torch.zeros(8), 1), "recv", 1, 32),
        (lambda: dist.barrier(), "barrier", 1, 0),
        (lambda: all_reduce(FULL, "sum", ALL), "all_reduce", 1, 32),
        (lambda: all_gather_tensor(SHARD, 0, ALL), "all_gather", 1, 32),
        (lambda: reduce_scatter_tensor(FULL, "sum", 0, ALL), "reduce_scatter", 1, 32),
        # Keys and values are sent in separate calls.
        (lambda: in_parts.flex_cp_allgather(SHARD, SHARD, 0, world()), "all_gather", 2, 64),
        (lambda: in_parts.flex_cp_allgather_backward(FULL, FULL, 0, world()), "reduce_scatter", 2, 64),
    ],
)
def test_each_kind_has_its_whole_message(call: Any, kind: str, calls: int, size: int) -> None:
    with fake_group(0, WORLD):
        (message,) = counted(call).collectives
    assert (message.kind, message.count, message.bytes) == (kind, calls, size)
    assert (message.ranks, message.apart) == (WORLD, 1)
    assert message.dtype == ("" if kind == "barrier" else "float32")


def test_distance_separates_groups_of_one_size() -> None:
    def reduce_in_each() -> None:
        for group in groups:
            dist.all_reduce(torch.zeros(1, dtype=torch.bfloat16), group=group)

    with fake_group(0, WORLD):
        groups = [dist.new_group(ranks) for ranks in ([0, 1], [0, 2], [0])]
        seen = counted(reduce_in_each).collectives
    assert [(collective.ranks, collective.apart) for collective in seen] == [(1, 0), (2, 1), (2, 2)]
    assert {collective.dtype for collective in seen} == {"bfloat16"}
