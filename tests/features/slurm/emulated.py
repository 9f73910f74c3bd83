"""Starts a real Slurm with two nodes on this machine, for tests. `make slurm` installs its packages.

Each node is a set of Linux namespaces: network, host name, processes, mounts. Processes on different nodes
cannot see each other, and communicate over a network interface. Files and memory are shared. A process that
Slurm starts on a node has one core. If this machine has two cores, the nodes use different cores. The
controller runs outside the nodes, like the tests.

    with slurm_cluster() as cluster:
        subprocess.run(["srun", "-N2", "hostname"], env={**os.environ, **cluster.environment})

Several clusters can run at the same time. Each has a slot, which is a number in all of its names. If the
process that started a cluster dies, the kernel ends all processes of the cluster, including its jobs. Files
and network interfaces that are left are removed when the next cluster takes the slot.
"""

import contextlib
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from perfsuite.worker.leash import die_with_parent
from tests.processes import wait_until

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "ip", "nsenter", "unshare")
QUESTIONS = ("sinfo", "squeue", "scontrol", "scancel")  # commands that can be repeated safely
SLOTS = range(16)  # one for each cluster that can run at the same time
START_S = 60  # seconds that a part of the cluster can take to start or to end
LOG_LETTERS = 3000  # number of a log's last characters that are shown after a failure
GPUS = 8  # number of GPUs that each node pretends to have (files without a driver)

CONF = """\
ClusterName=perfsuite{slot}
SlurmctldHost={host}({subnet}.1)
SlurmctldPort=20{slot:03}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.socket
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2
SlurmdParameters=config_overrides
EnforcePartLimits=ALL
ReturnToService=2
SlurmdTimeout=6
MessageTimeout=3
TCPTimeout=1
KillWait=2
MinJobAge=3600
MailProg=/bin/true
GresTypes=gpu
NodeName=n[1-2] NodeAddr={subnet}.[11-12] CPUs=16 RealMemory=8000 Gres=gpu:{gpus}
PartitionName=bench Nodes=ALL Default=YES MaxTime=INFINITE
PartitionName=short Nodes=ALL MaxTime=1 MaxNodes=1
PartitionName=closed Nodes=ALL State=DOWN
"""
"""The partition `short` refuses jobs of two nodes or of more than a minute. Jobs in `closed` never start.
Slurm pings nodes rarely and waits for each answer. So it considers a node dead, and ends the allocations of
the node's jobs, only after twice SlurmdTimeout. The nodes only pretend to have 16 cores."""

NODE = """\
hostname "$1"
mount --bind "$2" /etc/hosts
ip link set lo up
echo ready
exec env --ignore-signal=CHLD sleep infinity
"""
"""The first process of a node. It ignores SIGCHLD, so that orphans of the node do not become zombies."""


