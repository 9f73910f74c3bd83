from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from typer.testing import CliRunner, Result

from perfsuite.cli.app import app
from perfsuite.cli.checks import Row, Status, passed
from perfsuite.cli.doctor import command, machine, noise, torch
from perfsuite.cli.doctor.command import examine
from perfsuite.node.machine import detect, gpu_machine
from perfsuite.worker.doctor_facts import DoctorFile, TorchFacts
from tests.cli.commands import run
from tests.packages import Packages
from tests.samples import make_machine


def answer(monkeypatch: pytest.MonkeyPatch, *rows: Row) -> None:
    monkeypatch.setattr(command, "examine", lambda machine, quick, say: list(rows))


@pytest.mark.parametrize(
    ("statuses", "code"), [(("pass",), 0), (("pass", "unknown"), 3), (("unknown", "fail", "pass"), 1)]
)
def test_the_exit_status_is_that_of_the_worst_check(
    statuses: tuple[Status, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine, of which nobody can tell whether it is good, hides no fault."""
    rows = [Row(check="clock", status=status, found="x", advice="do y") for status in statuses]
    answer(monkeypatch, *rows)
    shown = run("doctor", status=code)
    assert shown.stdout.splitlines()[:2] == [f"{statuses[0]:<9}clock  x", f"{'':<16}-> do y"]
    assert json.loads(run("doctor", "--json", status=code).stdout)["rows"] == [
        {"check": "clock", "status": status, "found": "x", "advice": "do y"} for status in statuses
    ]


def expecting(monkeypatch: pytest.MonkeyPatch, marker: str, name: str = "NVIDIA H100 80GB HBM3") -> Result:
    """On eight GPUs of that name."""
    gpus = gpu_machine([name], count=8, memory_bytes=80 * 2**30, driver="580.1")
    monkeypatch.setattr(command, "detect", lambda: gpus)
    monkeypatch.setattr(
        command,
        "examine",
        lambda found, quick, say: [Row(check="machine", status="pass", found=found.hardware_class)],
    )
    return CliRunner().invoke(app, ["doctor", "--quick", "--expect", marker])


@pytest.mark.parametrize("marker", ["h100", "h100-80gb", "gpu"])
def test_hardware_is_what_is_expected(monkeypatch: pytest.MonkeyPatch, marker: str) -> None:
    result = expecting(monkeypatch, marker)
    assert (result.exit_code, "h100-80gb-sxm" in result.stdout) == (0, True)


def test_for_cases_on_a_cpu_the_gpus_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a torch for CPUs cannot use them, and need not."""
    result = expecting(monkeypatch, "cpu")
    assert (result.exit_code, "machine  cpu-" in result.stdout) == (0, True)


def test_hardware_that_is_not_what_is_expected_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    result = expecting(monkeypatch, "h100", "NVIDIA H200")
    meant = "it is meant for h100, this machine is h200-141gb-sxm"
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"perfsuite doctor: no h100 here: {meant}\n"


def test_a_driver_that_fails_is_the_reason_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    mismatch = "NVML found no GPU: RM has detected an NVML/RM version mismatch."
    monkeypatch.setattr(command, "detect", lambda: make_machine(note=mismatch))
    result = run("doctor", "--expect", "h100", status=2)
    meant = "it is meant for h100, this machine is cpu-test-2c"
    assert result.stderr == f"perfsuite doctor: no h100 here: {meant}; {mismatch}\n"


def test_hardware_that_nothing_has_is_an_error() -> None:
    assert run("doctor", "--expect", "x100", status=2).stderr.startswith(
        "perfsuite doctor: --expect x100: did you mean 'v100'? begin with one of cpu, "
    )


def test_a_probe_that_dies_is_one_row_that_says_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(machine, "neighbours_row", lambda found: passed("x", ""))
    rows = examine(make_machine(), quick=True)
    assert (rows[-1].check, rows[-1].status) == ("torch", "fail")
    assert "it ended with status 1" in rows[-1].found


@pytest.mark.launch
def test_the_quick_part_on_this_machine() -> None:
    rows = examine(detect(), quick=True)
    assert {"machine", "cores", "torch"} <= {row.check for row in rows}
    assert [row.status for row in rows if row.check == "torch"] == ["pass"]


@pytest.mark.parametrize(("package", "quick"), [("torch", True), ("torch", False), ("transformers", False)])
def test_a_package_that_the_probe_needs_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch, package: str, quick: bool
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    monkeypatch.setattr(machine, "neighbours_row", lambda found: passed("x", ""))
    row = examine(make_machine(), quick=quick)[-1]
    assert (row.check, row.status) == ("torch", "fail")
    assert package in row.found
    assert "pip install" in row.found


@pytest.mark.parametrize("broken", [False, True])
def test_no_launch_is_tried_while_an_extension_is_broken(
    monkeypatch: pytest.MonkeyPatch, packages: Packages, broken: bool
) -> None:
    """Each launch would end in that error, and every other row would be lost."""
    if broken:
        packages.install("perf-mine", "1 / 0", metrics="m = perf_mine:M")
    launched = passed("launches", "")
    file = DoctorFile(torch=TorchFacts(version="2.13.0", cuda=None, nccl=None, devices=0))
    monkeypatch.setattr(machine, "neighbours_row", lambda found: passed("neighbours", ""))
    monkeypatch.setattr(torch, "probe", lambda found, quick: file)
    monkeypatch.setattr(noise, "launch_rows", lambda found, say: [launched])
    rows = examine(make_machine(), quick=False)
    assert (launched in rows) is not broken
    [extensions] = [row for row in rows if row.check == "extensions"]
    assert extensions.status == ("fail" if broken else "pass")
