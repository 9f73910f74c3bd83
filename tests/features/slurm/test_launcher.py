"""Tests of launches on two nodes of a real Slurm, and of each way in which a launch can break down."""

import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from perfsuite import DDP, FSDP2, Case, Topology, documents
from perfsuite.errors import AllocationOverError, MachineError
from perfsuite.features.slurm.launcher import SlurmLauncher
from perfsuite.launch.arm import Arm
from perfsuite.launch.hang import HangDetector
from perfsuite.launch.job import OnProgress, no_progress
from perfsuite.measure import Launching, launch_once
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from tests.features.slurm.allocation import Allocation
from tests.launch.test_local import driver
from tests.processes import ended, executable, pid_of, wait_until
from tests.samples import make_case, make_machine

FAKE = make_case(model="llama-tiny", topology=Topology(nodes=2, processes_per_node=1), timeout_s=300)
DDP_TINY = FAKE.replace(framework=DDP(), micro_batch=1, steps=60)
MACHINE = make_machine(nodes=2)

pytestmark = pytest.mark.launch


def launched(
    case: Case, directory: Path, *, inject: str | None = None, on_progress: OnProgress = no_progress
) -> Run:
    how = Launching(inject=inject, launcher=SlurmLauncher(), on_progress=on_progress)
    return launch_once(case, MACHINE, directory, how)


def in_training(directory: Path) -> bool:
    """Return whether both ranks of a launch have begun to train."""
    return bool(RunDir(directory).all_stacks(0) and RunDir(directory).all_stacks(1))


def broken(directory: Path, action: Callable[[], object], case: Case = FAKE) -> Failure:
    """Return the failure of a launch whose rank 1 hangs. `action` is called while both ranks run."""
    done: list[object] = []

    def on_progress(step: int, tokens_per_step: int) -> None:
        if not done and in_training(directory):
            done.append("once")
            action()

    run = launched(case, directory, inject="hang", on_progress=on_progress)
    assert run.failure is not None
    return run.failure


