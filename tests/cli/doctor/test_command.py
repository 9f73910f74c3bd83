from __future__ import annotations

import importlib.util
import re
import sys
from typing import Any

import pytest

from perfsuite.cli.checks import Row, Status, passed
from perfsuite.cli.doctor import command, machine, torch
from perfsuite.cli.doctor.command import LAUNCHES, examine, noise_row, well_row
from perfsuite.node.machine import detect
from perfsuite.results.outcome import Verdict
from perfsuite.worker.doctor_facts import DoctorFile
from tests.cli.commands import rows, run
from tests.packages import Packages
from tests.samples import make_gpu_machine, make_launches, make_machine, make_run


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "neighbours_row", lambda found: passed("neighbours", ""))


@pytest.mark.parametrize(
    ("statuses", "code"), [(("pass",), 0), (("pass", "unknown"), 3), (("unknown", "fail", "pass"), 1)]
)
def test_the_exit_status_is_that_of_the_worst_check(
    statuses: tuple[Status, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine, of which nobody can tell whether it is good, hides no fault."""
    made = [Row(check="clock", status=status, found="x", advice="do y") for status in statuses]
    monkeypatch.setattr(command, "examine", lambda machine, quick, say: made)
    said = run("doctor", status=code).stdout.splitlines()
    assert said[:2] == [f"{statuses[0]:<9}clock  x", f"{'':<16}-> do y"]
    count = statuses.count
    assert said[-1] == f"{count('pass')} passed, {count('fail')} failed, {count('unknown')} unknown"
    assert rows(run("doctor", "--json", status=code).stdout) == [
        {"check": "clock", "status": status, "found": "x", "advice": "do y"} for status in statuses
    ]


@pytest.mark.parametrize(
    ("marker", "found"),
    [("h100", "h100-80gb-sxm"), ("h100-80gb", "h100-80gb-sxm"), ("gpu", "h100-80gb-sxm"), ("cpu", "cpu-")],
)
def test_hardware_is_what_is_expected(monkeypatch: pytest.MonkeyPatch, marker: str, found: str) -> None:
    """For cases on a CPU the GPUs are not looked at: a torch for CPUs cannot use them, and need not."""
    monkeypatch.setattr(command, "detect", make_gpu_machine)
    monkeypatch.setattr(
        command, "examine", lambda machine, quick, say: [passed("machine", machine.hardware_class)]
    )
    assert f"machine  {found}" in run("doctor", "--quick", "--expect", marker).stdout


@pytest.mark.parametrize(
    ("marker", "here", "said"),
    [
        ("h100", make_gpu_machine("NVIDIA H200"),
         "no h100 here: it is meant for h100, this machine is h200-141gb-sxm\n"),
        ("h100", make_machine(note="NVML found no GPU: NVML/RM version mismatch."),
         "no h100 here: it is meant for h100, this machine is cpu-test-2c; "
         "NVML found no GPU: NVML/RM version mismatch.\n"),
        ("x100", make_machine(), "--expect x100: did you mean 'v100'? begin with one of cpu, "),
    ],
    ids=["another GPU", "a driver that fails", "hardware that nothing has"],
)  # fmt: skip
def test_hardware_that_is_not_what_is_expected_is_an_error(
    monkeypatch: pytest.MonkeyPatch, marker: str, here: Any, said: str
) -> None:
    monkeypatch.setattr(command, "detect", lambda: here)
    result = run("doctor", "--expect", marker, status=2)
    assert result.stdout == ""
    assert result.stderr.startswith(f"perfsuite doctor: {said}")


def test_a_probe_that_dies_is_one_row_that_says_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    row = examine(make_machine(), quick=True)[-1]
    assert (row.check, row.status) == ("torch", "fail")
    assert "it ended with status 1" in row.found


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
    row = examine(make_machine(), quick=quick)[-1]
    assert (row.check, row.status) == ("torch", "fail" if package == "torch" else "unknown")
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
    monkeypatch.setattr(torch, "probe", lambda found, quick: DoctorFile())
    monkeypatch.setattr(command, "launch_rows", lambda found, say: [launched])
    rows = examine(make_machine(), quick=False)
    assert (launched in rows) is not broken
    [extensions] = [row for row in rows if row.check == "extensions"]
    assert extensions.status == ("fail" if broken else "pass")


def test_launches_that_were_set_aside_fail() -> None:
    runs, verdict = make_launches(*[1.0] * LAUNCHES), Verdict(outcome="recorded", launches=LAUNCHES)
    assert well_row(runs, verdict).status == "pass"
    aside = well_row(runs, verdict.replace(unhealthy_launches=(1,), reasons=("launch 1 set aside: hot",)))
    assert (aside.status, aside.found) == ("fail", "launch 1 set aside: hot")


@pytest.mark.parametrize(
    ("speeds", "status"),
    [((1.0, 1.01, 0.99, 1.005, 0.995), "pass"), ((1.0, 1.6, 0.7, 1.3, 0.8), "fail"), ((1.0, 1.0), "unknown")],
)
def test_noise_says_which_tolerance_the_machine_can_hold(speeds: tuple[float, ...], status: str) -> None:
    """A failed launch is no evidence of it."""
    runs = [*make_launches(*speeds), make_run(failure={"kind": "crash", "message": "x"})]
    row = noise_row(runs, Verdict(outcome="recorded", launches=len(runs)), make_machine())
    assert row.status == status
    if status == "fail":
        figure = r"(?:and by|drops below) ([\d.]+%)"
        assert re.findall(figure, row.found) == re.findall(figure, str(row.advice)) != []
    if status == "unknown":
        assert row.found == "2 healthy launches cannot tell it"
