"""Helpers: process groups of one process.

The process is either the only rank, or one of many ranks in a group that sends nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from perfsuite.case.case import Case
from perfsuite.frameworks.base import Ranks
from perfsuite.frameworks.common.model import blocks, model_without_weights

CPU = torch.device("cpu")


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[Ranks]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield Ranks(rank=rank, world_size=world_size, device=CPU, directory=Path())
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it has results for this rank, which the next one must not use


@contextmanager
def alone() -> Iterator[Ranks]:
    """Yield the only rank of a gloo group."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        yield Ranks(rank=0, world_size=1, device=CPU, directory=Path())
    finally:
        dist.destroy_process_group()


def sharded_without_weights(case: Case) -> tuple[nn.Module, list[nn.Module]]:
    """Return a model sharded with FSDP2 over all ranks of the group, and its blocks."""
    model = model_without_weights(case, CPU)
    units = blocks(model)
    for unit in (*units, model):
        fully_shard(unit)
    return model, units
