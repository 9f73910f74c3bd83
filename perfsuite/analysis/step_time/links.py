"""Predict how long a collective takes, from the latency of its hops and the bandwidth of its link. Pure."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from perfsuite.errors import PredictionError
from perfsuite.results.device_log import Communicate

# These latencies of NCCL are estimates that were fixed before any published step was predicted.
BEGIN_INSIDE_S = 18e-6  # time to begin a collective within one machine
HOP_INSIDE_S = 1.5e-6
BEGIN_BETWEEN_S = 25e-6  # time to begin a collective between machines
HOP_BETWEEN_S = 4e-6
MOST_HOPS = 64  # if a ring would have more hops, NCCL uses trees
PORT_SHARE = 0.8  # share of a network port's rate that NCCL reaches
PEER_SHARE = 0.5  # share of the bus bandwidth that one device reaches if it sends only to one other device


class Links(NamedTuple):
    """The links of one device. Bandwidths are for one direction, in bytes/s."""

    inside: float  # NCCL's bus bandwidth within one machine
    between: float | None  # NCCL's bandwidth between machines for each device; None: unknown
    devices: int  # number of devices in one machine

    @classmethod
    def of(cls, collective_gb_s: float, interconnect: str | None, devices: int) -> Links:
        """Return the links of a machine. `interconnect` has ports and Gbit/s, such as `8xib400`."""
        network = None if interconnect is None else network_bytes_per_s(interconnect)
        between = None if network is None else PORT_SHARE * network / devices
        return cls(1e9 * collective_gb_s, between, devices)


def network_bytes_per_s(interconnect: str) -> float | None:
    """Return the rate of all ports of a machine in one direction; None if `interconnect` does not say."""
    match = re.fullmatch(r"(?:([1-9]\d*)x)?[a-z]+([1-9]\d*)", interconnect)
    return None if match is None else int(match[1] or 1) * int(match[2]) * 1e9 / 8


def is_inside(ranks: int, apart: int, devices: int) -> bool:
    """Return whether a group stays within one machine.

    It does so if the number of the machine's devices is a multiple of the group's width, `ranks * apart`.
    """
    return ranks == 1 or devices % (ranks * apart) == 0


def ranks_on_one_machine(apart: int, devices: int) -> int:
    """Return how many ranks of a group share a machine. Neighbours in the group are `apart` ranks apart."""
    return max(1, devices // max(1, apart))


def collective_s(call: Communicate, links: Links) -> float:
    """Return the seconds of a collective. Raises `PredictionError` if it needs a link that is unknown.

    The result is the latency plus the time that each rank needs to send and receive its bytes at the bus
    bandwidth (doc/PERFORMANCE.md of nccl-tests). Between machines, all participating devices of a machine
    share the machine's network, and their rings enter and leave the machine once.
    """
    ranks = call.ranks
    if ranks <= 1:
        return 0.0
    inside = is_inside(ranks, call.apart, links.devices)
    begin_s = latency_s(call.kind, ranks, call.apart, links.devices)
    if inside:
        return begin_s + _sent(call) / _rate_inside(call, links)
    if links.between is None:
        raise PredictionError(
            f"{call.kind} among {ranks} ranks uses the network between machines, whose speed is unknown. For "
            "simulated machines, give this speed (--interconnect, or --perf-interconnect of pytest)"
        )
    here = ranks_on_one_machine(call.apart, links.devices)
    sent = _sent(call)
    rate = min(links.inside, links.between * here)
    if call.kind == "all_to_all":  # each device sends its own data over its own share of the network
        sent = call.bytes * (ranks - here) / ranks
        rate = links.between
    elif call.kind in ("send", "recv"):
        rate = links.between
    return begin_s + sent / rate


def latency_s(kind: str, ranks: int, apart: int, devices: int) -> float:
    """Return the seconds of a collective that sends nothing."""
    hops = _hops(kind, ranks)
    if is_inside(ranks, apart, devices):
        return BEGIN_INSIDE_S + HOP_INSIDE_S * hops
    return BEGIN_BETWEEN_S + HOP_BETWEEN_S * hops


def _rate_inside(call: Communicate, links: Links) -> float:
    return links.inside * (PEER_SHARE if call.kind in ("send", "recv") else 1)


def _sent(call: Communicate) -> float:
    """Return the bytes that one rank sends in a ring."""
    if call.kind in ("send", "recv", "broadcast"):
        return call.bytes
    if call.kind == "barrier":
        return 0
    return (2 if call.kind == "all_reduce" else 1) * call.bytes * (call.ranks - 1) / call.ranks


def _hops(kind: str, ranks: int) -> int:
    if kind in ("send", "recv"):
        return 0
    if kind == "all_reduce":
        return min(MOST_HOPS, 2 * min(ranks - 1, 2 * math.ceil(math.log2(ranks)) + 8))
    return min(MOST_HOPS, ranks - 1)
