"""Launches on a real Slurm of two nodes, and each way in which they break down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from perfsuite import DDP, FSDP2, Case, Fake, Model, Script, Topology, documents
from perfsuite.errors import AllocationOverError, MachineError, SlurmError
from perfsuite.launch import hang
from perfsuite.launch.base import Job, OnProgress, no_progress
from perfsuite.launch.slurm import commands
from perfsuite.launch.slurm import launcher as launching
from perfsuite.launch.slurm.launcher import SlurmLauncher
from perfsuite.measure import Launching, launch_once
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from tests.launch.slurm.allocation import Allocation
from tests.processes import executable, wait_until
from tests.samples import make_machine

FAKE = Case(
    model="llama-tiny",
    framework=Fake(),
    sequence_length=64,
    micro_batch=4,
    topology=Topology(nodes=2, processes_per_node=1),
    hardware="cpu",
    timeout_s=300,
)
DDP_TINY = FAKE.replace(framework=DDP(), max_warmup_steps=5, steps=10)
MACHINE = make_machine(nodes=2)

pytestmark = pytest.mark.launch


def launched(
    case: Case, directory: Path, *, inject: str | None = None, on_progress: OnProgress = no_progress
) -> Run:
    how = Launching(inject=inject, launcher=SlurmLauncher(), on_progress=on_progress)
    return launch_once(case, MACHINE, directory, how)


def failure_of(run: Run) -> Failure:
    assert run.failure is not None
    return run.failure


def once(condition: Callable[[], bool], action: Callable[[], object]) -> OnProgress:
    """Do something in the midst of a launch."""
    done: list[bool] = []

    def on_progress(step: int, tokens_per_step: int) -> None:
        if not done and condition():
            done.append(True)
            action()

    return on_progress


def in_training(directory: Path) -> Callable[[], bool]:
    """Whether both ranks of a launch run."""
    run_dir = RunDir(directory)
    return lambda: bool(run_dir.all_stacks(0) and run_dir.all_stacks(1))


def test_both_nodes_are_described(
    allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("NCCL_", "GLOO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    found = SlurmLauncher().machine(tmp_path)
    assert (found.device, found.nodes) == ("cpu", 2)
    assert found.devices == 1, "a node has one core here"
    told = found.allocation
    assert told is not None
    assert (told.job_id, told.variables) == (allocation.job_id, {"NCCL_SOCKET_IFNAME": "eth0"})
    assert [(node.name, node.interface) for node in told.nodes] == [("n1", "eth0"), ("n2", "eth0")]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_a_node_does_not_see_is_refused(allocation: Allocation, tmp_path: Path) -> None:
    shared = tmp_path / "store"
    shared.mkdir()
    cluster = allocation.cluster
    cluster.on("n2", "mount", "-t", "tmpfs", "none", str(shared))
    try:
        with pytest.raises(MachineError, match=f"^n2 cannot see {shared}, .*--perf-store=DIR"):
            SlurmLauncher().machine(shared)
    finally:
        cluster.on("n2", "umount", str(shared))


@pytest.mark.parametrize(
    ("allocation", "said"),
    [
        (["--gres=gpu:4"], r"^n1: Slurm gave a step 4 GPUs, and it sees 0 \(.*ask for none"),
        (["--gpus=16"], "asked for GPUs otherwise than per node"),
        (["--gpus-per-task=1", "--ntasks-per-node=8"], "asked for GPUs otherwise than per node"),
    ],
    indirect=["allocation"],
)
def test_a_step_has_all_gpus_of_each_node_or_is_refused(
    allocation: Allocation, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm gives steps GPUs here that no driver knows: they are counted, and missed."""
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")  # as in the script of the job
    launcher = SlurmLauncher()
    with pytest.raises(MachineError, match=said):
        launcher.machine(tmp_path)
    if "otherwise" in said:
        return
    on_one_node = FAKE.replace(topology=Topology(nodes=1, processes_per_node=1))
    run = launch_once(on_one_node, MACHINE, tmp_path / "launch", Launching(launcher=launcher))
    assert run.failure is None


