"""Explain in one sentence why ranks wait for each other, from their last collective calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from perfsuite import documents
from perfsuite.results.collective_calls import CollectiveCall, CollectiveCallsFile, GroupCalls
from perfsuite.results.run_dir import RunDir

LEAST_WAIT_S = 2.0
"""A call is mentioned only if it has been open for at least this many seconds. Ranks write their calls at
slightly different times, so the calls of ranks that are still training do not fit together."""
# Collectives to which every rank must pass tensors of the same sizes and dtypes.
OF_EQUAL_SIZES = frozenset({"all_reduce", "allreduce_coalesced", "broadcast", "reduce"})
NO_DESCRIPTION = ("", "undefined")
MOST_RANKS = 6  # maximum number of ranks that a message lists one by one
MOST_MESSAGES = 3  # maximum number of sends and receives that a message lists


def calls_of(run_dir: RunDir, world_size: int) -> dict[int, CollectiveCallsFile]:
    """Return the last collective calls of each rank that wrote them, by rank.

    Processes of other jobs are left out, and so are ranks for which two processes wrote calls.
    """
    read = (documents.read_or_none(file, CollectiveCallsFile) for file in run_dir.all_collectives())
    files = [file for file in read if file is not None and file.world_size == world_size]
    processes = Counter(file.rank for file in files)
    return {file.rank: file for file in files if processes[file.rank] == 1}


def explain(files: Mapping[int, CollectiveCallsFile]) -> str | None:
    """Return why the ranks wait, as the end of a sentence; None if their calls do not show it."""
    stuck = sorted(_stuck_calls(files), key=lambda call: -call.wait_s)
    messages = _open_messages(files)
    waiting = {rank for call in stuck for rank in call.waiting} | {rank for rank, _, _ in messages}
    incomplete = [call for call in stuck if call.missing]
    for call in incomplete:
        free = [rank for rank in call.missing if rank not in waiting]
        if free:
            return _missing(call, free)
    if incomplete:  # the missing ranks wait as well, in other collectives
        return "; ".join(_missing(call, call.missing) for call in incomplete[:2])
    for call in stuck:
        unequal = _unequal(call)
        if unequal is not None:
            return unequal
    if stuck:
        return _stalled(stuck)
    return _in_messages(messages)


@dataclass(frozen=True, kw_only=True)
class _StuckCall:
    """The earliest collective of a group that has not completed on every rank."""

    group: GroupCalls
    number: int
    calls: Mapping[int, tuple[CollectiveCall, ...]]  # calls of each rank; several if coalesced
    waiting: Sequence[int]  # ranks that have called it but not completed it
    missing: Sequence[int]  # ranks that have not called it
    unknown: Sequence[int]  # ranks of the group that wrote no calls

    @property
    def call(self) -> CollectiveCall:
        """The call of the lowest waiting rank."""
        return self.calls[self.waiting[0]][0]

    @property
    def wait_s(self) -> float:
        """The shortest wait of all waiting ranks, in seconds."""
        return min(call.age_s for rank in self.waiting for call in self.calls[rank])

    @property
    def name(self) -> str:
        """The name of the collective with its number and group."""
        return f"{self.call.name} {self.number} of {_group_name(self.group)}"

    @property
    def place(self) -> str:
        """The place of the call in brackets; empty if it is unknown."""
        return f" ({self.call.place})" if self.call.place else ""


def _stuck_calls(files: Mapping[int, CollectiveCallsFile]) -> list[_StuckCall]:
    groups: dict[tuple[str, str, tuple[int, ...]], dict[int, GroupCalls]] = {}
    for rank, file in files.items():
        for group in file.groups:
            groups.setdefault((group.backend, group.name, group.ranks), {})[rank] = group
    calls = (_stuck_call(of_ranks, files) for of_ranks in groups.values())
    return [call for call in calls if call is not None and call.wait_s >= LEAST_WAIT_S]


def _stuck_call(of_ranks: Mapping[int, GroupCalls], files: Collection[int]) -> _StuckCall | None:
    """Return a group's earliest call that is still open on a rank; None if all calls are done."""
    open_numbers = [call.number for group in of_ranks.values() for call in group.calls if not call.is_done]
    if not open_numbers:
        return None
    number = min(open_numbers)
    group = next(iter(of_ranks.values()))
    calls = {
        rank: tuple(call for call in group.calls if call.number == number)
        for rank, group in sorted(of_ranks.items())
    }
    last = {rank: max((call.number for call in group.calls), default=0) for rank, group in of_ranks.items()}
    return _StuckCall(
        group=group,
        number=number,
        calls=calls,
        waiting=[rank for rank, its in calls.items() if any(not call.is_done for call in its)],
        missing=[rank for rank in group.ranks if rank in files and last.get(rank, 0) < number],
        unknown=[rank for rank in group.ranks if rank not in files],
    )


