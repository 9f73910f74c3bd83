import os
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from perfsuite import DDP, FSDP, FSDP2, Script, Topology
from perfsuite.dry.driver import dry_run, why_no_cuda
from perfsuite.errors import CaseError, DryRunError
from perfsuite.launch.arm import Arm
from perfsuite.results.run_dir import RunDir
from tests.dry.runs import failure_of
from tests.processes import executable
from tests.samples import make_case

CASE = make_case(framework=FSDP2(), hardware="cpu")


def test_refuses_an_impossible_dry_run_beforehand(tmp_path: Path) -> None:
    offloading = FSDP(sharding_strategy="FULL_SHARD", cpu_offload=True)
    with pytest.raises(DryRunError, match=r"fsdp-.*: a dry run cannot do this: offloading keeps shards"):
        dry_run(CASE.replace(framework=offloading, hardware="h100"), tmp_path)
    for rank in (-1, 2):
        with pytest.raises(DryRunError, match=f"rank {rank} does not exist: .* has ranks 0 to 1"):
            dry_run(CASE, tmp_path, ranks=[rank])
    with pytest.raises(DryRunError, match="has only rank 0"):
        dry_run(CASE.replace(topology=Topology(processes_per_node=1)), tmp_path, ranks=[1])
    assert list(tmp_path.iterdir()) == []


def test_framework_refusals_keep_their_own_error(tmp_path: Path) -> None:
    script = Script(path=str(tmp_path / "missing.py"))
    with pytest.raises(CaseError, match=r"missing\.py': No such file or directory"):
        dry_run(CASE.replace(framework=script), tmp_path / "run")


def with_process(script: str, tmp_path: Path) -> Arm:
    """Return an arm that runs this shell script instead of the process of a dry run."""
    python = executable(tmp_path / "python", script)
    return Arm(python=str(python), given={"X": "1"}, directory=tmp_path)


def test_process_without_a_report_is_a_crash(tmp_path: Path) -> None:
    arm = with_process("echo terminate called; exit 7", tmp_path)
    run = dry_run(CASE, tmp_path / "run", arm=arm)
    assert (run.dry, run.counts) == (True, ())
    assert run.failure is not None
    assert (run.failure.kind, run.failure.message) == (
        "crash",
        "no report: the process ended with exit code 7",
    )
    assert "terminate called" in str(run.failure.traceback)
    assert RunDir(tmp_path / "run").run.exists()


def test_a_process_that_does_not_end_is_killed(tmp_path: Path) -> None:
    arm = with_process("exec sleep 600", tmp_path)
    failure = failure_of(CASE, tmp_path / "run", arm=arm, timeout_s=0.05)
    assert (failure.kind, failure.message) == ("timeout", "no report: killed after 0.05 s")


def test_the_process_of_a_stopped_dry_run_is_killed(tmp_path: Path) -> None:
    arm = with_process("exec sleep 600", tmp_path)
    stop = Event()
    stop.set()
    failure = failure_of(CASE, tmp_path / "run", arm=arm, stop=stop)
    assert (failure.kind, failure.message) == ("cancelled", "no report: the dry run was stopped")


def test_rank_finds_its_place_in_the_environment(tmp_path: Path) -> None:
    arm = with_process('env > "$3/environment"; echo "$@" > "$3/words"', tmp_path)
    case = CASE.replace(topology=Topology(nodes=4, processes_per_node=2))
    dry_run(case, tmp_path / "run", ranks=[5], arm=arm)
    given = {"X": "1", "PWD": str(tmp_path), "PERFSUITE_ANCESTOR_PID": str(os.getpid())}
    given |= {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "GROUP_RANK": "2"}
    variables = (tmp_path / "run" / "environment").read_text().splitlines()
    assert {f"{name}={value}" for name, value in given.items()} <= set(variables)
    assert "--rank 5" in (tmp_path / "run" / "words").read_text()


def test_variable_of_a_script_is_the_worktrees(tmp_path: Path) -> None:
    worktree = tmp_path / "arms"
    worktree.mkdir()
    (worktree / "a.yaml").touch()
    made = with_process('env > "$3/environment"', tmp_path)
    arm = replace(made, paths=(str(worktree),), moved=(str(tmp_path), str(worktree)))
    script = Script(path=__file__, env={"CONFIG": str(tmp_path / "a.yaml")})
    dry_run(CASE.replace(framework=script), tmp_path / "run", ranks=[0], arm=arm)
    variables = (tmp_path / "run" / "environment").read_text().splitlines()
    assert f"CONFIG={worktree}/a.yaml" in variables


@pytest.mark.usefixtures("with_compiler")
def test_a_given_gpu_replaces_that_of_the_case(tmp_path: Path) -> None:
    arm = with_process("exit 1", tmp_path)
    run = dry_run(CASE.replace(hardware="h100"), tmp_path / "run", gpu="NVIDIA L4", arm=arm)
    assert (run.machine.device_name, run.machine.devices) == ("NVIDIA L4", 2)


@pytest.mark.usefixtures("without_compiler")
def test_a_given_gpu_must_be_possible(tmp_path: Path) -> None:
    with pytest.raises(DryRunError, match=r"there is no C\+\+ compiler"):
        dry_run(CASE, tmp_path / "run", gpu="NVIDIA L4")


@pytest.mark.parametrize(
    ("how", "ranks", "expected"),
    [
        ({"path": __file__}, 1, {}),
        ({"path": __file__}, 2, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}),
        ({"command": ("python", "x.py")}, 2, {}),
    ],
)
def test_script_has_the_variables_of_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any, ranks: int, expected: dict[str, str]
) -> None:
    """The variables of the pytest process belong to another job."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "PMI_RANK"):
        monkeypatch.setenv(name, "9")
    arm = with_process('env > "$3/environment"', tmp_path)
    case = CASE.replace(framework=Script(**how), topology=Topology(processes_per_node=ranks))
    dry_run(case, tmp_path / "run", ranks=[ranks - 1], arm=arm)
    variables = (tmp_path / "run" / "environment").read_text().splitlines()
    names = ("RANK=", "WORLD_SIZE=", "LOCAL_RANK=", "MASTER_PORT=", "PMI_RANK=")
    assert {line for line in variables if line.startswith(names)} == {f"{n}={v}" for n, v in expected.items()}


@pytest.mark.launch
def test_framework_errors_keep_their_traceback(tmp_path: Path) -> None:
    """transformers does not know the activation. The error occurs when the model is built."""
    config: dict[str, Any] = {**CASE.model.config, "activation_function": "nosuch"}
    failure = failure_of(CASE.replace(framework=DDP(), model=CASE.model.replace(config=config)), tmp_path)
    assert failure.rank == 0
    assert "nosuch" in failure.message
    assert "Traceback" in str(failure.traceback)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo it can be", None),
        ("echo there is no C++ compiler", "there is no C++ compiler"),
        ("echo No module named perfsuite >&2; exit 1", "/python: No module named perfsuite"),
    ],
)
def test_asks_an_arm_whether_cuda_can_be_pretended(tmp_path: Path, script: str, why: str | None) -> None:
    reason = why_no_cuda(with_process(script, tmp_path))
    assert reason is None if why is None else str(reason).endswith(why)
