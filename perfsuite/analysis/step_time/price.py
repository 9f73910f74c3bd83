"""Estimate what bytes of a collective cost, from two replays of a step: with and without them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from perfsuite.analysis.step_time.links import is_inside
from perfsuite.analysis.step_time.prediction import step_time
from perfsuite.analysis.step_time.streams import Durations, Machine, period_s
from perfsuite.results.device_log import Communicate, Entry

LINK_SPEEDS = (0.5, 1.0, 1.25)
"""The link's rates, relative to the assumed rate, for which the price is computed. They go from half of the
assumed rate to the rate of the port (1 / `PORT_SHARE`), and the price is given as a range."""
HIDDEN = 1e-3  # share of a step below which a price counts as nothing
SLOWEST = 1e7  # bytes/s of a link of one device; the search for the rate that hides the bytes begins here
FASTEST = 1e12
HALVINGS = 8  # the search halves the range this often, which finds the rate to within 5%


class Group(NamedTuple):
    """The collectives of one kind in groups of one shape."""

    kind: str
    ranks: int
    apart: int

    def has(self, entry: Entry) -> bool:
        """Return whether an entry is one of its calls."""
        return isinstance(entry, Communicate) and (entry.kind, entry.ranks, entry.apart) == self


class Price(NamedTuple):
    """What the bytes add to a step."""

    least_s: float | None  # None: the link is unknown
    most_s: float | None
    step_s: float | None  # predicted time of the step with the bytes
    hidden_above: float | None
    """Rate of the link of one device, in bytes/s, above which other work hides the bytes. None: never."""


def price(step: Sequence[Entry], group: Group, share: float, machine: Machine) -> Price:
    """Return the price of a part of a group's bytes. The other side sends `share` of the group's bytes.

    Raises `PredictionError` if the step uses another link that is unknown.
    """
    other = with_bytes(step, group, share)
    inside = is_inside(group.ranks, group.apart, machine.links.devices)
    hidden_above = _hidden_above(step, other, inside, machine)
    rate = machine.links.inside if inside else machine.links.between
    if rate is None:
        return Price(None, None, None, hidden_above)
    costs = []
    for times in LINK_SPEEDS:
        its = _with_rate(machine, inside, times * rate)
        costs.append(step_time(step, its).total_s - step_time(other, its).total_s)
    return Price(min(costs), max(costs), step_time(step, machine).total_s, hidden_above)


def with_bytes(step: Sequence[Entry], group: Group, share: float) -> list[Entry]:
    """Return the step in which the calls of a group send a share of their bytes, or are not made at all."""
    changed: list[Entry] = []
    for entry in step:
        if not (isinstance(entry, Communicate) and group.has(entry)):
            changed.append(entry)
        elif share:
            changed.append(entry._replace(bytes=round(share * entry.bytes)))
    return changed


def _hidden_above(
    step: Sequence[Entry], other: Sequence[Entry], inside: bool, machine: Machine
) -> float | None:
    low = SLOWEST
    high = FASTEST
    if not _is_hidden(step, other, _with_rate(machine, inside, high)):
        return None
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        if _is_hidden(step, other, _with_rate(machine, inside, middle)):
            high = middle
        else:
            low = middle
    return high


def _is_hidden(step: Sequence[Entry], other: Sequence[Entry], machine: Machine) -> bool:
    whole_s = period_s(step, Durations(step, machine), machine)
    without_s = period_s(other, Durations(other, machine), machine)
    return whole_s - without_s <= HIDDEN * whole_s


def _with_rate(machine: Machine, inside: bool, rate: float) -> Machine:
    links = machine.links
    changed = links._replace(inside=rate) if inside else links._replace(between=rate)
    return machine._replace(links=changed)
