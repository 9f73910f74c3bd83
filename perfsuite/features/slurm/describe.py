"""`python -m perfsuite.features.slurm.describe PROBE`: describe a node for `SlurmLauncher.machine`."""

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
GRANTED_GPUS = "SLURM_GPUS_ON_NODE"  # Slurm's variable for the GPUs that a step has on this node


class Described(Data):
    """The description of one node."""

    name: str  # Slurm's name of it
    machine: Machine
    interconnect: str | None
    interface: str | None = None
    # GPUs of this node that Slurm gave to the step; None if it gave none, or does not manage them.
    granted_gpus: int | None = None
    probe: str | None  # the content of the probe file; None if this node does not see the file


def interconnect(sys_class: Path = SYS) -> str | None:
    """Return how this node is connected: `8xib400`, `roce200` or `eth100`, in Gbit/s; None if unknown.

    Only ports that are up with the highest rate count: for InfiniBand and RoCE by `rate`, otherwise network
    interfaces by `speed`, which virtual ones lack. If there are several, their number is included.
    """
    up = [port for port in sys_class.glob("infiniband/*/ports/*") if "ACTIVE" in _text(port / "state")]
    ports = [(_number(_text(port / "rate")) or 0, _text(port / "link_layer")) for port in up]
    if not any(rate for rate, _ in ports):
        devices = [each for each in sys_class.glob("net/*") if _text(each / "operstate") == "up"]
        physical = [device / "speed" for device in devices if (device / "device").exists()]
        ports = [((_number(_text(speed)) or 0) // 1000, "none") for speed in physical]
    rate, layer = max(ports, default=(0, ""))
    if rate == 0:
        return None
    kind = {"Ethernet": "roce", "none": "eth"}.get(layer, "ib")
    count = ports.count((rate, layer))
    return f"{count}x{kind}{rate}" if count > 1 else f"{kind}{rate}"


def interface() -> str | None:
    """Return the network interface with the address of this node's host name; None if there is none."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, each in interfaces if address in [one.address for one in each]), None)


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # also raised for an interface that is down
        return ""


def _number(text: str) -> int | None:
    match = re.match(r"\d+", text)
    return None if match is None else int(match[0])


def main(probe: Path) -> None:
    """Print the description of this node."""
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
