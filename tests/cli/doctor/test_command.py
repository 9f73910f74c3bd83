import importlib.util
import sys
from typing import Any

import pytest

from perfsuite.cli.checks import Row, Status, passed
from perfsuite.cli.doctor import command, machine, torch
from perfsuite.cli.doctor.command import examine
from perfsuite.node.machine import detect
from perfsuite.worker.probes.doctor_facts import DoctorFile
from tests.cli.commands import rows, run
from tests.cli.doctor.test_torch import CLOCK
from tests.packages import Packages
from tests.samples import make_gpu_machine, make_machine


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "neighbours_row", lambda found: passed("neighbours", ""))


@pytest.mark.parametrize(
    ("statuses", "code"), [(("pass",), 0), (("pass", "unknown"), 3), (("unknown", "fail", "pass"), 1)]
)
def test_exit_status_is_the_worst_checks(
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


NVML = "NVML found no GPU: NVML/RM version mismatch."


@pytest.mark.parametrize(
    ("marker", "here", "found", "said"),
    [
        *((marker, make_gpu_machine(), "h100-80gb-sxm", "") for marker in ("h100", "h100-80gb", "gpu")),
        ("cpu", make_gpu_machine(), "cpu-", ""),  # the GPUs are not looked at: torch need not reach them
        ("h100", make_gpu_machine("NVIDIA H200"), "",
         "no h100 here: it is meant for h100, this machine is h200-141gb-sxm\n"),
        ("h100", make_machine(note=NVML), "",
         f"no h100 here: it is meant for h100, this machine is cpu-test-2c; {NVML}\n"),
        ("x100", make_machine(), "", "--expect x100: did you mean 'v100'? begin with one of cpu, "),
    ],
)  # fmt: skip
def test_unexpected_machine_is_an_error(
    monkeypatch: pytest.MonkeyPatch, marker: str, here: Any, found: str, said: str
) -> None:
    examined = passed("machine", "")
    monkeypatch.setattr(command, "detect", lambda: here)
    monkeypatch.setattr(
        command, "examine", lambda machine, **_: [examined.replace(found=machine.hardware_class)]
    )
    result = run("doctor", "--expect", marker, status=2 if said else 0)
    assert result.stdout.startswith(f"pass     machine  {found}" if found else "")
    assert bool(result.stdout) == bool(found)
    assert result.stderr.startswith(f"perfsuite doctor: {said}" if said else "")


@pytest.mark.launch
def test_the_quick_part_on_this_machine() -> None:
    rows = examine(detect(), quick=True)
    assert {"machine", "cores", "torch"} <= {row.check for row in rows}
    assert [row.status for row in rows if row.check == "torch"] == ["pass"]


def test_dying_probe_is_a_failed_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    row = examine(make_machine(), quick=True)[-1]
    assert (row.check, row.status) == ("torch", "fail")
    assert "it ended with status 1" in row.found
    find = importlib.util.find_spec
    for package, quick in (("torch", True), ("torch", False), ("transformers", False)):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, gone=package: None if name == gone else find(name)
        )
        row = examine(make_machine(), quick=quick)[-1]
        assert (row.check, row.status) == ("torch", "fail" if package == "torch" else "unknown")
        assert package in row.found
        assert "pip install" in row.found


@pytest.mark.parametrize("broken", [False, True])
def test_broken_extension_stops_launches(
    monkeypatch: pytest.MonkeyPatch, packages: Packages, broken: bool
) -> None:
    """Each launch would end in that error, and every other row would be lost."""
    if broken:
        packages.install("perf-mine", "1 / 0", metrics="m = perf_mine:M")
    probed = DoctorFile(memory={"peak": 1, "method": "x"}, expected_peak=1, clock=CLOCK)
    monkeypatch.setattr(torch, "probe", lambda found, quick: probed)
    monkeypatch.setattr(command, "launch_rows", lambda found, say: [passed("launches", "")])
    status = {row.check: row.status for row in examine(make_machine(), quick=False)}
    assert ("launches" in status) is not broken
    assert status["extensions"] == ("fail" if broken else "pass")
    assert {status[check] for check in ("peak memory", "clock", "cost of measuring")} == {"pass"}
