import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from perfsuite.errors import FileError
from perfsuite.launch import driving
from perfsuite.launch.hang import HangDetector
from perfsuite.launch.job import Job, no_progress
from perfsuite.results.run_dir import RunDir
from tests.processes import wait_until
from tests.samples import known, make_case, make_gpu_machine, make_machine


def job(directory: Path, **changes: Any) -> Job:
    driving.prepare(RunDir(directory))
    return Job(run_dir=RunDir(directory), case=make_case(**changes), machine=make_machine(), python="python3")


PATH = {"PATH": "/usr/bin:/bin"}


def test_nodes_run_agents_on_one_directory(tmp_path: Path) -> None:
    assert driving.agent_command(job(tmp_path)) == ["python3", "-m", "perfsuite.node.agent", str(tmp_path)]


def test_command_keeps_its_stdin_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    log = tmp_path / "log"
    words = ["sh", "-c", "pwd; read word; echo $word; cat; echo ended"]
    with driving.started(words, log, PATH, tmp_path / "there") as process:
        assert process.stdin is not None
        process.stdin.write(b"its stdin\n")
        process.stdin.flush()
        wait_until(lambda: log.read_text() == f"{tmp_path / 'there'}\nits stdin\n", "its words")
        assert process.poll() is None
    assert process.wait(20) == 0
    assert log.read_text().endswith("its stdin\nended\n")


def test_follows_steps_and_reports(tmp_path: Path) -> None:
    ours = job(tmp_path)
    ours.run_dir.progress.write_text("3 256")
    progress: list[tuple[int, int]] = []
    with driving.started(["cat"], tmp_path / "log", PATH) as process:

        def tell(step: int, tokens: int) -> None:
            progress.append((step, tokens))
            assert process.stdin is not None
            process.stdin.close()

        assert driving.drive(ours, process, tell) is None
    assert set(progress) == {(3, 256)}


def test_asks_an_overdue_job_to_end_first(tmp_path: Path) -> None:
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


def test_job_overdue_in_an_event_says_so(tmp_path: Path) -> None:
    ours = job(tmp_path, timeout_s=0.01)
    ours.run_dir.running(3).write_text("save checkpoint")
    with driving.started(["sleep", "600"], tmp_path / "log", PATH) as process:
        failure = driving.drive(ours, process, no_progress, reports_s=0, end_s=0)
        process.kill()
        process.wait()
    assert known(failure).message.endswith(" steps; rank 3 was in save checkpoint")


def test_a_job_in_a_long_event_does_not_hang(tmp_path: Path) -> None:
    """Each look at this job would find a hang, unless the job is in an event."""
    impatient = HangDetector(hang_s=0, longest_steps=0, longest_warm_ups=0)
    ours = job(tmp_path)
    ours.run_dir.progress.write_text("3 256")
    ours.run_dir.running(0).write_text("save checkpoint")
    looks: list[int] = []

    def end_the_event(step: int, tokens: int) -> None:
        looks.append(step)
        if len(looks) == 5:
            ours.run_dir.running(0).unlink()

    with driving.started(["sleep", "600"], tmp_path / "log", PATH) as process:
        failure = driving.drive(ours, process, end_the_event, hang=impatient, reports_s=0, end_s=0)
        process.kill()
        process.wait()
    assert " s without a step " in known(failure).message
    assert len(looks) >= 5


def test_leaves_a_broken_job_to_its_launcher(tmp_path: Path) -> None:
    with driving.started(["cat"], tmp_path / "log", PATH) as process:
        assert driving.drive(job(tmp_path), process, no_progress, lambda: True) is None
        assert process.poll() is None
    assert process.wait(20) == 0


def test_leaves_an_unresponsive_job_after_a_while(tmp_path: Path) -> None:
    with driving.started(["sleep", "600"], tmp_path / "log", {}) as process:
        assert driving.drive(job(tmp_path, timeout_s=0.01), process, no_progress, end_s=0) is not None
        assert process.poll() is None, "the launcher kills it later"
        process.kill()
        process.wait()


