"""Read the kind, group, dtype and bytes of collectives from torch's dispatcher.

Every collective, including those called from C++, passes through the dispatcher as an operator of `c10d` or
of `_c10d_functional`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_process_group_ranks

from perfsuite.frameworks.common.private import resolve_process_group, script_type, tree_leaves
from perfsuite.results.counts import Collective, Phase

Where = int | slice | Literal["out"] | None
"""The position of a collective's message, which is the whole tensor that is gathered, scattered or sent. A
number is the index of an argument, and a slice selects several arguments. `out` means that the message is the
result. None means that there is no message."""

# Operator without its overload -> kind of the collective, and position of its message.
OPERATORS: Mapping[str, tuple[str, Where]] = {
    "c10d.allreduce_": ("all_reduce", 0),
    "c10d.allreduce_coalesced_": ("all_reduce", 0),
    "c10d.allgather_": ("all_gather", 0),
    "c10d._allgather_base_": ("all_gather", 0),
    "c10d.allgather_coalesced_": ("all_gather", 0),
    "c10d.allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d.reduce_scatter_": ("reduce_scatter", 1),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d.reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d.broadcast_": ("broadcast", 0),
    "c10d.reduce_": ("reduce", 0),
    "c10d.gather_": ("gather", 1),
    "c10d.scatter_": ("scatter", 0),
    "c10d.alltoall_": ("all_to_all", 1),
    "c10d.alltoall_base_": ("all_to_all", 1),
    "c10d.send": ("send", 0),
    "c10d.recv_": ("recv", 0),
    "c10d.recv_any_source_": ("recv", 0),
    "c10d.barrier": ("barrier", None),
    "c10d.monitored_barrier_": ("barrier", None),
    "_c10d_functional.all_reduce": ("all_reduce", 0),
    "_c10d_functional.all_reduce_": ("all_reduce", 0),
    "_c10d_functional.all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional.all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", "out"),
    "_c10d_functional.all_gather_into_tensor_out": ("all_gather", "out"),
    "_c10d_functional.all_gather_into_tensor_coalesced": ("all_gather", "out"),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional.reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional.reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0),
    "_c10d_functional.broadcast": ("broadcast", 0),
    "_c10d_functional.broadcast_": ("broadcast", 0),
    "_c10d_functional_autograd.all_gather_into_tensor": ("all_gather", "out"),
    "_c10d_functional_autograd.reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional_autograd.all_to_all_single": ("all_to_all", 0),
    "_dtensor.shard_dim_alltoall": ("all_to_all", 0),
    # Context parallelism exchanges keys and values with these operators. The dispatcher does not see the
    # collectives that they call.
    "cplib.flex_cp_allgather": ("all_gather", "out"),
    "cplib.flex_cp_allgather_backward": ("reduce_scatter", slice(2)),
}

ONE_FOR_EACH = frozenset(name for name in OPERATORS if name.startswith("cplib."))
"""Operators that call one collective for each tensor. Other operators call one collective for all tensors."""


def call_of(
    operator: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Tensor], phase: Phase
) -> Collective:
    """Return the collective that a call of an operator runs. `results` are the tensors that it returned."""
    kind, where = OPERATORS[operator]
    message = results if where == "out" else () if where is None else args[where]
    sent = [leaf for leaf in tree_leaves(message) if isinstance(leaf, Tensor)]
    ranks = get_process_group_ranks(_group(args, kwargs))
    return Collective(
        kind=kind,
        ranks=len(ranks),
        apart=ranks[1] - ranks[0] if len(ranks) > 1 else 0,
        dtype=str(sent[0].dtype).removeprefix("torch.") if sent else "",
        phase=phase,
        count=len(sent) if operator in ONE_FOR_EACH else 1,
        # Sparse tensors have no `nbytes`.
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in sent),
    )


def _group(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the process group of a call.

    Operators of c10d get the group as an object. Other operators get the name of the group, as their
    last argument that is a string.
    """
    given = (*args, *kwargs.values())
    for value in given:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(script_type(value)):
            return ProcessGroup.unbox(value)
    return resolve_process_group([value for value in given if isinstance(value, str)][-1])
