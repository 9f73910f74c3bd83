"""The last collective calls of one rank of a job that hangs, from torch's flight recorder."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from perfsuite.documents import Data, Sealed


class CollectiveCall(Data):
    """One call of a collective in a group."""

    number: int = Field(ge=0)  # sequence number in the group; the same call has the same number on all ranks
    name: str  # such as `all_reduce`
    sizes: tuple[tuple[int, ...], ...] = ()  # shapes of the tensors that the rank passed
    dtypes: tuple[str, ...] = ()
    is_done: bool
    age_s: float = 0  # seconds since the call
    place: str | None = None  # file and line of the caller, such as `train.py:22`; None if unknown


class GroupCalls(Data):
    """The last calls of a rank in one process group."""

    backend: str  # such as `nccl`
    name: str  # torch's name of the group, such as `0`
    description: str = ""  # such as `default_pg`
    ranks: tuple[int, ...]  # the global ranks of the group
    calls: tuple[CollectiveCall, ...] = ()  # the oldest first
    # The sends and receives that have not ended. Their names, such as `recv 0<-1`, contain the numbers that
    # the two ranks have in the group.
    open_messages: tuple[CollectiveCall, ...] = ()


class CollectiveCallsFile(Sealed):
    """`collectives-NODE-PID.json`: the last collective calls of one process."""

    schema_version: Literal[1] = 1
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    groups: tuple[GroupCalls, ...] = ()
