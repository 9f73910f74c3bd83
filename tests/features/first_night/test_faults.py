"""Tests of the faults that a first night injects, with fake launches."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perfsuite.doctor.injected import SIMULATED_HANG_S
from perfsuite.doctor.rows import Row
from perfsuite.errors import MachineError
from perfsuite.features.first_night.faults import fault_rows, memory_rows, stacks_row
from perfsuite.features.first_night.night import Night
from perfsuite.launch.quiet import gpu_users
from perfsuite.node.machine import detect_here
from perfsuite.results.rank_report import Failure
from perfsuite.results.run_dir import RunDir
from tests.features.first_night.nights import Launches, by_check, make_night
from tests.node.fake_nvml import Nvml, NVMLError
from tests.processes import ended
from tests.samples import make_gpu_machine, make_run

EXPECTED = {
    "hang": "timeout",
    "crash": "crash",
    "exit": "crash",
    "oom": "out_of_memory",
    "missing-rank": "missing_report",
}
pytestmark = pytest.mark.usefixtures("torch_for_gpus")
LACKS = "rank 1 has not called all_reduce 4 of group default_pg, in which rank 0 has waited for 120 s"


def failing(**kinds: str) -> Launches:
    """Return fake launches. Each fails as expected from its fault, or with the kind of failure in `kinds`.

    Each failure names the last of two ranks.
    """
    chosen = {**EXPECTED, **{name.replace("_", "-"): kind for name, kind in kinds.items()}}
    failures = {name: {"failure": Failure(kind=kind, message=LACKS)} for name, kind in chosen.items()}
    return Launches(**failures)


def two_gpus(**changes: Any) -> Night:
    """Return a night on two GPUs, whose memory nobody else uses."""
    machine = make_gpu_machine(count=2)
    usual: dict[str, Any] = {"machine": machine, "size": "full", "detect": lambda: machine}
    return make_night(**{**usual, "see_gpus": lambda devices: [], **changes})


def on_gpus(launch: Any) -> dict[str, Row]:
    """Return the rows of a machine with two GPUs."""
    return by_check(fault_rows(two_gpus(launch=launch)))


def test_simulated_training_stops_no_rank() -> None:
    rows = by_check(fault_rows(make_night(launch=failing())))
    assert [*rows] == [*(f"inject {name}" for name in EXPECTED), "stop one rank"]
    assert rows["stop one rank"].found == "not run: simulated training ends too soon"


def test_every_fault_must_be_reported_as_itself() -> None:
    launch = failing(oom="crash")
    rows = on_gpus(launch)
    assert [how.inject for *_, how in launch.asked] == [*EXPECTED, None]
    failed = {check for check, row in rows.items() if row.status == "fail"}
    assert failed == {"inject oom", "stacks of the hang"}
    assert rows["inject oom"].advice == "expected out_of_memory of rank 1"
    assert rows["memory after oom"].status == "pass"
    assert rows["stop one rank"].found == "not run: no rank could be stopped: the launch ended first"


def test_a_launch_killed_before_its_fault_is_unknown() -> None:
    launch = failing(exit="timeout")
    launch.not_reached = ("hang", "exit", "oom")
    launch.of_run["oom"] = {}
    rows = by_check(fault_rows(make_night(launch=launch)))
    unknown = {check: row.found for check, row in rows.items() if row.status == "unknown"}
    assert unknown.pop("stop one rank")
    assert unknown == {
        "inject hang": f"the fault was not reached: timeout: {LACKS}",
        "inject exit": f"the fault was not reached: timeout: {LACKS}",
        "inject oom": "the fault was not reached: no failure was noticed",
    }
    assert rows["inject hang"].advice == "repeat it when the machine is less busy"


def test_a_fault_without_a_failure_fails() -> None:
    launch = failing()
    launch.of_run["exit"] = {}
    row = by_check(fault_rows(make_night(launch=launch)))["inject exit"]
    assert (row.status, row.found, row.advice) == (
        "fail",
        "no failure was noticed",
        "expected crash of rank 1",
    )


@pytest.mark.parametrize("message", ["killed after 120 s", "rank 11 has not called all_reduce 4", ""])
def test_a_report_must_name_the_rank(message: str) -> None:
    launch = failing()
    launch.of_run["hang"] = {"failure": Failure(kind="timeout", message=message)}
    rows = on_gpus(launch)
    assert (rows["inject hang"].status, rows["inject hang"].advice) == ("fail", "expected timeout of rank 1")
    launch.of_run["hang"] = {"failure": Failure(kind="timeout", message=message, rank=1)}
    assert on_gpus(launch)["inject hang"].status == "pass"
    of_all_sizes = {"failure": Failure(kind="timeout", message="killed after 30 s")}
    launch.of_run["hang"] = of_all_sizes
    simulated = by_check(fault_rows(make_night(launch=launch, out=Path("other"))))
    assert simulated["inject hang"].status == "pass", "simulated ranks do not wait for each other"


def test_the_report_of_a_hang_must_name_the_collective() -> None:
    row = on_gpus(failing())["collective of the hang"]
    assert (row.status, row.found) == ("pass", "has not called all_reduce 4 of group default_pg")
    launch = failing()
    launch.of_run["hang"] = {"failure": Failure(kind="timeout", message="rank 1 hangs")}
    assert on_gpus(launch)["collective of the hang"].status == "fail"


def test_only_a_simulated_hang_has_a_short_limit() -> None:
    launch = failing()
    list(fault_rows(make_night(launch=launch)))
    limits = {how.inject: case.timeout_s for case, _, _, how in launch.asked}
    assert limits.pop("hang") == SIMULATED_HANG_S
    assert set(limits.values()) == {120}


def test_memory_left_behind_fails() -> None:
    held = "3.1 GiB of GPU 1 held by python (pid 7)"
    (row,) = memory_rows("memory after crash", two_gpus(see_gpus=lambda devices: [held]), free_s=0.1)
    assert (row.check, row.status, row.found) == ("memory after crash", "fail", held)


def test_memory_can_be_freed_a_moment_later() -> None:
    users = [[], ["2 GiB of GPU 0 held by python (pid 7)"]]
    (row,) = memory_rows("memory after crash", two_gpus(see_gpus=lambda devices: users.pop()))
    assert (row.status, row.found) == ("pass", "free within 5 s")


def test_nvml_that_does_not_answer_is_unknown() -> None:
    def lost(devices: int) -> list[str]:
        raise MachineError("NVML did not answer within 30 s")

    row = by_check(fault_rows(two_gpus(launch=failing(), see_gpus=lost)))["memory after exit"]
    assert (row.status, row.found) == ("unknown", "NVML did not answer within 30 s")


LOST = NVMLError("GPU is lost")
IDLE: dict[str, Any] = {"nvmlDeviceGetComputeRunningProcesses": ([],)}


@pytest.mark.parametrize("function", ["ComputeRunningProcesses", "MemoryInfo", "Name"])
def test_memory_of_a_lost_gpu_is_never_free(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    lost = {**IDLE, f"nvmlDeviceGet{function}": LOST}
    row = memory_after_crash(monkeypatch, Nvml(IDLE, IDLE, IDLE, lost))
    assert row.status == "unknown"
    assert row.found.startswith("GPU 3 (00000000:1E:00.0) cannot be read: GPU is lost. Look at `nvidia-smi`")


def test_memory_of_a_gpu_that_has_vanished_is_never_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_after_crash(monkeypatch, Nvml(*[IDLE] * 4)).status == "pass"
    row = memory_after_crash(monkeypatch, Nvml(*[IDLE] * 3))
    assert row.status == "fail"
    assert row.found.endswith("it had 4 x h100-80gb-sxm, and now has 3 x h100-80gb-sxm")


def memory_after_crash(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> Row:
    """Return the row about memory. The machine had four GPUs, and now has the GPUs of `nvml`."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = make_gpu_machine(count=4)
    night = make_night(machine=machine, detect=detect_here, see_gpus=partial(gpu_users, nvml))
    (row,) = memory_rows("memory after crash", night)
    return row


