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

    name: str  # Slurm's name for the node
    machine: Machine
    interconnect: str | None
    interface: str | None = None
    # Number of GPUs on this node that Slurm gave to the step. None if Slurm gave none, or does not manage
    # GPUs.
    granted_gpus: int | None = None
    cores: int | None = None  # number of cores that a step may use
    cores_of_machine: int | None = None  # number of all cores of this node
    probe: str | None  # the content of the probe file; None if this node cannot see the file


def interconnect(sys_class: Path = SYS) -> str | None:
    """Return the kind and the Gbit/s of this node's network: `8xib400`, `32xefa100`, `roce200` or `eth100`.

    None if it is unknown.

    Only the fastest ports that are up are counted. Their number is included if there are several. If no
    RDMA port is up, network interfaces are used. Virtual interfaces have no speed and are ignored.
    """
    up = [port for port in sys_class.glob("infiniband/*/ports/*") if "ACTIVE" in _text(port / "state")]
    ports = [(_number(_text(port / "rate")) or 0, _kind(port)) for port in up]
    if not any(rate for rate, _ in ports):
        devices = [device for device in sys_class.glob("net/*") if _text(device / "operstate") == "up"]
        physical = [device / "speed" for device in devices if (device / "device").exists()]
        ports = [((_number(_text(speed)) or 0) // 1000, "eth") for speed in physical]
    # If the speeds are equal, a port of InfiniBand is preferred to a port of RoCE.
    rate, kind = max(ports, key=lambda port: (port[0], port[1] != "roce"), default=(0, ""))
    if rate == 0:
        return None
    count = ports.count((rate, kind))
    return f"{count}x{kind}{rate}" if count > 1 else f"{kind}{rate}"


def _kind(port: Path) -> str:
    """Return the kind of an RDMA port: `ib`, `roce` or `efa`.

    A port of an EFA is recognised by its driver, because Linux does not know the link layer of the port.
    """
    driver = port.parents[1] / "device" / "driver"
    if driver.resolve().name == "efa":
        return "efa"
    return "roce" if _text(port / "link_layer") == "Ethernet" else "ib"


def interface() -> str | None:
    """Return the network interface with the address of this node's host name. None if there is none."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
    interfaces = psutil.net_if_addrs().items()
    return next(
        (name for name, addresses in interfaces if address in [one.address for one in addresses]), None
    )


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
        cores=len(os.sched_getaffinity(0)),
        cores_of_machine=os.cpu_count(),
        probe=_text(probe) or None,
    )
    print(described.model_dump_json(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
