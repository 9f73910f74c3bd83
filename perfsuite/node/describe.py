"""Says what this node is, for `SlurmLauncher.machine`: run on every node as
`python -m perfsuite.node.describe PROBE`. Imports neither torch nor pytest.

Prints one line of JSON: the machine, how nodes are connected, and what stands in the file PROBE.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import psutil

from perfsuite.case.hardware import Machine
from perfsuite.documents import Data
from perfsuite.node.machine import detect

SYS = Path("/sys/class")
GRANTED_GPUS = "SLURM_GPUS_ON_NODE"
"""Slurm's variable for the GPUs that a step has on this node."""


class Described(Data):
    """What one node says."""

    name: str
    """By Slurm."""
    machine: Machine
    interconnect: str | None
    interface: str | None = None
    granted_gpus: int | None = None
    """GPUs of this node that Slurm gave the step; None if it gave none, or does not manage them."""
    probe: str | None
    """The content of the probe file; None if this node does not see it."""


def interconnect(sys_class: Path = SYS) -> str | None:
    """Return how this node is connected: `8xib400`, `roce200` or `eth100`, in Gbit/s; None if nothing tells.

    The ports that are up count, of the fastest rate there is: of InfiniBand and RoCE by `rate`, else of
    network interfaces by `speed`, which virtual ones do not have. Several are told with their number.
    """
    ports = [port for port in sys_class.glob("infiniband/*/ports/*") if "ACTIVE" in _text(port / "state")]
    rates = [(_number(_text(port / "rate")), _text(port / "link_layer")) for port in ports]
    if known := [(rate, layer) for rate, layer in rates if rate is not None]:
        rate, layer = max(known)
        return _ports(known.count((rate, layer)), f"{'roce' if layer == 'Ethernet' else 'ib'}{rate}")
    up = [device for device in sys_class.glob("net/*") if _text(device / "operstate") == "up"]
    physical = [_number(_text(device / "speed")) for device in up if (device / "device").exists()]
    fastest = max((speed for speed in physical if speed is not None), default=0)
    return _ports(physical.count(fastest), f"eth{fastest // 1000}") if fastest >= 1000 else None


def _ports(count: int, kind: str) -> str:
    return f"{count}x{kind}" if count > 1 else kind


def interface() -> str | None:
    """Return the network interface that has the address of this node's host name; None if none has it."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
    known = psutil.net_if_addrs().items()
    return next((name for name, each in known if address in [one.address for one in each]), None)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # also of an interface that is down
        return ""


def _number(text: str) -> int | None:
    found = re.match(r"\d+", text)
    return None if found is None else int(found[0])


def main(probe: Path) -> None:
    """Print what this node is."""
    described = Described(
        name=os.environ["SLURMD_NODENAME"],
        machine=detect(),
        interconnect=interconnect(),
        interface=interface(),
        granted_gpus=_number(os.environ.get(GRANTED_GPUS, "")),
        probe=_text(probe) or None,
    )
    print(described.model_dump_json(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