def test_counts_the_stacks_of_a_hang(tmp_path: Path) -> None:
    launch = RunDir(tmp_path)
    for rank in range(2):
        launch.stacks(rank, 10 + rank).write_text("Thread 0x1" if rank == 0 else "")
    assert stacks_row(launch, 2).found == "1 of 2 ranks wrote their stack"
    assert stacks_row(launch, 2).status == "fail"
    launch.stacks(1, 11).write_text("Thread 0x2")
    assert stacks_row(launch, 2).status == "pass"


def test_stops_the_last_rank_while_it_trains() -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    with ended(subprocess.Popen(words)) as rank:

        def launch(case: Any, machine: Any, directory: Path, how: Any) -> Any:
            if directory.name != "stopped":
                return failing()(case, machine, directory, how)
            directory.mkdir(parents=True)
            RunDir(directory).stacks(0, os.getpid()).touch()
            RunDir(directory).stacks(1, rank.pid).touch()
            how.on_progress(4, 9)  # too early to stop a rank
            assert os.waitpid(rank.pid, os.WUNTRACED | os.WNOHANG) == (0, 0)
            how.on_progress(5, 9)
            _, status = os.waitpid(rank.pid, os.WUNTRACED)
            assert os.WSTOPSIG(status) == signal.SIGSTOP
            return make_run(failure=Failure(kind="timeout", message="rank 1 is missing"))

        rows = on_gpus(launch)
        rank.kill()
    row = rows["stop one rank"]
    assert (row.status, row.found) == ("pass", "timeout: rank 1 is missing")
    assert rows["memory after the stop"].status == "pass"
