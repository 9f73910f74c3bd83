"""Keep the few numbers that a script moves to the device, so that the script can read them. Imports torch.

A fake tensor has no values. But libraries use tensors on the device to let all ranks decide together.
Lightning's Trainer, for example, broadcasts a flag before each step, and ends the training if it reads 1.
This module follows such numbers through operators and collectives, as if all ranks had the same numbers. It
does not see changes through `tensor.data`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from perfsuite.frameworks.common.private import (
    FakeTensor,
    changes_in_place,
    disable_current_modes,
    overloadpacket,
    tree_leaves,
    tree_map,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_NUMBERS = 16
"""The largest tensor that is followed. A decision is a single number, and a batch of tokens has more numbers
than this limit."""


@dataclass(frozen=True)
class _Numbers:
    """The values of a fake tensor, until an operator changes the tensor in place."""

    values: Tensor  # a real tensor on the CPU
    changes: int  # number of in-place changes of the fake tensor before the values were recorded


_NUMBERS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

_aten = torch.ops.aten
_FOLLOWED = frozenset(
    {
        *(torch.ops.aten._to_copy, _aten.clone, _aten.detach, _aten.alias, _aten.lift_fresh),
        *(_aten.view, _aten.unsqueeze, _aten.squeeze, _aten.select, _aten.slice, _aten.expand, _aten.t),
        *(_aten.cat, _aten.stack, _aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge),
        *(_aten.add, _aten.sub, _aten.mul, _aten.maximum, _aten.minimum, _aten.logical_not),
        *(_aten.logical_and, _aten.logical_or, _aten.bitwise_and, _aten.bitwise_or, _aten.bitwise_not),
        *(_aten.all, _aten.any, _aten.sum, _aten.max, _aten.min, _aten.amax, _aten.amin),
    }
)
"""Operators whose result is computed from known numbers. The result of any other operator is unknown."""
_OF_THE_DEVICE = ("device", "pin_memory", "non_blocking")  # arguments that are left out on the CPU

_KEEP_EQUAL_NUMBERS = (
    dist.ReduceOp.AVG,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
    dist.ReduceOp.BAND,
    dist.ReduceOp.BOR,
)
"""Reductions whose result is the number itself if all ranks have the same number."""
_SAME_ON_ALL_RANKS = frozenset({"c10d.broadcast_", "c10d.barrier", "c10d.monitored_barrier_"})


def values_of(tensor: Tensor) -> Tensor | None:
    """Return the values of a tensor as a real tensor on the CPU. None if they are unknown."""
    if not isinstance(tensor, FakeTensor):
        return tensor if type(tensor) is Tensor and tensor.device.type == "cpu" else None
    numbers: _Numbers | None = _NUMBERS.get(tensor)
    if numbers is None or numbers.changes != changes_in_place(tensor):
        return None
    return numbers.values


def follow(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
    """Compute the values of `out`, the fake result of an operator, if they follow from known whole numbers.

    Return `out`, or, if it is on the CPU, a real tensor with these values.
    """
    if not isinstance(out, FakeTensor) or overloadpacket(func) not in _FOLLOWED:
        return out
    if out.numel() > MOST_NUMBERS:
        return out
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(tensor.numel() > MOST_NUMBERS or not _is_known(tensor) for tensor in tensors):
        return out
    with disable_current_modes():
        real_args, real_kwargs = tree_map(_as_values, (args, kwargs))
        for name in _OF_THE_DEVICE:
            real_kwargs.pop(name, None)
        values = func(*real_args, **real_kwargs).clone()
    if out.device.type == "cpu" and not values.dtype.is_floating_point:
        return values
    _remember(out, values)
    return out


def forget(tensor: Tensor) -> None:
    """Forget the values of a tensor whose contents are replaced without an operator."""
    if isinstance(tensor, FakeTensor):
        _NUMBERS.pop(tensor, None)


def communicate(func: Any, args: Sequence[Any]) -> None:
    """Update the values of the tensors of a collective, after it ran without other ranks.

    The other ranks are assumed to have the same numbers. A sum over N ranks is then N times the number. A
    broadcast changes nothing, because the receiving tensors already have the numbers.
    """
    name = str(overloadpacket(func))
    if name in _SAME_ON_ALL_RANKS:
        return
    if name == "c10d.allreduce_":
        size = dist.ProcessGroup.unbox(args[1]).size()
        for tensor in args[0]:
            _write(tensor, _reduced(tensor, size, args[2].op()))
    elif name == "c10d.allgather_":
        for outputs, sent in zip(args[0], args[1], strict=True):
            for output in outputs:
                _write(output, values_of(sent))
    elif name == "c10d._allgather_base_":
        _write(args[0], _gathered(args[1], dist.ProcessGroup.unbox(args[2]).size()))
    else:
        for leaf in tree_leaves(args):
            forget(leaf)


def _is_known(tensor: Tensor) -> bool:
    """Return whether the values of a tensor are known.

    The values of a tensor that is not fake count as known only if they are not floating-point numbers.
    """
    if isinstance(tensor, FakeTensor):
        return values_of(tensor) is not None
    return values_of(tensor) is not None and not tensor.dtype.is_floating_point


def _as_values(leaf: Any) -> Any:
    return values_of(leaf) if isinstance(leaf, Tensor) else leaf


def _remember(tensor: Tensor, values: Tensor) -> None:
    _NUMBERS[tensor] = _Numbers(values, changes_in_place(tensor))


def _reduced(tensor: Tensor, size: int, operation: Any) -> Tensor | None:
    """Return the result of an all-reduce of equal numbers on `size` ranks; None if it is unknown."""
    values = values_of(tensor)
    if values is None or operation in _KEEP_EQUAL_NUMBERS:
        return values
    with disable_current_modes():
        if operation == dist.ReduceOp.SUM:
            return (values * size).to(values.dtype)
        return values**size if operation == dist.ReduceOp.PRODUCT else None


def _gathered(sent: Tensor, size: int) -> Tensor | None:
    """Return the result of an all-gather of equal numbers on `size` ranks; None if it is unknown."""
    values = values_of(sent)
    if values is None:
        return None
    with disable_current_modes():
        return values.reshape(-1).repeat(size)


def _write(tensor: Tensor, values: Tensor | None) -> None:
    """Let a collective write values to a tensor. Unknown values leave a real tensor as it is."""
    forget(tensor)
    if isinstance(tensor, FakeTensor):
        if values is not None and tensor.numel() <= MOST_NUMBERS:
            with disable_current_modes():
                _remember(tensor, values.reshape(tensor.shape).clone())
    elif values is not None:
        with disable_current_modes():
            tensor.copy_(values.reshape(tensor.shape))