class Cluster:
    """Slurm with the nodes n1 and n2, and the partitions bench, short and closed."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.nodes = ("n1", "n2")
        self.directory = Path(f"/tmp/perfsuite-slurm-{slot}")
        self._bridge = f"pfslurm{slot}"
        self._subnet = f"10.77.{slot}"
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._inits: dict[str, int] = {}

    @property
    def environment(self) -> dict[str, str]:
        """The variables that Slurm's commands need to find this cluster."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def run(self, *words: str) -> str:
        """Return the output of a command on the controller's host.

        Raises `SubprocessError` if the command fails, or takes longer than `START_S`. A command in
        `QUESTIONS` that fails is repeated for that time, since the controller might not have started yet, or
        might be too busy to answer.
        """
        until = time.monotonic() + START_S
        while True:
            try:
                return _output(words, {**os.environ, **self.environment})
            except subprocess.SubprocessError:
                if words[0] not in QUESTIONS or time.monotonic() > until:
                    raise
                time.sleep(0.2)

    def command(self, node: str, *words: str) -> list[str]:
        """Return the words that run a command on a node, in the current directory."""
        entered = ["nsenter", f"--target={self._inits[node]}", "--net", "--uts", "--mount", "--pid", "--ipc"]
        return [*entered, "env", f"--chdir={Path.cwd()}", *words]

    def on(self, node: str, *words: str) -> str:
        """Return the output of a command on a node. Raises `CalledProcessError` if it fails."""
        return self.run(*self.command(node, *words))

    def processes(self, node: str) -> list[psutil.Process]:
        """Return the processes of jobs on a node, with their pids on this machine."""
        return _processes(
            lambda process: (
                process.pid != self._inits[node]
                and process.name() != "slurmd"
                and self._is_on(node, process)
                and process.status() != psutil.STATUS_ZOMBIE
            )
        )

    def _is_on(self, node: str, process: psutil.Process) -> bool:
        one, other = (os.readlink(f"/proc/{pid}/ns/pid") for pid in (process.pid, self._inits[node]))
        return one == other

    def sent_bytes(self, node: str) -> int:
        """Return the bytes that a node has sent through its network interface, including headers."""
        (line,) = [line for line in self.on(node, "cat", "/proc/net/dev").splitlines() if "eth0:" in line]
        return int(line.split()[9])  # the name and eight numbers about received data come first

    def state(self, node: str) -> str:
        """Return the state of a node as `sinfo` prints it: for example, idle, mixed or down*."""
        return self.run("sinfo", "--noheader", "--partition=bench", f"--nodes={node}", "--format=%T").strip()

    def kill_slurmd(self, node: str) -> None:
        """Kill Slurm's daemon on a node. After SlurmdTimeout, the node counts as down. Its jobs continue."""
        for daemon in _processes(lambda process: process.name() == "slurmd" and self._is_on(node, process)):
            with contextlib.suppress(psutil.Error):
                daemon.kill()
                daemon.wait(START_S)

    def repair(self, node: str) -> None:
        """Kill the processes on a node, start Slurm's daemon again, and wait until the node is idle."""
        for process in self.processes(node):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.kill_slurmd(node)
        self._start_slurmd(node)
        wait_until(lambda: self._is_idle(node), f"{node} to be idle")

    def logs(self) -> str:
        """Return the last lines of the daemons' logs, which show why a part of the cluster takes too long."""
        ends = (
            f"{log.name}:\n{log.read_text(errors='replace')[-LOG_LETTERS:]}"
            for log in sorted(self.directory.glob("*.log"))
        )
        return "\n".join(ends) or f"no log in {self.directory}"

    def start(self) -> None:
        """Start the network, the nodes and the daemons. Returns when all nodes are idle."""
        self._write_files()
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self._subnet}.1/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for number, node in enumerate(self.nodes, start=1):
            self._start_node(node, f"{self._subnet}.{10 + number}/24")
        self._start_munged()
        self._start("slurmctld", "-D")
        for node in self.nodes:
            self._start_slurmd(node)
        self.wait_until_idle()

    def stop(self) -> None:
        """End every process of the cluster and of its jobs, and remove its network and its files."""
        for daemon in self._daemons:
            daemon.kill()
        for daemon in self._daemons:
            daemon.wait(START_S)
        _remove(self.slot)

    def _write_files(self) -> None:
        (self.directory / "state").mkdir(mode=0o700, parents=True)
        host = socket.gethostname().partition(".")[0]
        subnet = self._subnet
        conf = CONF.format(slot=self.slot, host=host, subnet=subnet, directory=self.directory, gpus=GPUS)
        gpus = [self.directory / f"gpu{number}" for number in range(GPUS)]
        for gpu in gpus:
            gpu.touch()
        # This machine's own name can be localhost.
        addresses = {host: f"{subnet}.1", "n1": f"{subnet}.11", "n2": f"{subnet}.12"}
        addresses |= {"localhost": "127.0.0.1"}
        files = {
            "slurm.conf": conf,
            "gres.conf": "".join(f"NodeName=n[1-2] Name=gpu File={gpu}\n" for gpu in gpus),
            "hosts": "".join(f"{address} {name}\n" for name, address in addresses.items()),
        }
        for name, text in files.items():
            (self.directory / name).write_text(text)
        key = self.directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))

    def _start_node(self, node: str, address: str) -> None:
        spaces = ("--fork", "--kill-child", "--pid", "--mount-proc", "--uts", "--ipc", "--mount", "--net")
        script = ("sh", "-euc", NODE, "node", node, str(self.directory / "hosts"))
        outer = self._start("unshare", *spaces, *script, stdout=subprocess.PIPE)
        assert outer.stdout is not None
        with outer.stdout:
            is_answer, _, _ = select.select([outer.stdout], [], [], START_S)
            if not is_answer or outer.stdout.readline() != b"ready\n":
                raise RuntimeError(f"{node} has not started in {START_S} s")
        (init,) = psutil.Process(outer.pid).children()
        self._inits[node] = init.pid
        cable = self._cable(node)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(init.pid))
        _ip("link", "set", cable, "master", self._bridge, "up")
        self.on(node, "ip", "address", "add", address, "dev", "eth0")
        self.on(node, "ip", "link", "set", "eth0", "up")

    def _start_munged(self) -> None:
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid"}
        files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        options = [f"--{option}={self.directory / name}" for option, name in files.items()]
        self._start("munged", "--foreground", "--force", *options)
        wait_until((self.directory / "munge.socket").exists, "munged to listen")

    def _start_slurmd(self, node: str) -> None:
        cores = sorted(os.sched_getaffinity(0))
        core = str(cores[self.nodes.index(node) % len(cores)])
        self._start(*self.command(node, "taskset", "--cpu-list", core, "slurmd", "-D", "-N", node))

    def _start(self, *words: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        """Start a daemon that dies together with this process. Its output goes to a log, or to `stdout`."""
        with (self.directory / "daemons.log").open("ab") as log:
            daemon = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=stdout or log,
                stderr=log,
                env={**os.environ, **self.environment},
                preexec_fn=die_with_parent,
            )
        self._daemons.append(daemon)
        return daemon

    def wait_until_idle(self) -> None:
        """Return when all nodes are idle."""
        wait_until(lambda: all(map(self._is_idle, self.nodes)), "all nodes to be idle")

    def _is_idle(self, node: str) -> bool:
        """Return whether a node is idle. A node that Slurm has drained is resumed.

        Slurm drains a node if a step on it did not end in spite of signals. A drained node gets no jobs until
        it is resumed.
        """
        state = self.state(node)
        if state.startswith("drain"):
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
        return state == "idle"

    def _cable(self, node: str) -> str:
        """Return the name of the network interface that connects a node to the bridge."""
        return f"{self._bridge}{node}"


