from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from perfsuite.node import describe
from perfsuite.node.describe import Described, interconnect
from perfsuite.node.describe import interface as named


def write(directory: Path, **texts: str) -> None:
    directory.mkdir(parents=True)
    for name, text in texts.items():
        (directory / name).write_text(f"{text}\n")


def port(
    sys_class: Path, device: str, rate: str, *, state: str = "4: ACTIVE", layer: str = "InfiniBand"
) -> None:
    write(sys_class / "infiniband" / device / "ports" / "1", state=state, rate=rate, link_layer=layer)


def interface(sys_class: Path, name: str, speed: str, *, state: str = "up", is_real: bool = True) -> None:
    write(sys_class / "net" / name, operstate=state, speed=speed)
    if is_real:
        (sys_class / "net" / name / "device").mkdir()


def test_infiniband_is_told_by_its_fastest_port_that_is_up(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", "100 Gb/sec (4X EDR)")
    port(tmp_path, "mlx5_1", "400 Gb/sec (4X NDR)")
    port(tmp_path, "mlx5_2", "800 Gb/sec (8X NDR)", state="1: DOWN")
    interface(tmp_path, "eth0", "10000")
    assert interconnect(tmp_path) == "ib400"
    for rail in range(2, 8):
        port(tmp_path, f"mlx5_1{rail}", "400 Gb/sec (4X NDR)")
    assert interconnect(tmp_path) == "7xib400", "of eight rails one is down"


def test_roce_is_not_infiniband(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", "200 Gb/sec (4X HDR)", layer="Ethernet")
    assert interconnect(tmp_path) == "roce200"
    port(tmp_path, "mlx5_1", "200 Gb/sec (4X HDR)")
    assert interconnect(tmp_path) == "ib200"


def test_ethernet_is_told_by_the_fastest_card(tmp_path: Path) -> None:
    interface(tmp_path, "eth0", "1000")
    interface(tmp_path, "eth1", "100000")
    interface(tmp_path, "eth2", "400000", state="down")
    interface(tmp_path, "br0", "800000", is_real=False)
    assert interconnect(tmp_path) == "eth100"
    interface(tmp_path, "eth3", "100000")
    assert interconnect(tmp_path) == "2xeth100"


@pytest.mark.parametrize("speed", ["-1", "", "100"])
def test_what_nothing_tells_is_not_guessed(tmp_path: Path, speed: str) -> None:
    interface(tmp_path, "eth0", speed)
    assert interconnect(tmp_path) is None
    assert interconnect(tmp_path / "nowhere") is None


def test_the_interface_is_that_of_the_address_of_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"lo": ["127.0.0.1"], "eth0": ["02:42", "10.0.0.7"], "ib0": ["10.1.0.7"]}
    told = {name: [SimpleNamespace(address=one) for one in each] for name, each in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: told)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.1.0.7")
    assert named() == "ib0"
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.9.9.9")
    assert named() is None


def test_a_host_name_that_leads_nowhere_has_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> str:
        raise socket.gaierror("unknown name")

    monkeypatch.setattr(socket, "gethostbyname", nowhere)
    assert named() is None


def test_a_node_says_what_it_is_and_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    (tmp_path / "probe").write_text("word")
    describe.main(tmp_path / "probe")
    told = Described.model_validate_json(capsys.readouterr().out)
    assert (told.name, told.probe) == ("n7", "word")
    assert told.machine.devices >= 1
    describe.main(tmp_path / "not seen")
    assert Described.model_validate_json(capsys.readouterr().out).probe is None
