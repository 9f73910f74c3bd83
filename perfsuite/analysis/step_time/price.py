"""Estimate what a changed count costs, from two replays of a step: with and without the change. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import NamedTuple

from perfsuite.analysis.step_time.links import is_inside
from perfsuite.analysis.step_time.prediction import Replays
from perfsuite.analysis.step_time.streams import Durations, MachineSpeeds
from perfsuite.errors import PredictionError
from perfsuite.results.counts import Phase
from perfsuite.results.device_log import Communicate, Entry, HostWait, Kernel

LINK_SPEEDS = (0.5, 1.0, 1.25)
"""The price is computed for these rates of the link, relative to the assumed rate. They range from half of
the assumed rate to the rate of the port (1 / `PORT_SHARE`). The price is therefore a range."""
SPEEDS = ((0.5, 0.8), (1.0, 1.0), (2.0, 1.25))
"""The price of kernels and of waits is computed for each of these pairs: the time of the host, and the time
of kernels, both relative to the assumed times. The speeds of hosts differ more than those of GPUs of one
model."""
HIDDEN = 1e-3  # a price below this share of a step is regarded as 0
SLOWEST = 1e7  # bytes/s of a link of one device; the search for the rate that hides the bytes begins here
FASTEST = 1e12
HALVINGS = 8  # number of times that the search halves the range. It then knows the rate to within 5%


class Group(NamedTuple):
    """The collectives of one kind in groups of one shape."""

    kind: str
    ranks: int
    apart: int

    def has(self, entry: Entry) -> bool:
        """Return whether an entry of a log is a call of this group."""
        return isinstance(entry, Communicate) and (entry.kind, entry.ranks, entry.apart) == self


class Price(NamedTuple):
    """What a change adds to a step."""

    least_s: float | None  # None: the link is unknown
    most_s: float | None
    step_s: float | None  # predicted time of the whole step, including what the change adds
    hidden_above: float | None
    """Rate of the link of one device, in bytes/s, above which other work hides the bytes. None: never."""


def price(replays: Replays, group: Group, share: float, machine: MachineSpeeds) -> Price:
    """Return the price of a group's extra bytes.

    The other side of the comparison sends only the fraction `share` of the group's bytes. Raises
    `PredictionError` if the group stays within one machine, but the step also has collectives between
    machines, and the rate between machines is unknown.
    """
    step = replays.step
    other = Replays(with_bytes(step, group, share), same_calls=replays if share else None)
    inside = is_inside(group.ranks, group.apart, machine.links.devices)
    hidden_above = _hidden_above(replays, other, inside, machine)
    rate = machine.links.inside if inside else machine.links.between
    if rate is None:
        return Price(None, None, None, hidden_above)
    costs = []
    for times in LINK_SPEEDS:
        its = _with_rate(machine, inside, times * rate)
        costs.append(replays.total_s(its) - other.total_s(its))
    return Price(min(costs), max(costs), replays.total_s(machine), hidden_above)


def price_of_calls(replays: Replays, group: Group, fewer: int, machine: MachineSpeeds) -> Price:
    """Return the price of sending a group's bytes in the step's own calls instead of in `fewer` calls.

    The other side of the comparison makes `fewer` calls. Each of them replaces one or more calls of this
    step. It is unknown when the other side makes its calls. The range therefore covers two cases: each call
    is made in place of the first call that it replaces, or in place of the last. Raises `PredictionError` if
    `fewer` is 0, or is not less than the number of this step's calls.
    """
    step = replays.step
    calls = [index for index, entry in enumerate(step) if group.has(entry)]
    if not 0 < fewer < len(calls):
        raise PredictionError(
            f"the other side of the comparison makes {fewer} calls, but must make at least 1 and fewer than "
            f"the {len(calls)} calls in the dry run's log"
        )
    bounds = [len(calls) * number // fewer for number in range(fewer + 1)]
    merged = [calls[begin:end] for begin, end in pairwise(bounds)]
    others = [_with_merged(step, merged, place) for place in (0, -1)]
    return _difference(replays, others, machine)


def _difference(replays: Replays, others: Sequence[Sequence[Entry]], machine: MachineSpeeds) -> Price:
    """Return how much longer a step takes than the other steps.

    The returned range contains the difference to each of the other steps on each machine of `_machines`.
    """
    replays_of_others = [Replays(other) for other in others]
    costs = [
        replays.total_s(its) - other.total_s(its) for its in _machines(machine) for other in replays_of_others
    ]
    return Price(min(costs), max(costs), replays.total_s(machine), None)


def _with_merged(step: Sequence[Entry], merged: Sequence[Sequence[int]], place: int) -> list[Entry]:
    """Return a copy of the step in which several calls become one call, which sends the bytes of all of them.

    Each entry of `merged` has the indices of such calls, and the call at position `place` of the entry
    remains.
    """
    size_of: dict[int, int] = {}  # bytes of each remaining call, by index
    dropped: set[int] = set()
    for indices in merged:
        calls = [step[index] for index in indices]
        size_of[indices[place]] = sum(call.bytes for call in calls if isinstance(call, Communicate))
        dropped.update(indices)
    dropped -= size_of.keys()
    changed: list[Entry] = []
    for index, entry in enumerate(step):
        if isinstance(entry, Communicate) and index in size_of:
            changed.append(entry._replace(bytes=size_of[index]))
        elif index not in dropped:
            changed.append(entry)
    return changed


def price_of_waits(replays: Replays, number: int, machine: MachineSpeeds) -> Price:
    """Return the price of `number` waits of the host for the GPU.

    The other side of the comparison does not make these waits. It is unknown which of the step's waits they
    are, so the range covers the first, the last and evenly distributed waits.

    Raises `PredictionError` if the step has fewer than `number` waits.
    """
    step = replays.step
    waits = [index for index, entry in enumerate(step) if isinstance(entry, HostWait)]
    if number > len(waits):
        raise PredictionError("the host waited for the GPU more often than the log of the dry run shows")
    every = [waits[len(waits) * index // number] for index in range(number)]
    others = []
    for left_out in (waits[:number], waits[len(waits) - number :], every):
        dropped = set(left_out)
        others.append([entry for index, entry in enumerate(step) if index not in dropped])
    return _difference(replays, others, machine)


def price_of_kernels(
    before: Replays, now: Replays, phases: Collection[Phase], machine: MachineSpeeds, *, with_flops: bool
) -> Price:
    """Return the price of the changed kernels of some phases.

    This is the price of the kernels that only `now` has, minus the price of the kernels that only `before`
    has. With `with_flops`, kernels without FLOPs are left out.
    """
    fewer = Replays(_without_extra(now.step, before.step, phases, with_flops=with_flops)[0])
    fewer_before = Replays(_without_extra(before.step, now.step, phases, with_flops=with_flops)[0])
    costs = [
        now.total_s(its) - fewer.total_s(its) - before.total_s(its) + fewer_before.total_s(its)
        for its in _machines(machine)
    ]
    return Price(min(costs), max(costs), now.total_s(machine), None)


def kernels_alone_s(
    before: Sequence[Entry], now: Sequence[Entry], phases: Collection[Phase], machine: MachineSpeeds
) -> float:
    """Return how much longer the kernels of some phases take in `now` than in `before`, if they run alone.

    Nothing is replayed.
    """
    _, more = _without_extra(now, before, phases, with_flops=False)
    _, fewer = _without_extra(before, now, phases, with_flops=False)
    return Durations(more, machine).kernels_s - Durations(fewer, machine).kernels_s


def _without_extra(
    step: Sequence[Entry], other: Sequence[Entry], phases: Collection[Phase], *, with_flops: bool
) -> tuple[list[Entry], list[Entry]]:
    """Return two lists: the step without its extra kernels, and the extra kernels.

    A kernel of these phases is extra if the other step lacks it, or has it fewer times. Streams are ignored.
    """
    left = Counter(entry._replace(stream=0) for entry in other if isinstance(entry, Kernel))
    kept: list[Entry] = []
    extra: list[Entry] = []
    for entry in step:
        if isinstance(entry, Kernel) and entry.phase in phases and (entry.flops or not with_flops):
            kind = entry._replace(stream=0)
            if not left[kind]:
                extra.append(entry)
                continue
            left[kind] -= 1
        kept.append(entry)
    return kept, extra


def _machines(machine: MachineSpeeds) -> list[MachineSpeeds]:
    return [machine.with_host(host).with_device(kernels) for host, kernels in SPEEDS]


def with_bytes(step: Sequence[Entry], group: Group, share: float) -> list[Entry]:
    """Return a copy of the step in which a group's calls send only a share of their bytes.

    A share of 0 leaves the calls out.
    """
    changed: list[Entry] = []
    for entry in step:
        if not (isinstance(entry, Communicate) and group.has(entry)):
            changed.append(entry)
        elif share:
            changed.append(entry._replace(bytes=round(share * entry.bytes)))
    return changed


def _hidden_above(replays: Replays, other: Replays, inside: bool, machine: MachineSpeeds) -> float | None:
    low = SLOWEST
    high = FASTEST
    if not _is_hidden(replays, other, _with_rate(machine, inside, high)):
        return None
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        if _is_hidden(replays, other, _with_rate(machine, inside, middle)):
            high = middle
        else:
            low = middle
    return high


def _is_hidden(replays: Replays, other: Replays, machine: MachineSpeeds) -> bool:
    whole_s = replays.period_s(machine)
    return whole_s - other.period_s(machine) <= HIDDEN * whole_s


def _with_rate(machine: MachineSpeeds, inside: bool, rate: float) -> MachineSpeeds:
    links = machine.links
    changed = links._replace(inside=rate) if inside else links._replace(between=rate)
    return machine._replace(links=changed)