def test_steps_have_options_and_an_interpreter_of_their_own(
    allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container: the interpreter writes down that it ran, and what `srun` was told."""
    told = tmp_path / "told"
    writes = f'echo "$SLURM_CPUS_PER_TASK $2" >> {told}'
    python = executable(tmp_path / "python", writes, f'exec {sys.executable} "$@"')
    monkeypatch.setenv("PERFSUITE_SLURM_SRUN_OPTIONS", "--cpus-per-task=2 --comment='a b'")
    monkeypatch.setenv("PERFSUITE_SLURM_PYTHON", str(python))
    launcher = SlurmLauncher()
    assert launcher.machine(tmp_path).nodes == 2
    assert launch_once(FAKE, MACHINE, tmp_path / "launch", Launching(launcher=launcher)).failure is None
    assert told.read_text().splitlines() == [
        *2 * ["2 perfsuite.node.describe"],
        *2 * ["2 perfsuite.node.agent"],
    ]


@pytest.mark.smoke
def test_ranks_are_in_the_order_of_the_nodes(allocation: Allocation, tmp_path: Path) -> None:
    case = DDP_TINY.replace(topology=Topology(nodes=2, processes_per_node=2))
    run = launched(case, tmp_path)
    assert run.failure is None
    run_dir = RunDir(tmp_path)
    hosts = [documents.read(run_dir.rank(rank), RankReport).host for rank in range(4)]
    assert hosts == ["n1", "n1", "n2", "n2"]
    assert [node.name for node in run.nodes] == ["n1", "n2"]
    assert all(node.health is not None for node in run.nodes)
    assert run.health is not None
    assert run.health.node in ("n1", "n2")
    assert [(each.ranks, each.counts.collectives[0].ranks) for each in run.counts] == [((0, 1, 2, 3), 4)]


def test_the_ranks_of_a_script_meet_across_nodes(allocation: Allocation, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for _ in range(100):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.ones(2, 4)).square().sum().backward()\n"
        "    optimizer.step()\n"
        "dist.destroy_process_group()\n"
    )
    case = FAKE.replace(model=Model.named("net"), framework=Script(path=str(script)), steps=40)
    run = launched(case, tmp_path / "launch")
    assert run.failure is None
    assert [node.name for node in run.nodes] == ["n1", "n2"]


def bytes_per_step(allocation: Allocation, case: Case, directory: Path) -> float:
    """Bytes that n1 sends in a step, with the headers of the network."""
    seen: list[tuple[int, int]] = []

    def look(step: int, tokens_per_step: int) -> None:
        if step > 10 and (not seen or step != seen[-1][0]):
            seen.append((step, allocation.cluster.sent_bytes("n1")))

    assert launched(case, directory, on_progress=look).failure is None
    (first, before), (last, after) = seen[0], seen[-1]
    return (after - before) / (last - first)


def test_what_crosses_the_network_is_what_theory_says(allocation: Allocation, tmp_path: Path) -> None:
    """Of two ranks each sends 4 N bytes for an all-reduce of N parameters in fp32: DDP makes one a step.

    FSDP2 gathers parameters twice (half of 4 N is sent each time) and reduces gradients once, which costs an
    all-reduce: gloo's reduce-scatter is made of one.
    """
    parameters = 918_656
    ddp = bytes_per_step(allocation, DDP_TINY.replace(steps=60), tmp_path / "ddp") / (4 * parameters)
    fsdp2 = bytes_per_step(allocation, DDP_TINY.replace(framework=FSDP2(), steps=60), tmp_path / "fsdp2") / (
        4 * parameters
    )
    assert ddp == pytest.approx(1, rel=0.1)
    assert fsdp2 == pytest.approx(2, rel=0.1)


@pytest.mark.fault("rank is killed on another node")
def test_a_rank_that_is_killed_is_named(allocation: Allocation, tmp_path: Path) -> None:
    def kill() -> None:
        ((_, pid, _),) = RunDir(tmp_path).all_stacks(1)
        allocation.cluster.on("n2", "kill", "-KILL", str(pid))

    failure = failure_of(
        launched(DDP_TINY, tmp_path, inject="hang", on_progress=once(in_training(tmp_path), kill))
    )
    assert (failure.kind, failure.rank) == ("crash", 1)
    assert failure.message == "exit code -9 (SIGKILL)"
    wait_until(allocation.is_clean, "both nodes to be clean")


@pytest.mark.fault("agent is killed on another node")
def test_an_agent_that_is_killed_is_named(allocation: Allocation, tmp_path: Path) -> None:
    kill = once(in_training(tmp_path), lambda: allocation.agent("n2").kill())
    failure = failure_of(launched(FAKE, tmp_path, inject="hang", on_progress=kill))
    assert failure.kind == "crash"
    assert failure.message.startswith("an agent ended without a word: n2: task 1: Killed")
    wait_until(allocation.is_clean, "both nodes to be clean")


@pytest.mark.fault("srun is killed")
def test_srun_that_is_killed_leaves_nothing(allocation: Allocation, tmp_path: Path) -> None:
    def kill() -> None:
        for process in psutil.Process().children(recursive=True):
            if process.name() == "srun":
                process.kill()

    failure = failure_of(
        launched(FAKE, tmp_path, inject="hang", on_progress=once(in_training(tmp_path), kill))
    )
    assert failure.kind in ("cancelled", "missing_report")
    wait_until(allocation.is_clean, "both nodes to be clean")


@pytest.mark.fault("step is cancelled")
def test_a_step_that_somebody_cancels(allocation: Allocation, tmp_path: Path) -> None:
    cancel = once(in_training(tmp_path), lambda: allocation.cluster.run("scancel", allocation.step()))
    failure = failure_of(launched(FAKE, tmp_path, inject="hang", on_progress=cancel))
    assert failure.kind == "cancelled"
    assert failure.message.startswith("Slurm ended the step: ")
    wait_until(allocation.is_clean, "both nodes to be clean")


@pytest.mark.fault("allocation is cancelled")
def test_an_allocation_that_somebody_cancels(allocation: Allocation, tmp_path: Path) -> None:
    cancel = once(in_training(tmp_path), lambda: allocation.cluster.run("scancel", allocation.job_id))
    with pytest.raises(AllocationOverError, match=f"the Slurm job {allocation.job_id} is over: CANCELLED"):
        launched(FAKE, tmp_path, inject="hang", on_progress=cancel)
    wait_until(allocation.is_clean, "both nodes to be clean")
    with pytest.raises(AllocationOverError):
        launched(FAKE, tmp_path / "next")


@pytest.mark.fault("node is lost")
def test_a_node_that_is_lost(allocation: Allocation, tmp_path: Path) -> None:
    lose = once(in_training(tmp_path), lambda: allocation.cluster.kill_slurmd("n2"))
    with pytest.raises(AllocationOverError, match="NODE_FAIL"):
        launched(FAKE, tmp_path, inject="hang", on_progress=lose)


@pytest.mark.fault("hang on several nodes")
def test_a_hang_is_ended_with_the_stacks_of_every_node(
    allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "HANG_S", 4)
    failure = failure_of(launched(DDP_TINY, tmp_path, inject="hang"))
    assert failure.kind == "timeout"
    told = str(failure.traceback)
    assert told.startswith("rank 1 stood here:"), "the one that is absent comes first"
    assert "in _break_down" in told
    assert "rank 0 stood here:" in told
    wait_until(allocation.is_clean, "both nodes to be clean")


DRIVER = """
import sys
from pathlib import Path
from perfsuite import documents, Case
from perfsuite.case.hardware import Machine
from perfsuite.node import lease
from perfsuite.launch.slurm.launcher import SlurmLauncher
from perfsuite.measure import Launching, launch_once
lease.LOST_S = 3
directory = Path(sys.argv[1])
case = documents.read(directory / "the-case.json", Case)
machine = documents.read(directory / "machine.json", Machine)
launch_once(case, machine, directory / "launch", Launching(inject="hang", launcher=SlurmLauncher()))
"""


@pytest.mark.fault("pytest is killed, with or without srun")
@pytest.mark.parametrize("with_srun", [False, True])
def test_no_process_outlives_its_driver(allocation: Allocation, tmp_path: Path, with_srun: bool) -> None:
    (tmp_path / "the-case.json").write_text(FAKE.model_dump_json())
    (tmp_path / "machine.json").write_text(MACHINE.model_dump_json())
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)]) as driver:
        wait_until(in_training(tmp_path / "launch"), "both ranks to run")
        sruns = [
            each for each in psutil.Process(driver.pid).children(recursive=True) if each.name() == "srun"
        ]
        for process in [psutil.Process(driver.pid), *(sruns if with_srun else [])]:
            process.send_signal(signal.SIGSTOP)  # all at once: none sees the other's end
        for process in [*(sruns if with_srun else []), psutil.Process(driver.pid)]:
            process.kill()
    wait_until(allocation.is_clean, "both nodes to be clean")


@pytest.mark.fault("Ctrl-C on several nodes")
def test_an_interrupt_leaves_nothing(allocation: Allocation, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launched(FAKE, tmp_path, inject="hang", on_progress=once(in_training(tmp_path), interrupt))
    wait_until(allocation.is_clean, "both nodes to be clean")


@pytest.mark.fault("allocation is about to end")
def test_an_allocation_that_is_about_to_end_is_not_begun_with(
    allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = commands.job(allocation.job_id)
    monkeypatch.setattr(commands, "job", lambda job_id: replace(known, left_s=50))
    with pytest.raises(AllocationOverError, match="ends in 50 s, and a launch may take 60 s"):
        launched(FAKE, tmp_path)
    assert launched(FAKE.replace(timeout_s=40), tmp_path / "short").failure is None


def test_what_was_measured_is_kept_though_the_allocation_is_over(
    allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = launching.SlurmLauncher._end

    def end(self: SlurmLauncher, job: Job, srun: subprocess.Popen[bytes], mark: str) -> None:
        ends(self, job, srun, mark)
        allocation.cluster.run("scancel", allocation.job_id)

    monkeypatch.setattr(SlurmLauncher, "_end", end)
    assert launched(FAKE, tmp_path / "first").failure is None
    with pytest.raises(AllocationOverError):
        launched(FAKE, tmp_path / "second")


def test_a_controller_that_is_busy_is_asked_again(
    allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[SlurmError | list[str]] = [SlurmError("busy"), SlurmError("busy"), *([] for _ in range(9))]

    def steps(job_id: str, name: str) -> list[str]:
        answer = answers.pop(0)
        if isinstance(answer, SlurmError):
            raise answer
        return answer

    monkeypatch.setattr(commands, "steps", steps)
    assert launched(FAKE, tmp_path).failure is None
    assert len(answers) == 8


def test_a_launch_is_kept_though_its_step_does_not_end_and_the_next_one_waits_for_that(
    allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps(job_id: str, name: str) -> list[str]:
        asked.append(name)
        raise SlurmError("still busy")

    asked: list[str] = []
    launcher = SlurmLauncher()
    with monkeypatch.context() as patched:
        patched.setattr(commands, "steps", steps)
        patched.setattr(launching, "END_S", 0.5)
        assert launch_once(FAKE, MACHINE, tmp_path / "kept", Launching(launcher=launcher)).failure is None
        with pytest.raises(SlurmError, match="still busy"):
            launch_once(FAKE, MACHINE, tmp_path / "next", Launching(launcher=launcher))
        assert len(set(asked)) == 1, "no step was begun beside it"
        with pytest.raises(SlurmError, match="still busy"):
            launched(FAKE, tmp_path / "failed", inject="exit")
    assert launch_once(FAKE, MACHINE, tmp_path / "then", Launching(launcher=launcher)).failure is None
