import sys

import pytest

from perfsuite.case.hardware import Machine
from perfsuite.cli.doctor import expected_machine, report
from perfsuite.doctor.rows import Row, Status
from perfsuite.errors import CaseError
from tests.cli.commands import error_of, rows, run
from tests.samples import make_gpu_machine, make_machine


@pytest.mark.parametrize(
    ("statuses", "code"), [(("pass",), 0), (("pass", "unknown"), 3), (("unknown", "fail", "pass"), 1)]
)
def test_exit_status_is_the_worst_checks(
    statuses: tuple[Status, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A busy machine makes the answer unknown, but must not hide a fault."""
    made = [Row(check="clock", status=status, found="x", advice="do y") for status in statuses]
    assert report(made, as_json=False) == code
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [f"{statuses[0]:<9}clock  x", f"{'':<16}-> do y"]
    count = statuses.count
    assert said[-1] == f"{count('pass')} passed, {count('fail')} failed, {count('unknown')} unknown"
    assert report(made, as_json=True) == code
    assert rows(capsys.readouterr().out) == [
        {"check": "clock", "status": status, "found": "x", "advice": "do y"} for status in statuses
    ]


def test_a_process_with_torch_that_fails_is_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    made = rows(run("doctor", "--quick", "--expect", "cpu", "--json", status=1).stdout)
    status = {row["check"]: row["status"] for row in made}
    assert (status["machine"], status["torch"]) == ("pass", "fail")


NVML = "NVML found no GPU: NVML/RM version mismatch."


@pytest.mark.parametrize("marker", ["h100", "h100-80gb", "gpu", None])
def test_expected_machine_is_that_of_the_marker(marker: str | None) -> None:
    assert expected_machine(marker, detect=make_gpu_machine) == make_gpu_machine()


def test_gpus_are_not_examined_for_cpu_cases() -> None:
    """torch need not reach the GPUs."""
    machine = expected_machine("cpu", detect=make_gpu_machine)
    assert machine.hardware_class.startswith("cpu-")


@pytest.mark.parametrize(
    ("marker", "here", "said"),
    [
        ("h100", make_gpu_machine("NVIDIA H200"),
         "--expect h100: this machine is h200-141gb-sxm"),
        ("h100", make_machine(note=NVML),
         f"--expect h100: this machine is cpu-test-2c; {NVML}"),
    ],
)  # fmt: skip
def test_unexpected_machine_is_an_error(marker: str, here: Machine, said: str) -> None:
    with pytest.raises(CaseError) as raised:
        expected_machine(marker, detect=lambda: here)
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("h100", "--expect h100: this machine is cpu-"),
        ("x100", "--expect x100: did you mean 'v100'? begin with one of cpu, "),
    ],
)
def test_doctor_refuses_an_unexpected_machine(marker: str, said: str) -> None:
    assert error_of("doctor", "--expect", marker).startswith(f"perfsuite doctor: {said}")