def missing() -> str | None:
    """Return why no cluster can be started here, or None."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed: run `make slurm` as root"
    return None if os.geteuid() == 0 else "nodes are namespaces of Linux, which only root may make"


@contextlib.contextmanager
def slurm_cluster(slots: Sequence[int] = SLOTS) -> Iterator[Cluster]:
    """Start a separate cluster in a free slot, which takes some seconds, and remove it afterwards."""
    with _slot(slots) as slot:
        cluster = Cluster(slot)
        try:
            try:
                cluster.start()
            except Exception as error:
                error.add_note(cluster.logs())
                raise
            yield cluster
        finally:
            cluster.stop()


def processes_of(slot: int) -> list[psutil.Process]:
    """Return all processes of a cluster and of its jobs, except this process."""
    ours = str(Cluster(slot).directory / "slurm.conf")
    return _processes(
        lambda process: process.pid != os.getpid() and process.environ().get("SLURM_CONF") == ours
    )


def _processes(wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """Return the processes for which `wanted` is true. Ignore processes that end while they are examined."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if wanted(process):
                processes.append(process)
    return processes


def interfaces_of(slot: int) -> list[str]:
    """Return the network interfaces of a cluster on this machine."""
    ours = {f"pfslurm{slot}{node}" for node in ("", "n1", "n2")}
    return sorted(ours & set(os.listdir("/sys/class/net")))


def _remove(slot: int) -> None:
    """Remove all processes, interfaces and files of the cluster in a slot."""

    def is_empty() -> bool:
        left = processes_of(slot)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        return not left

    wait_until(is_empty, f"the processes of slot {slot} to die")
    # The interface of a node disappears on its own, soon after the node's last process has ended.
    for name in interfaces_of(slot):
        subprocess.run(["ip", "link", "delete", name], capture_output=True, check=False, timeout=START_S)
    wait_until(lambda: not interfaces_of(slot), f"the interfaces of slot {slot} to be gone")
    shutil.rmtree(Cluster(slot).directory, ignore_errors=True)


@contextlib.contextmanager
def _slot(slots: Sequence[int]) -> Iterator[int]:
    """Take the first free slot, and remove what an earlier, dead owner of the slot left.

    A slot is claimed with an abstract socket address: a name in the kernel that only one process can have.
    """
    for slot in slots:
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0perfsuite-slurm-{slot}")
            except OSError:  # another process has this slot
                continue
            if Cluster(slot).directory.exists() or interfaces_of(slot):
                _remove(slot)
            yield slot
            return
    raise RuntimeError(f"all slots have a running cluster: {slots}")


def _ip(*words: str) -> None:
    _output(("ip", *words), os.environ)


def _output(words: tuple[str, ...], environment: Mapping[str, str]) -> str:
    pipe = subprocess.PIPE
    return subprocess.run(words, env=environment, stdout=pipe, text=True, check=True, timeout=START_S).stdout
