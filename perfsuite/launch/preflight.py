"""Check the nodes of a session before its first launch: the performance of each node, and the links.

The preflight is a job whose ranks only probe the hardware. Nodes are compared with each other, so a problem
that all nodes share is not detected.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from perfsuite import documents
from perfsuite.analysis.cause import is_peer
from perfsuite.analysis.collect import agents_of, cause_of, reports_of
from perfsuite.analysis.figures import lowest_device_probe
from perfsuite.analysis.health import hardware_fault, machine_problems
from perfsuite.case.case import Case, CaseFile, Topology
from perfsuite.case.hardware import Machine
from perfsuite.errors import FileError
from perfsuite.frameworks.ddp import DDP
from perfsuite.launch.job import Job
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Health
from perfsuite.results.run_dir import RunDir
from perfsuite.results.session_file import NodePreflight, Preflight

TIMEOUT_S = 300.0  # seconds until the preflight is ended; torch loads slowly from a shared file system
GPU_SHARE = 0.75
"""A node is slow if its slowest GPU has less than this share of the best rate among the other nodes. The
speed of GPUs of the same model differs by up to 22% (arXiv 2208.11035)."""
CPU_SHARE = 0.4
"""The share for nodes without GPUs. It is lower than `GPU_SHARE`, because other processes might be using the
cores. 10 preflights ran on two equal nodes, with a load of 8 on two cores. In the worst of them, a node had
only 50% of the other node's copy rate, and 88% of the other node's matmul rate."""
LINK_SHARE = 0.5
"""A node's links are slow if its all-reduce with each neighbour has less than this share of the best rate
between two other nodes. This share is low, because paths differ in length."""
JUDGED = {"matmul_tflops": "matmul {:.3g} TFLOP/s", "copy_gb_s": "copy {:.3g} GB/s"}
"""Rates on which a single node is judged -> their wording in a sentence."""


def preflight(
    launch: Callable[[Job], Failure | None],
    machine: Machine,
    nodes: int,
    directory: Path,
    *,
    names: Sequence[str] = (),
) -> Preflight:
    """Probe the first `nodes` nodes with a job in `directory`: one rank per GPU or, without GPUs, per node.

    `launch` is the method of a launcher. `names` are the names of the nodes. Errors of the job become
    problems of the nodes. Errors that `launch` raises are not caught.
    """
    run_dir = RunDir(directory)
    case = _case(machine, nodes)
    documents.write(run_dir.case, CaseFile(case=case, device=machine.device, preflight=True))
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    began = time.monotonic()
    ended = launch(Job(run_dir=run_dir, case=case, machine=machine))
    probed_nodes, failure = _nodes(run_dir, case, names, ended)
    seen = Preflight(
        started_at=started_at,
        duration_s=round(time.monotonic() - began, 3),
        machine=machine,
        nodes=tuple(probed_nodes),
        failure=failure,
        directory=str(directory),
    )
    return judged(seen)


def _case(machine: Machine, nodes: int) -> Case:
    """Return a case for the preflight. Only its topology matters."""
    on_gpu = machine.device == "cuda"
    return Case(
        model="llama-tiny",
        framework=DDP(),
        sequence_length=64,
        micro_batch=1,
        topology=Topology(nodes=nodes, processes_per_node=machine.devices if on_gpu else 1),
        hardware="gpu" if on_gpu else "cpu",
        timeout_s=TIMEOUT_S,
    )


def _nodes(
    run_dir: RunDir, case: Case, names: Sequence[str], ended: Failure | None
) -> tuple[list[NodePreflight], str | None]:
    """Return the results of each node, and the reason for a failure that no particular node caused.

    `ended` is the result of the launcher.
    """
    count = case.topology.nodes
    per_node = case.topology.processes_per_node
    try:
        agents = agents_of(run_dir, case)
        reports = reports_of(run_dir, case)
    except FileError as error:
        agents = {}
        reports = {}
        ended = Failure(kind="missing_report", message=str(error))
    names = names or [agents[node].host if node in agents else f"node {node}" for node in range(count)]
    cause = cause_of(reports, agents, run_dir, case, ended)
    why = None if cause is None else f"{cause.kind} in the preflight: {cause.message} (see {run_dir.path})"
    failed = [rank for rank, report in reports.items() if report.failure and not is_peer(report.failure)]
    failed_nodes = {rank // per_node for rank in failed}
    failed_alike = len(failed_nodes) == count  # if all nodes failed, the cause is the software
    bad = [] if cause is None or failed_alike else _to_blame(cause, run_dir, case, names)
    nodes = []
    for node, name in enumerate(names):
        probed = [report for rank, report in reports.items() if rank // per_node == node]
        rates = lowest_device_probe(probed) if len(probed) == per_node else {}
        health = agents[node].health if node in agents else None
        problems = (why,) if why is not None and node in bad else ()
        nodes.append(NodePreflight(name=name, rates=rates, health=health, problems=problems))
    return nodes, None if bad else why


def _to_blame(cause: Failure, run_dir: RunDir, case: Case, names: Sequence[str]) -> list[int]:
    """Return the nodes that caused a failure. Empty if nothing points to particular nodes."""
    nodes = range(len(names))
    per_node = case.topology.processes_per_node
    if cause.rank is not None and cause.kind != "missing_report":
        return [cause.rank // per_node]
    silent = [rank for rank in range(case.topology.world_size) if not run_dir.rank(rank).exists()]
    signs = (
        [node for node in nodes if re.search(rf"\b{re.escape(names[node])}\b", cause.message)],
        [node for node in nodes if not run_dir.launch(node).exists()],
        sorted({rank // per_node for rank in silent}),
    )
    return next((suspects for suspects in signs if 0 < len(suspects) < len(names)), [])


def judged(preflight: Preflight) -> Preflight:
    """Add to each node of a preflight the problems that its rates and health show."""
    nodes = preflight.nodes
    links = {
        (number, (number + 1) % len(nodes)): node.rates["next_gb_s"]
        for number, node in enumerate(nodes)
        if "next_gb_s" in node.rates
    }
    seen = []
    for number, node in enumerate(nodes):
        alone = (*_slow(node, nodes, preflight.machine), *_gpu_problems(node.health, preflight.machine))
        seen.append(node.replace(problems=(*node.problems, *alone, *_slow_links(number, links))))
    return preflight.replace(nodes=tuple(seen))


def _slow(node: NodePreflight, nodes: Sequence[NodePreflight], machine: Machine) -> list[str]:
    share = GPU_SHARE if machine.device == "cuda" else CPU_SHARE
    problems = []
    for name, words in JUDGED.items():
        others = [
            (other.rates[name], other.name) for other in nodes if other is not node and name in other.rates
        ]
        best, whose = max(others, default=(0.0, ""))
        if node.rates.get(name, math.inf) < share * best:
            problems.append(
                f"{words.format(node.rates[name])}, {whose} has {best:.3g} "
                f"(healthy: at least {share:.0%} of this)"
            )
    return problems


def _slow_links(node: int, links: dict[tuple[int, int], float]) -> list[str]:
    """Return a problem if a node's all-reduces with both neighbours are far slower than other all-reduces.

    `links` are the rates of pairs of neighbours, in GB/s.
    """
    own = [rate for pair, rate in links.items() if node in pair]
    others = [rate for pair, rate in links.items() if node not in pair]
    if len(own) < 2 or not others or max(own) >= LINK_SHARE * max(others):
        return []
    rates = " and ".join(f"{rate:.3g}" for rate in own)
    beside = f"between other nodes: {max(others):.3g} GB/s (healthy: at least {LINK_SHARE:.0%} of this)"
    return [f"all-reduce with its neighbours: {rates} GB/s, {beside}"]


def _gpu_problems(health: Health | None, machine: Machine) -> list[str]:
    """Return the GPU problems of a node: those that affect launches, and memory that needs a reset."""
    if health is None or machine.device == "cpu":
        return []
    pending = [f"{card.name}: {reason}" for card in health.devices for reason in card.memory_pending]
    silent = [note for note in health.notes if hardware_fault(note) or "NVML does not answer" in note]
    return [*machine_problems(health, machine), *pending, *silent]