def test_files_exist_before_nodes_wait_for_them(tmp_path: Path) -> None:
    driving.prepare(RunDir(tmp_path))
    assert RunDir(tmp_path).endpoint.read_text() == ""
    assert RunDir(tmp_path).lease.read_text() == "0000000000 go \n"
    with pytest.raises(FileError, match=str(tmp_path / "lease")):
        driving.prepare(RunDir(tmp_path / "lease"))


@pytest.mark.parametrize(
    ("age_s", "is_held", "is_kept"), [(1900, False, False), (1900, True, True), (60, False, True)]
)
def test_only_an_abandoned_lock_of_the_user_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, is_held: bool, is_kept: bool
) -> None:
    """A lock that a process holds, or that a build on another machine could hold, is kept."""
    lock = tmp_path / "extensions/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        if not is_held:
            held.close()
        os.utime(lock, (time.time() - age_s,) * 2)
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
        driving.prepare(RunDir(tmp_path / "launch"))
        assert lock.exists() == is_kept


def test_a_killed_build_leaves_no_lock(tmp_path: Path) -> None:
    """torch would wait for the lock forever, in this launch and in every later one."""
    run_dir = RunDir(tmp_path / "launch-2")
    run_dir.path.mkdir()
    locks = [
        run_dir.compile_caches / name / "cpu_adam" / "lock"
        for name in ("torch_extensions", "torch_extensions-of-node-1")
    ]
    for lock in locks:
        lock.parent.mkdir(parents=True)
        lock.touch()
    (locks[0].parent / "main.cpp").touch()
    driving.prepare(run_dir)
    assert not any(lock.exists() for lock in locks)
    assert (locks[0].parent / "main.cpp").exists()


def test_job_variables_win_and_agents_keep_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    given = {"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "0"}
    environment = driving.environment(replace(job(tmp_path), variables=given))
    assert {name: environment[name] for name in given} == given
    assert environment["PERFSUITE_JOB_VARIABLES"] == "NCCL_ALGO CUDA_VISIBLE_DEVICES"
    assert "PERFSUITE_JOB_VARIABLES" not in driving.environment(job(tmp_path / "other"))


def test_compilers_cache_next_to_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    environment = driving.environment(job(tmp_path / "case" / "launch-2"))
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "case" / "compile-caches" / "inductor")
    assert environment["TRITON_CACHE_DIR"] == "/mine", "a directory that the user has set wins"


def test_reads_autotuning_where_inductor_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    launched = job(tmp_path / "case" / "launch-2")
    assert driving.environment(launched)["TORCHINDUCTOR_CACHE_DIR"] == str(launched.run_dir.inductor_cache)


def inductor_cache(job: Job) -> str:
    return driving.environment(job)["TORCHINDUCTOR_CACHE_DIR"]


def test_keeps_the_cache_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_the_user = f"{tempfile.gettempdir()}/torchinductor_mine"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", of_the_user)
    assert inductor_cache(job(tmp_path / "case" / "launch-2")) == of_the_user


def test_replaces_the_default_cache_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sets the variable to its default if, for example, a `conftest.py` imports parts of torch."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    of_case = str(tmp_path / "case" / "compile-caches" / "inductor")
    assert inductor_cache(job(tmp_path / "case" / "launch-2")) == of_case


def test_sets_gpu_order_and_nccl_timeouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    ours = {
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "960",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl-flight-recorder-rank-",
    }
    theirs = dict.fromkeys([*numbered, *ours], "7")
    on_cpu = job(tmp_path, timeout_s=900)
    on_gpu = replace(on_cpu, machine=make_gpu_machine())

    def variables_of(job: Job) -> dict[str, str]:
        environment = driving.environment(job)
        return {name: environment[name] for name in theirs if name in environment}

    for name in theirs:
        monkeypatch.delenv(name, raising=False)
    recorder = "TORCH_FR_DUMP_TEMP_FILE"
    assert variables_of(on_cpu) == {recorder: ours[recorder]}
    assert variables_of(on_gpu) == numbered | ours
    for name in theirs:
        monkeypatch.setenv(name, "7")
    assert variables_of(on_gpu) == theirs | numbered, (
        "a variable that the user has set wins, except for the numbers"
    )