def test_steps_have_interpreter_options_and_arm(
    allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replacements for the interpreter log their calls, with variables from `srun` and from the arm."""
    log = tmp_path / "told"
    writes = f'echo "$(basename $0) $SLURM_CPUS_PER_TASK $2 $LEVEL" >> {log}'
    goes_on = 'exec {} "$@"'
    ours, theirs = (
        executable(tmp_path / name, writes, goes_on.format(sys.executable)) for name in ("ours", "theirs")
    )
    for name in [name for name in os.environ if name.startswith(("NCCL_", "GLOO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    launcher = SlurmLauncher(srun_options=["--cpus-per-task=2", "--comment=a b"], python=str(ours))
    shared = tmp_path / "shared"
    shared.mkdir()
    machine = launcher.machine(shared)
    assert (machine.device, machine.nodes, machine.devices) == ("cpu", 2, 1), "each node has one core"
    assert machine.allocation is not None
    assert machine.allocation.job_id == allocation.job_id
    assert machine.allocation.variables == {"NCCL_SOCKET_IFNAME": "eth0"}
    assert [(node.name, node.interface, node.cores) for node in machine.allocation.nodes] == [
        ("n1", "eth0", 1),
        ("n2", "eth0", 1),
    ]
    assert {node.cores_of_machine for node in machine.allocation.nodes} == {os.cpu_count()}
    assert list(shared.iterdir()) == []
    arms = {"usual": Arm(), "arm": Arm(python=str(theirs), given={"LEVEL": "high"})}
    for name, arm in arms.items():
        run = launch_once(FAKE, MACHINE, tmp_path / name, Launching(launcher=launcher, arm=arm))
        assert run.failure is None
        assert [node.name for node in run.nodes] == ["n1", "n2"]
    assert [line.strip() for line in log.read_text().splitlines()] == [
        *2 * ["ours 2 perfsuite.features.slurm.describe"],
        *2 * ["ours 2 perfsuite.node.agent"],
        *2 * ["theirs 2 perfsuite.node.agent high"],
    ]


@pytest.mark.parametrize("name", ["SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK"])
def test_steps_ignore_the_jobs_cores_per_task(
    allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """perfsuite has one task on each node, which needs all cores, not only those of one task of the job."""
    monkeypatch.setenv(name, "2")
    log = tmp_path / "log"
    python = executable(
        tmp_path / "python", f'echo "${{SLURM_CPUS_PER_TASK:-all}}" >> {log}', f'exec {sys.executable} "$@"'
    )
    SlurmLauncher(python=str(python)).machine(tmp_path)
    assert log.read_text().split() == ["all", "all"]


def test_refuses_a_directory_a_node_cannot_see(allocation: Allocation, tmp_path: Path) -> None:
    cluster = allocation.cluster
    cluster.on("n2", "mount", "-t", "tmpfs", "none", str(tmp_path))
    try:
        with pytest.raises(
            MachineError, match=f"^n2 cannot see the file .* in {tmp_path}\\. .*--perf-store=DIR"
        ):
            SlurmLauncher().machine(tmp_path)
    finally:
        # A step that Slurm is still ending might use the directory.
        cluster.on("n2", "umount", "--lazy", str(tmp_path))


def test_refuses_a_step_without_all_gpus(
    allocation: Allocation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm gives GPUs to steps, but the emulated nodes have no driver, so the step sees no GPUs."""
    allocation.take("--gres=gpu:4")
    monkeypatch.setenv("SLURM_JOB_ID", allocation.job_id)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")  # as in the script of a job
    launcher = SlurmLauncher()
    with pytest.raises(
        MachineError, match=r"^n1: Slurm gave a step 4 GPUs, but the step sees 0 \(.*request none"
    ):
        launcher.machine(tmp_path)
    on_one_node = FAKE.replace(topology=Topology(nodes=1, processes_per_node=1))
    run = launch_once(on_one_node, MACHINE, tmp_path / "launch", Launching(launcher=launcher))
    assert run.failure is None


class Wire:
    """Records the bytes that n1 sends while a launch trains, including network headers."""

    def __init__(self, allocation: Allocation) -> None:
        self._cluster = allocation.cluster
        self._seen: list[tuple[int, int]] = []

    def look(self, step: int, tokens_per_step: int) -> None:
        """Receive the progress of the launch."""
        if step > 5 and (not self._seen or step != self._seen[-1][0]):
            self._seen.append((step, self._cluster.sent_bytes("n1")))

    def models_per_step(self) -> float:
        """Return the bytes that are sent in a step, divided by the bytes of the parameters in fp32."""
        first, before = self._seen[0]
        last, after = self._seen[-1]
        return (after - before) / (last - first) / (4 * 918_656)


@pytest.mark.smoke
def test_ranks_follow_nodes_and_form_one_ring(allocation: Allocation, tmp_path: Path) -> None:
    """In a ring of P ranks, each rank sends 2 (P - 1) / P times the gradients. Only one rank sends to n2."""
    wire = Wire(allocation)
    on_both = Topology(nodes=2, processes_per_node=2)
    run = launched(DDP_TINY.replace(topology=on_both), tmp_path, on_progress=wire.look)
    assert run.failure is None
    hosts = [documents.read(RunDir(tmp_path).rank(rank), RankReport).host for rank in range(4)]
    assert hosts == ["n1", "n1", "n2", "n2"]
    assert [node.name for node in run.nodes] == ["n1", "n2"]
    assert all(node.health is not None for node in run.nodes)
    assert run.health is not None
    assert run.health.node in ("n1", "n2")
    assert [(entry.ranks, entry.counts.collectives[0].ranks) for entry in run.counts] == [((0, 1, 2, 3), 4)]
    assert wire.models_per_step() == pytest.approx(1.5, rel=0.1)


@pytest.mark.nightly
def test_fsdp_sends_over_the_network_as_in_theory(allocation: Allocation, tmp_path: Path) -> None:
    """In a step, parameters are gathered twice, and half of them are sent each time.

    Gradients are reduced once. gloo implements a reduce-scatter as an all-reduce, which sends all gradients.
    """
    wire = Wire(allocation)
    run = launched(DDP_TINY.replace(framework=FSDP2(), micro_batch=4), tmp_path, on_progress=wire.look)
    assert run.failure is None
    assert wire.models_per_step() == pytest.approx(2, rel=0.1)


def kill_rank(allocation: Allocation, directory: Path) -> None:
    allocation.cluster.on("n2", "kill", "-KILL", str(pid_of(1, RunDir(directory), node=1)))


def sruns_of(driver: psutil.Process) -> list[psutil.Process]:
    return [process for process in driver.children(recursive=True) if process.name() == "srun"]


def kill_srun(allocation: Allocation, directory: Path) -> None:
    for srun in sruns_of(psutil.Process()):
        srun.kill()


@pytest.mark.parametrize(
    ("action", "said"),
    [
        pytest.param(
            kill_rank,
            r"crash of rank 1: exit code -9 \(SIGKILL\)$",
            marks=pytest.mark.fault("rank is killed on another node"),
        ),
        pytest.param(
            lambda allocation, directory: allocation.agent("n2").kill(),
            "crash of rank None: an agent ended without a report: n2: task 1: Killed",
            marks=pytest.mark.fault("agent is killed on another node"),
        ),
        pytest.param(kill_srun, "(cancelled|missing_report) of", marks=pytest.mark.fault("srun is killed")),
        pytest.param(
            lambda allocation, directory: allocation.cluster.run("scancel", allocation.step()),
            "cancelled of rank None: Slurm ended the step: ",
            marks=pytest.mark.fault("step is cancelled"),
        ),
    ],
    ids=["rank", "agent", "srun", "step"],
)
def test_names_what_was_killed_or_cancelled(
    allocation: Allocation, tmp_path: Path, action: Callable[[Allocation, Path], object], said: str
) -> None:
    failure = broken(tmp_path, lambda: action(allocation, tmp_path))
    assert re.match(said, f"{failure.kind} of rank {failure.rank}: {failure.message}")


@pytest.mark.fault("allocation is cancelled")
def test_a_cancelled_allocation_is_over(allocation: Allocation, tmp_path: Path) -> None:
    with pytest.raises(AllocationOverError, match=f"the Slurm job {allocation.job_id} is over: CANCELLED"):
        broken(tmp_path, lambda: allocation.cluster.run("scancel", allocation.job_id))
    with pytest.raises(AllocationOverError):
        launched(FAKE, tmp_path / "next")


@pytest.mark.fault("node is lost")
def test_a_lost_node_ends_the_allocation(allocation: Allocation, tmp_path: Path) -> None:
    with pytest.raises(AllocationOverError, match="NODE_FAIL"):
        broken(tmp_path, lambda: allocation.cluster.kill_slurmd("n2"))
    assert not allocation.is_clean(), "a process of the job still runs"
    allocation.take()
    words = ("srun", f"--jobid={allocation.job_id}", "-N2", "hostname")
    assert sorted(allocation.cluster.run(*words).split()) == ["n1", "n2"], "the node is repaired"


@pytest.mark.nightly
@pytest.mark.fault("hang on several nodes")
def test_ends_a_hang_with_every_nodes_stacks(allocation: Allocation, tmp_path: Path) -> None:
    impatient = SlurmLauncher(new_detector=partial(HangDetector, hang_s=3))
    how = Launching(inject="hang", launcher=impatient)
    failure = launch_once(DDP_TINY, MACHINE, tmp_path, how).failure
    assert failure is not None
    assert failure.kind == "timeout"
    stacks = str(failure.traceback)
    assert stacks.startswith("rank 1 stopped at:"), "the missing rank comes first"
    assert "in _break_down" in stacks
    assert "rank 0 stopped at:" in stacks


@pytest.mark.usefixtures("allocation")
@pytest.mark.fault("pytest is killed, with or without srun")
@pytest.mark.parametrize("with_srun", [False, True])
def test_no_process_outlives_its_driver(tmp_path: Path, with_srun: bool) -> None:
    with ended(driver(tmp_path, FAKE, "hang", launcher="slurm")) as process:
        wait_until(lambda: in_training(tmp_path / "run"), "both ranks to run")
        ours = psutil.Process(process.pid)
        sruns = sruns_of(ours) if with_srun else []
        for stopped in (ours, *sruns):
            stopped.send_signal(signal.SIGSTOP)  # stop all before killing them, so that none sees another end
        for killed in (*sruns, ours):
            killed.kill()


@pytest.mark.usefixtures("allocation")
@pytest.mark.fault("Ctrl-C on several nodes")
def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken(tmp_path, interrupt)


SLOW_NODE = """
import socket

if socket.gethostname() == "n2":
    from perfsuite.worker.clock.timers import HostTimer

    honest = HostTimer.seconds
    HostTimer.seconds = lambda timer, start, end: 10 * honest(timer, start, end)
"""


@pytest.mark.usefixtures("allocation")
def test_a_preflight_names_a_slow_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of n2 is changed, so that all work on n2 seems to take ten times as long."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_NODE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seen = SlurmLauncher().check_nodes(MACHINE, 2, tmp_path / "preflight", names=("n1", "n2"))
    sentence = seen.problems[0]
    assert re.match(r"n2: matmul \S+ TFLOP/s, n1 has \S+ \(healthy: at least 40% of this\)", sentence)
    assert all(problem.startswith("n2: ") for problem in seen.problems)
    names = {"matmul_tflops", "copy_gb_s", "all_reduce_gb_s"}
    rates = [(node.name, set(node.rates) - names) for node in seen.nodes]
    assert rates == [("n1", {"next_gb_s"}), ("n2", {"previous_gb_s"})]
    assert all(names < set(node.rates) for node in seen.nodes)
    assert all(node.health is not None and node.health.samples > 1 for node in seen.nodes)
