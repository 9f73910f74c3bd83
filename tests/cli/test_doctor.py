from typing import Any

import pytest

from perfsuite.cli import doctor
from perfsuite.doctor import machine
from perfsuite.doctor.rows import Row, Status, passed
from tests.cli.commands import rows, run
from tests.samples import make_gpu_machine, make_machine


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "neighbours_row", lambda _nvml: passed("neighbours", ""))


@pytest.mark.parametrize(
    ("statuses", "code"), [(("pass",), 0), (("pass", "unknown"), 3), (("unknown", "fail", "pass"), 1)]
)
def test_exit_status_is_the_worst_checks(
    statuses: tuple[Status, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine makes the answer unknown, but must not hide a fault."""
    made = [Row(check="clock", status=status, found="x", advice="do y") for status in statuses]
    monkeypatch.setattr(doctor, "examine", lambda machine, **_: made)
    said = run("doctor", status=code).stdout.splitlines()
    assert said[:2] == [f"{statuses[0]:<9}clock  x", f"{'':<16}-> do y"]
    count = statuses.count
    assert said[-1] == f"{count('pass')} passed, {count('fail')} failed, {count('unknown')} unknown"
    assert rows(run("doctor", "--json", status=code).stdout) == [
        {"check": "clock", "status": status, "found": "x", "advice": "do y"} for status in statuses
    ]


NVML = "NVML found no GPU: NVML/RM version mismatch."


@pytest.mark.parametrize(
    ("marker", "here", "shown", "said"),
    [
        *((marker, make_gpu_machine(), "h100-80gb-sxm", "") for marker in ("h100", "h100-80gb", "gpu")),
        ("cpu", make_gpu_machine(), "cpu-", ""),  # the GPUs are not examined, so torch need not reach them
        ("h100", make_gpu_machine("NVIDIA H200"), "",
         "no h100 here: it is meant for h100, but this machine is h200-141gb-sxm\n"),
        ("h100", make_machine(note=NVML), "",
         f"no h100 here: it is meant for h100, but this machine is cpu-test-2c; {NVML}\n"),
        ("x100", make_machine(), "", "--expect x100: did you mean 'v100'? begin with one of cpu, "),
    ],
)  # fmt: skip
def test_unexpected_machine_is_an_error(
    monkeypatch: pytest.MonkeyPatch, marker: str, here: Any, shown: str, said: str
) -> None:
    examined = passed("machine", "")
    monkeypatch.setattr(doctor, "detect", lambda: here)
    monkeypatch.setattr(
        doctor, "examine", lambda machine, **_: [examined.replace(found=machine.hardware_class)]
    )
    result = run("doctor", "--expect", marker, status=2 if said else 0)
    assert result.stdout.startswith(f"pass     machine  {shown}" if shown else "")
    assert bool(result.stdout) == bool(shown)
    assert result.stderr.startswith(f"perfsuite doctor: {said}" if said else "")
