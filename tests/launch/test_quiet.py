import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from perfsuite.case.hardware import Machine
from perfsuite.errors import MachineError
from perfsuite.launch import quiet
from perfsuite.launch.quiet import QUIET_S, Cores, Neighbours, cores, gpu_users, name_of, others, who
from tests.node.fake_nvml import Nvml, using
from tests.samples import make_gpu_machine, make_machine

FIRST = 2**22
"""No Linux has a process with this id or a higher id. Such processes are named by their id only."""
OWN = FIRST
BUSY = FIRST + 4711
OTHER = FIRST + 4712


def at(seconds: float, steal_s: float = 0.0, **spent: float) -> Cores:
    """Return the use of two cores after this many seconds.

    `pN` is the CPU time that process `FIRST + N` has used.
    """
    by_process = {(FIRST + int(name[1:]), 1.0): seconds_spent for name, seconds_spent in spent.items()}
    cpu = {"processes_s": sum(spent.values()), "steal_s": steal_s, "total_s": 2 * seconds}
    return Cores(**cpu, by_process=by_process)


def nameless(number: int) -> str:
    """Return how the process `FIRST + number` is named."""
    return f"a process (pid {FIRST + number})"


# What other processes use

UNSEEN = "processes that have ended or are not visible here"
TRAIN = nameless(4711)
BUSY_BOTH = f"{TRAIN} 45%, {nameless(4712)} 5%"


@pytest.mark.parametrize(
    ("before", "after", "said", "named"),
    [
        (
            *(at(0, p4711=5, p4712=1), at(10, p4711=14, p4712=2)),
            *([f"50% of the cores' time used by {BUSY_BOTH}"], BUSY_BOTH),
        ),
        # CPU time of this process does not count as used by others.
        (at(0, p0=1, p4711=1), at(10, p0=11, p4711=4), [], f"{TRAIN} 15%"),
        (at(0, p4711=0), at(10, p4711=3.9), [], f"{TRAIN} 20%"),
        (at(0, p4711=0), at(10, p4711=4.1), [f"20% of the cores' time used by {TRAIN} 20%"], f"{TRAIN} 20%"),
        (at(0), at(10, steal_s=3), ["15% of the cores' time taken by the hypervisor"], UNSEEN),
        (at(1), at(1), [], UNSEEN),
        (at(0), at(10, p1=0.1), [], UNSEEN),
        # At most three processes are named. Processes that use almost nothing are not named.
        (
            *(at(0, p1=9), at(10, p1=9.1, p2=0.5, p3=1.2, p5=1, p6=0.8), []),
            f"{nameless(3)} 6%, {nameless(5)} 5%, {nameless(6)} 4%",
        ),
        # This is another process than the earlier one with the same id.
        (at(0, p4711=100), replace(at(10), by_process={(BUSY, 5.0): 2.0}), [], f"{TRAIN} 10%"),
    ],
)
def test_reports_who_uses_the_cores(before: Cores, after: Cores, said: list[str], named: str) -> None:
    assert others(before, after, OWN) == said
    assert who(before, after, OWN) == named


def test_names_a_running_user_of_the_cores() -> None:
    after = replace(at(10), by_process={(os.getpid(), 1.0): 5.0})
    assert who(at(0), after, OWN) == f"{name_of(os.getpid())} 25%"


def test_this_machines_cores_can_be_read() -> None:
    seen = cores()
    assert seen.total_s > seen.processes_s > 0
    assert any(pid == os.getpid() for pid, _ in seen.by_process)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["/usr/bin/python3", "-u", "/home/a/train.py", "--lr=1"], "python3 train.py"),
        (["python", "-m", "perfsuite.node.agent", "/runs"], "python perfsuite.node.agent"),
        (["bash", "-c", "secret words"], "bash"),
        (["python", "-X", "-uc", "import secret", "words"], "python"),
        (["x\x1b[2J" + "y" * 60], "x?[2J" + "y" * 35),
        ([], "kworker"),
        (None, "a process"),
    ],
)
def test_names_a_process_by_program_and_script(
    monkeypatch: pytest.MonkeyPatch, words: list[str] | None, name: str
) -> None:
    pid = BUSY if words is not None else 2**22  # no Linux has such a process id
    if words is not None:
        process = SimpleNamespace(cmdline=lambda: words, name=lambda: "kworker")
        monkeypatch.setattr(psutil, "Process", lambda pid: process)
    assert name_of(pid) == f"{name} (pid {pid})"


def card(holders: dict[int, int | None], *, unlisted: int = 0) -> dict[str, Any]:
    """Return a GPU. `holders` are its processes and their memory in MiB.

    NVML does not list the processes that hold the `unlisted` MiB.
    """
    listed = [using(pid, mib and mib * 2**20) for pid, mib in holders.items()]
    memory = SimpleNamespace(used=2**20 * (unlisted + sum(mib or 0 for mib in holders.values())))
    return {"nvmlDeviceGetComputeRunningProcesses": (listed,), "nvmlDeviceGetMemoryInfo": (memory,)}


