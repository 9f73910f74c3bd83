"""Make DDP, including its C++ reducer, and FSDP1 work with fake tensors in a dry run. Imports torch.

A dry run sees the reducer's work that goes through the dispatcher. Work that needs values or other ranks is
left out.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perfsuite.frameworks.common import private
from perfsuite.frameworks.common.patches import attribute, nothing, replace, wrap
from perfsuite.frameworks.common.private import cdata


def fsdp1() -> None:
    """Make FSDP1 shard fake tensors, which have no addresses, for the rest of this process."""
    replace(*private.place("data_ptr_allocated"), lambda tensor: tensor.untyped_storage().nbytes() > 0)
    replace(
        *private.place("same_storage"),
        lambda a, b: cdata(a.untyped_storage()) == cdata(b.untyped_storage()),
    )


def ddp() -> None:
    """Make DDP wrap fake tensors for the rest of this process."""
    replace(*private.place("verify_shapes"), nothing)
    assign = attribute(*private.place("bucket_assignment"))
    first_bytes = attribute(*private.place("first_bucket_bytes"))

    def with_pretended_reducer(init: Any) -> Any:
        @functools.wraps(init)
        def pretended(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            asked = kwargs.get("bucket_cap_mb")  # if no size is given, the first bucket is small
            limits = [first_bytes, 25 << 20] if asked is None else [int(asked * 2**20)]
            replace(*private.place("bucket_assignment"), functools.partial(_as_rebuilt, assign, limits))
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            used = 0  # length of the map of used parameters
            if trained and trained[0].device.type == "cuda" and kwargs.pop("find_unused_parameters", False):
                # The reducer copies the map through pinned memory, which is not simulated.
                used = len(trained)
            init(self, module, *args, **kwargs)
            self.register_comm_hook((self.process_group, used), _all_reduce)
            replace(self, "logger", _NoLog())  # the real logger needs CUDA events
            replace(self, "reducer", _Reducer(self.reducer))

        return pretended

    wrap(DistributedDataParallel, "__init__", with_pretended_reducer)


def _as_rebuilt(assign: Any, limits: Any, parameters: Any, at_first: Any, sparse: Any, *more: Any) -> Any:
    """Return the buckets that DDP creates in step 2: gradients arrive in the reverse order of parameters."""
    last = len(parameters) - 1
    buckets, sizes = assign(parameters[::-1], limits, sparse[::-1])
    in_order = [[last - index for index in bucket] for bucket in buckets]
    return in_order[::-1], sizes[::-1]  # DDP reverses the two lists


class _NoLog:
    def __getattr__(self, name: str) -> Any:
        return nothing


class _Reducer:
    """The C++ reducer, but buckets are never rebuilt: that would send their indices to other ranks."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _all_reduce(state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  DDP reads annotations
    """Do the reducer's default all-reduce. Return a filled future: a fake collective never fills its own."""
    group, used = state  # `used`: length of the map of used parameters, which holds one int32 per parameter
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=group)
    if used and bucket.is_last():
        dist.all_reduce(torch.zeros(used, dtype=torch.int32, device=buffer.device), group=group)
    future: Any = torch.futures.Future()
    future.set_result(buffer)
    return future
