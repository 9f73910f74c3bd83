from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from perfsuite.results.counts import Collective
from perfsuite.worker.collectives import OPERATORS, call_of
from tests.fake_group import fake_group


class Messages(TorchDispatchMode):
    """Keeps every collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func._overloadpacket) in OPERATORS:
            made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            self.seen.append(call_of(str(func._overloadpacket), args, kwargs or {}, made, "forward"))
        return out


WORLD = 4
FULL, SHARD = torch.zeros(8), torch.zeros(2)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # functions that torch is about to rename
@pytest.mark.parametrize(
    ("call", "kind", "size"),
    [
        (lambda: dist.all_reduce(torch.zeros(8)), "all_reduce", 32),
        (lambda: dist.all_reduce(torch.eye(8).to_sparse()), "all_reduce", 256),
        (lambda: dist.broadcast(torch.zeros(8), 0), "broadcast", 32),
        (lambda: dist.all_gather_into_tensor(torch.zeros(8), SHARD), "all_gather", 32),
        (lambda: dist.all_gather([torch.zeros(2) for _ in range(WORLD)], SHARD), "all_gather", 32),
        (lambda: dist.reduce_scatter_tensor(torch.zeros(2), FULL), "reduce_scatter", 32),
        (lambda: dist.reduce_scatter(torch.zeros(2), list(FULL.split(2))), "reduce_scatter", 32),
        (lambda: dist.all_to_all_single(torch.zeros(8), FULL), "all_to_all", 32),
        (lambda: dist.send(FULL, 1), "send", 32),
        (lambda: dist.recv(torch.zeros(8), 1), "recv", 32),
        (lambda: dist.barrier(), "barrier", 0),
        (lambda: all_reduce(FULL, "sum", list(range(WORLD))), "all_reduce", 32),
        (lambda: all_gather_tensor(SHARD, 0, list(range(WORLD))), "all_gather", 32),
        (lambda: reduce_scatter_tensor(FULL, "sum", 0, list(range(WORLD))), "reduce_scatter", 32),
    ],
)
def test_each_kind_is_known_with_its_whole_message(call: Any, kind: str, size: int) -> None:
    with fake_group(0, WORLD), Messages() as messages:
        call()
    (message,) = messages.seen
    assert (message.kind, message.bytes) == (kind, size)
    assert (message.ranks, message.apart) == (WORLD, 1)
    assert message.dtype == ("" if kind == "barrier" else "float32")


def test_groups_of_one_size_are_told_apart_by_their_distance() -> None:
    with fake_group(0, WORLD), Messages() as messages:
        neighbours, strided, alone = dist.new_group([0, 1]), dist.new_group([0, 2]), dist.new_group([0])
        for group in (neighbours, strided, alone):
            dist.all_reduce(torch.zeros(1, dtype=torch.bfloat16), group=group)
    assert [(each.ranks, each.apart, each.dtype) for each in messages.seen] == [
        (2, 1, "bfloat16"),
        (2, 2, "bfloat16"),
        (1, 0, "bfloat16"),
    ]