@pytest.mark.parametrize(
    ("devices", "cards", "expected"),
    [
        (2, [card({}), card({BUSY: 3000, OTHER: 10})], ["2.94 GiB of GPU 1 held by {}, {}"]),
        (1, [card({}), card({BUSY: 3000})], []),
        (2, [card({BUSY: 256}), card({BUSY: None})], []),
        (1, [card({}, unlisted=1000)], []),  # held by processes in another container
        (1, [card({}, unlisted=70_000)], ["68.4 GiB of GPU 0 held by processes that NVML does not list"]),
    ],
)
def test_reports_who_holds_gpu_memory(
    monkeypatch: pytest.MonkeyPatch, devices: int, cards: list[dict[str, Any]], expected: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = Nvml(*cards)
    assert gpu_users(nvml, devices) == [line.format(TRAIN, nameless(4712)) for line in expected]
    assert nvml.initialised == 0


def test_names_a_running_user_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvml = Nvml(card({os.getpid(): 3000}))
    assert gpu_users(nvml, 1) == [f"2.93 GiB of GPU 0 held by {name_of(os.getpid())}"]


# Waiting


class World:
    """A machine on which other processes are busy until `until` seconds have passed.

    Sleeping is simulated.
    """

    def __init__(self, until: float, *, most_s: float = 60.0) -> None:
        self.now = 0.0
        self.until = until
        self.said: list[str] = []
        self.shown: list[str] = []
        self.neighbours = Neighbours(
            say=self.said.append,
            show=self.shown.append,
            most_s=most_s,
            see_cores=lambda: at(self.now, p4711=min(self.now, self.until)),
            see_gpus=lambda devices: ["3,000 MiB held by x"] if self.now <= self.until else [],
            clock=lambda: self.now,
            sleep=self.sleep,
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds


CPU = make_machine()
GPU = make_gpu_machine()
BUSY_CORES = f"50% of the cores' time used by {TRAIN} 50%"


@pytest.mark.parametrize(
    ("machine", "what", "reason"),
    [
        (CPU, "others use less than 20% of the cores' time", BUSY_CORES),
        (GPU, "no other process holds memory of the job's GPUs", "3,000 MiB held by x"),
    ],
    ids=["cpu", "gpu"],
)
def test_waits_for_some_seconds_of_quiet(machine: Machine, what: str, reason: str) -> None:
    world = World(20)
    assert world.neighbours.wait(machine, 2)
    assert world.now == 20 + QUIET_S
    waits = (
        f"waiting at most 60 s for a period of 5 s in which {what} "
        "(--perf-wait-quiet; for a command, --wait-quiet)"
    )
    assert world.said == [waits, "quiet after 25 s"]
    assert world.shown[0] == f"waiting for quiet, at most 59 s: {reason}"
    assert world.shown[-1] == "waiting for quiet, at most 36 s"


def test_busy_machine_is_waited_for_up_to_a_bound() -> None:
    world = World(1000)
    assert not world.neighbours.wait(CPU, 2)
    before = world.now
    assert 50 <= before <= 60
    assert not world.neighbours.wait(CPU, 2)
    assert world.now - before <= 1
    assert world.said[1:] == [f"not quiet within 60 s: {BUSY_CORES}", f"still not quiet: {BUSY_CORES}"]
    world.until = world.now
    assert world.neighbours.wait(CPU, 2)
    world.until = world.now + 30
    assert world.neighbours.wait(CPU, 2), "after a quiet machine was found, a new wait begins"


def test_short_bound_suffices_to_see_quiet() -> None:
    assert World(0, most_s=1).neighbours.wait(CPU, 2)


def test_sees_who_was_there_during_a_launch() -> None:
    world = World(1000)
    world.now = 10
    world.neighbours.launch_begins(CPU)
    world.now = 20
    assert world.neighbours.during_launch(CPU, 2) == f"{TRAIN} 50%"
    world.neighbours.launch_begins(GPU)
    assert world.neighbours.during_launch(GPU, 2) == "3,000 MiB held by x"
    world.until = 0
    assert world.neighbours.during_launch(GPU, 2) == "nobody is visible now"

    def see_gpus(devices: int) -> list[str]:
        raise MachineError("NVML does not answer")

    world.neighbours.see_gpus = see_gpus
    assert world.neighbours.during_launch(GPU, 2) == "unknown users (NVML does not answer)"
    assert not world.neighbours.wait(GPU, 2)


def test_unreadable_gpus_are_never_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(init=TypeError("no such struct")))
    with pytest.raises(MachineError, match="the users of the GPUs are unknown: TypeError: no such struct"):
        quiet.see_gpus(2, library="no-such-library.so")