def _missing(call: _StuckCall, missing: Sequence[int]) -> str:
    has = "has" if len(missing) == 1 else "have"
    waits = "has" if len(call.waiting) == 1 else "have"
    return (
        f"{_ranks(missing)} {has} not called {call.name}, in which {_ranks(call.waiting)} {waits} waited "
        f"for {call.wait_s:.0f} s{call.place}"
    )


def _unequal(call: _StuckCall) -> str | None:
    """Return how the ranks' calls differ, or None if they are equal."""
    names = {rank: " and ".join(each.name for each in its) for rank, its in call.calls.items() if its}
    if len(set(names.values())) > 1:
        return _odd_ones_out(call, names)
    if not all(each.name in OF_EQUAL_SIZES for its in call.calls.values() for each in its):
        return None
    tensors = {rank: ", ".join(_tensors(each) for each in its) for rank, its in call.calls.items() if its}
    return _odd_ones_out(call, tensors, " with ") if len(set(tensors.values())) > 1 else None


def _tensors(call: CollectiveCall) -> str:
    dtypes = [*call.dtypes, *[""] * (len(call.sizes) - len(call.dtypes))]
    return " and ".join(
        f"{dtype} {list(size)}".strip() for size, dtype in zip(call.sizes, dtypes, strict=False)
    )


def _odd_ones_out(call: _StuckCall, values: Mapping[int, str], joint: str = "") -> str:
    """Describe how the calls of a few ranks differ from the calls of most ranks."""
    ordered = [value for value, _ in Counter(values.values()).most_common()]
    by_value = {value: [rank for rank in values if values[rank] == value] for value in ordered}
    usual, odd, *_ = ordered
    verb = "calls" if len(by_value[odd]) == 1 else "call"
    usual_verb = "calls" if len(by_value[usual]) == 1 else "call"
    what = f"{call.call.name}{joint}" if joint else ""
    places = {rank: its[0].place for rank, its in call.calls.items() if its and its[0].place}
    where = [
        f" ({places[by_value[value][0]]})" if by_value[value][0] in places else "" for value in (odd, usual)
    ]
    return (
        f"{_ranks(by_value[odd])} {verb} {what}{odd}{where[0]} where {_ranks(by_value[usual])} {usual_verb} "
        f"{what}{usual}{where[1]}, as collective {call.number} of {_group_name(call.group)}"
    )


def _stalled(stuck: Sequence[_StuckCall]) -> str:
    call = stuck[0]
    waited = f"{'has' if len(call.waiting) == 1 else 'have'} waited for {call.wait_s:.0f} s"
    if call.unknown:
        unknown = f"the calls of {_ranks(call.unknown)} are unknown"
        return f"{_ranks(call.waiting)} {waited} in {call.name}{call.place}; {unknown}"
    why = "the network or a GPU stalls"
    if len(stuck) > 1:
        why += f", or ranks start this collective and {stuck[1].name} in different orders"
    return f"all ranks have called {call.name}{call.place}, but {_ranks(call.waiting)} {waited} in it: {why}"


def _open_messages(
    files: Mapping[int, CollectiveCallsFile],
) -> list[tuple[int, GroupCalls, CollectiveCall]]:
    """Return the oldest open send or receive of each rank in each group, the longest wait first.

    Waits of less than `LEAST_WAIT_S` are left out.
    """
    messages = [
        (rank, group, group.open_messages[0])
        for rank, file in files.items()
        for group in file.groups
        if group.open_messages and group.open_messages[0].age_s >= LEAST_WAIT_S
    ]
    return sorted(messages, key=lambda message: -message[2].age_s)


def _in_messages(messages: Sequence[tuple[int, GroupCalls, CollectiveCall]]) -> str | None:
    waits = []
    for rank, group, call in messages[:MOST_MESSAGES]:
        place = f" ({call.place})" if call.place else ""
        waits.append(
            f"rank {rank} has waited for {call.age_s:.0f} s in {call.name} of {_group_name(group)}{place}"
        )
    return ", ".join(waits) or None


def _group_name(group: GroupCalls) -> str:
    name = group.name if group.description in NO_DESCRIPTION else group.description
    is_world = group.description == "default_pg"
    return f"group {name}" if is_world else f"group {name} of {_ranks(group.ranks)}"


def _ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0 and 2`, `ranks 0 to 2`, or the first ranks and how many more there are."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    ordered = sorted(ranks)
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"ranks {ordered[0]} to {ordered[-1]}"
    shown = [str(rank) for rank in ordered[:MOST_RANKS]]
    more = len(ordered) - MOST_RANKS
    shown += [f"{more} more"] * (more > 0)
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
