import os
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from perfsuite.features.slurm import describe
from perfsuite.features.slurm.describe import Described, interconnect
from perfsuite.features.slurm.describe import interface as named


def port(rate: str, *, state: str = "4: ACTIVE", layer: str = "InfiniBand") -> tuple[str, dict[str, str]]:
    return "infiniband/mlx5_{}/ports/1", {"state": state, "rate": rate, "link_layer": layer}


def card(speed: str, *, state: str = "up", is_real: bool = True) -> tuple[str, dict[str, str]]:
    return "net/eth{}", {"operstate": state, "speed": speed} | ({"device": ""} if is_real else {})


HDR = "200 Gb/sec (4X HDR)"
NDR = "400 Gb/sec (4X NDR)"
MIXED = [port("100 Gb/sec (4X EDR)"), port(NDR), port("800 Gb/sec (8X NDR)", state="1: DOWN"), card("10000")]
EFA = port("100 Gb/sec (4X EDR)", layer="Unknown")
ETHERNET = [card("1000"), card("100000"), card("400000", state="down"), card("800000", is_real=False)]


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (MIXED, "ib400"),  # the fastest port that is up counts
        ([*MIXED, *[port(NDR)] * 6], "7xib400"),  # one of eight ports is down
        ([port(HDR, layer="Ethernet")], "roce200"),
        ([port(HDR, layer="Ethernet"), port(HDR)], "ib200"),
        ([EFA, EFA], "2xefa100"),
        (ETHERNET, "eth100"),
        ([*ETHERNET, card("100000")], "2xeth100"),
        *(([card(speed)], None) for speed in ("-1", "", "100")),
        ([], None),
    ],
)
def test_reports_only_a_known_interconnect(
    tmp_path: Path, devices: list[tuple[str, dict[str, str]]], expected: str | None
) -> None:
    for number, (name, texts) in enumerate(devices):
        directory = tmp_path / name.format(number)
        directory.mkdir(parents=True)
        for file, text in texts.items():
            (directory / file).write_text(f"{text}\n")
        if texts.get("link_layer") == "Unknown":
            (tmp_path / "bus" / "efa").mkdir(parents=True, exist_ok=True)
            device = directory.parents[1] / "device"
            device.mkdir()
            (device / "driver").symlink_to(tmp_path / "bus" / "efa")
    assert interconnect(tmp_path) == expected


@pytest.mark.parametrize(
    ("address", "interface"),
    [("10.1.0.7", "ib0"), ("10.9.9.9", None), (socket.gaierror("unknown name"), None)],
)
def test_interface_is_that_of_the_host_name(
    monkeypatch: pytest.MonkeyPatch, address: str | OSError, interface: str | None
) -> None:
    def gethostbyname(name: str) -> str:
        if isinstance(address, OSError):
            raise address
        return address

    addresses = {"lo": ["127.0.0.1"], "eth0": ["02:42", "10.0.0.7"], "ib0": ["10.1.0.7"]}
    interfaces = {name: [SimpleNamespace(address=one) for one in hosts] for name, hosts in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    monkeypatch.setattr(socket, "gethostbyname", gethostbyname)
    assert named() == interface


def test_a_node_says_what_it_is_and_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    (tmp_path / "probe").write_text("word")
    describe.main(tmp_path / "probe")
    described = Described.model_validate_json(capsys.readouterr().out)
    assert (described.name, described.probe) == ("n7", "word")
    assert described.machine.devices >= 1
    assert (described.cores, described.cores_of_machine) == (len(os.sched_getaffinity(0)), os.cpu_count())
    describe.main(tmp_path / "not seen")
    assert Described.model_validate_json(capsys.readouterr().out).probe is None
