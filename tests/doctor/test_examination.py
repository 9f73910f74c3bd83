import importlib.util
import sys

import pytest

from perfsuite.cli.app import command_of
from perfsuite.doctor.examination import examine
from perfsuite.doctor.rows import passed
from perfsuite.launch.quiet import Cores, Neighbours
from perfsuite.node.machine import detect
from perfsuite.worker.probes.doctor_facts import DoctorFile
from tests.doctor.test_torch_checks import CLOCK
from tests.packages import Packages
from tests.samples import make_machine

NOTHING = Cores(processes_s=0, steal_s=0, total_s=0, by_process={})
NOBODY = Neighbours(say=print, show=print, see_cores=lambda: NOTHING, sleep=lambda seconds: None)


@pytest.mark.launch
def test_the_quick_part_passes_on_this_machine() -> None:
    rows = examine(detect(), quick=True, load_command=command_of, neighbours=NOBODY)
    assert {"machine", "cores", "torch"} <= {row.check for row in rows}
    assert [row.status for row in rows if row.check == "torch"] == ["pass"]


def test_dying_probe_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    row = examine(make_machine(), quick=True, load_command=command_of, neighbours=NOBODY)[-1]
    assert (row.check, row.status) == ("torch", "fail")
    assert "it ended with status 1" in row.found


@pytest.mark.parametrize(
    ("package", "quick", "status"),
    [("torch", True, "fail"), ("torch", False, "fail"), ("transformers", False, "unknown")],
)
def test_missing_package_is_a_row(
    monkeypatch: pytest.MonkeyPatch, package: str, quick: bool, status: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    row = examine(make_machine(), quick=quick, load_command=command_of, neighbours=NOBODY)[-1]
    assert (row.check, row.status) == ("torch", status)
    assert package in row.found
    assert "pip install" in row.found


@pytest.mark.parametrize("broken", [False, True])
def test_broken_extension_stops_launches(packages: Packages, broken: bool) -> None:
    """With a broken extension, the doctor makes no launches.

    The first launch would raise the extension's error, and all other rows would be lost.
    """
    if broken:
        packages.install("perf-mine", "1 / 0", metrics="m = perf_mine:M")
    probed = DoctorFile(memory={"peak": 1, "method": "x"}, expected_peak=1, clock=CLOCK)
    rows = examine(
        make_machine(),
        quick=False,
        load_command=command_of,
        neighbours=NOBODY,
        probe=lambda machine, quick: probed,
        launch=lambda machine, say: [passed("launches", "")],
    )
    status = {row.check: row.status for row in rows}
    assert ("launches" in status) is not broken
    assert status["extensions"] == ("fail" if broken else "pass")
    assert {status[check] for check in ("peak memory", "clock", "cost of measuring")} == {"pass"}
