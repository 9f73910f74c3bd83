"""Process groups and meshes of ranks that are not there. Worker side; imports torch."""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed import device_mesh
from torch.distributed._tools import fake_collectives  # noqa: F401  the collectives of fake tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.library import Library
from torch.utils._python_dispatch import _disable_current_modes

from perfsuite.frameworks.common.patches import module, nothing, replace, replace_everywhere, wrap

COALESCED = (
    "allreduce_coalesced_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced_",
)
"""Collectives of c10d on several tensors at once: torch has no rule for them. Each returns a `Work` alone."""
MESH_METHODS = ("__init__", "__getitem__", "_flatten", "_unflatten", "_concatenate")
"""Methods of `DeviceMesh` that look at the numbers of ranks in it."""


_LIBRARY = Library("c10d", "IMPL")  # what is registered lives as long as it


def pretend(rank: int, world_size: int) -> None:
    """Make this process `rank` of `world_size`, with fake process groups. Call it when all is imported."""
    fake_store = module("torch.testing._internal.distributed.fake_pg").FakeStore
    init, new_group = dist.init_process_group, dist.new_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            init("fake", store=fake_store(), rank=rank, world_size=world_size)

    def group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        kept = {name: kwargs[name] for name in ("group_desc", "use_local_synchronization") if name in kwargs}
        with _disable_current_modes():
            return new_group(ranks, backend="fake", **kept)

    def all_gather_object(results: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
        results[:] = [value] * len(results)

    replace_everywhere(dist, "init_process_group", init_process_group)
    replace_everywhere(dist, "new_group", group)
    replace_everywhere(dist, "broadcast_object_list", nothing)
    replace_everywhere(dist, "all_gather_object", all_gather_object)
    for name in COALESCED:
        _LIBRARY.impl(name, lambda *args, **kwargs: FakeWork().boxed(), "Meta")
    # DTensor tries operators on fake tensors to learn shapes, in a mode of its own: that is not counted.
    replace(module("torch.distributed.tensor._sharding_prop"), "detect_fake_mode", lambda *args: None)
    for name in MESH_METHODS:
        wrap(DeviceMesh, name, _with_values)
    replace_everywhere(device_mesh, "init_device_mesh", _with_values(device_mesh.init_device_mesh))


def _with_values(function: Any) -> Callable[..., Any]:
    """Return `function` outside of every mode: the numbers of ranks are tensors, and they count."""

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return outside
