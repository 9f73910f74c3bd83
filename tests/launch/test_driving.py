from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfsuite.errors import FileError
from perfsuite.launch import driving
from perfsuite.launch.base import Job, no_progress
from perfsuite.results.run_dir import RunDir
from tests.processes import wait_until
from tests.samples import make_case, make_gpu_machine, make_machine


def job(directory: Path, **changes: Any) -> Job:
    driving.prepare(RunDir(directory))
    return Job(run_dir=RunDir(directory), case=make_case(**changes), machine=make_machine(), python="python3")


PATH = {"PATH": "/usr/bin:/bin"}


def test_every_node_runs_the_agent_on_the_same_directory(tmp_path: Path) -> None:
    words = ["python3", "-m", "perfsuite.node.agent", str(tmp_path)]
    assert driving.agent_command(job(tmp_path)) == words


def test_a_command_has_a_stdin_until_the_end_and_may_run_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    log, words = tmp_path / "log", ["sh", "-c", "pwd; read word; echo $word; cat; echo ended"]
    with driving.started(words, log, PATH, tmp_path / "there") as process:
        assert process.stdin is not None
        process.stdin.write(b"its stdin\n")
        process.stdin.flush()
        wait_until(lambda: log.read_text() == f"{tmp_path / 'there'}\nits stdin\n", "its words")
        assert process.poll() is None
    assert process.wait(20) == 0
    assert log.read_text().endswith("its stdin\nended\n")


def test_steps_and_reports_are_followed_until_the_command_ends(tmp_path: Path) -> None:
    ours = job(tmp_path)
    ours.run_dir.progress.write_text("3 256")
    told: list[tuple[int, int]] = []
    with driving.started(["cat"], tmp_path / "log", PATH) as process:

        def tell(step: int, tokens: int) -> None:
            told.append((step, tokens))
            assert process.stdin is not None
            process.stdin.close()

        assert driving.drive(ours, process, tell) is None
    assert set(told) == {(3, 256)}


def test_a_job_that_takes_too_long_is_told_to_end_before_it_is_left(tmp_path: Path) -> None:
    ours = job(tmp_path, timeout_s=0.01)
    wait = f"until grep -q end {ours.run_dir.lease}; do sleep 0.01; done; echo told"
    log = tmp_path / "log"
    with driving.started(["sh", "-c", wait], log, PATH) as process:
        failure = driving.drive(ours, process, no_progress)
    assert failure is not None
    assert failure.message == (
        "killed after 0.01 s (the case's timeout_s), when rank 0 had finished at least 0 of "
        f"{ours.case.total_steps} steps"
    )
    assert log.read_text() == "told\n"


def test_a_job_of_which_a_part_broke_is_left_to_its_launcher(tmp_path: Path) -> None:
    with driving.started(["cat"], tmp_path / "log", PATH) as process:
        assert driving.drive(job(tmp_path), process, no_progress, lambda: True) is None
        assert process.poll() is None
    assert process.wait(20) == 0


def test_one_that_does_not_listen_is_left_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driving, "END_S", 0)
    with driving.started(["sleep", "600"], tmp_path / "log", {}) as process:
        assert driving.drive(job(tmp_path, timeout_s=0.01), process, no_progress) is not None
        assert process.poll() is None, "its launcher kills it"
        process.kill()
        process.wait()


def test_files_that_nodes_wait_for_are_there_before_them(tmp_path: Path) -> None:
    driving.prepare(RunDir(tmp_path))
    assert RunDir(tmp_path).endpoint.read_text() == ""
    assert RunDir(tmp_path).lease.read_text() == "0000000000 go \n"


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match=str(tmp_path / "file")):
        driving.prepare(RunDir(tmp_path / "file"))


def test_the_variables_of_a_job_win_and_its_agents_leave_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    ours = replace(job(tmp_path), variables={"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "0"})
    environment = driving.environment(ours)
    assert environment["NCCL_ALGO"] == "Ring"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert environment["PERFSUITE_JOB_VARIABLES"] == "NCCL_ALGO CUDA_VISIBLE_DEVICES"
    assert "PERFSUITE_JOB_VARIABLES" not in driving.environment(job(tmp_path / "other"))


OF_GPUS = (
    *("CUDA_DEVICE_ORDER", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
    "TORCH_FR_DUMP_TEMP_FILE",
)
NUMBERED = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
ENDED_LAST = {**NUMBERED, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "960"}
FLIGHT_RECORDER = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_DUMP_TEMP_FILE": "{launch}/nccl-flight-recorder-rank-",
}


@pytest.mark.parametrize(
    ("device", "set_by_user", "expected"),
    [
        ("cpu", {}, {}),
        ("cuda", {}, {**ENDED_LAST, **FLIGHT_RECORDER}),
        ("cuda", dict.fromkeys(OF_GPUS, "7"), {**dict.fromkeys(OF_GPUS[1:], "7"), **NUMBERED}),
    ],
    ids=["cpu", "cuda", "all set by the user"],
)
def test_gpus_are_numbered_as_nvml_does_and_nccl_ends_a_job_last_and_leaves_its_flight_recorder(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    set_by_user: dict[str, str],
    expected: dict[str, str],
) -> None:
    for name in OF_GPUS:
        monkeypatch.delenv(name, raising=False)
    for name, value in set_by_user.items():
        monkeypatch.setenv(name, value)
    machine = make_gpu_machine() if device == "cuda" else make_machine()
    environment = driving.environment(replace(job(tmp_path, timeout_s=900), machine=machine))
    told = {name: environment[name] for name in OF_GPUS if name in environment}
    assert told == {name: value.format(launch=tmp_path) for name, value in expected.items()}
