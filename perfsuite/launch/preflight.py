"""Looks at nodes before the first launch of a session on them: what each of them can do, and their links.

A preflight is a job like a launch: the same launcher, agents and ranks, with `CaseFile.preflight` set. Its
ranks train nothing, they probe (`perfsuite.worker.node_probe.node_probe`). What that means is judged by
`perfsuite.analysis.bad_nodes`. Driver side; imports neither torch nor pytest.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from perfsuite import documents
from perfsuite.analysis.bad_nodes import judged
from perfsuite.analysis.cause import first_cause, is_peer
from perfsuite.analysis.figures import lowest_device_probe
from perfsuite.case.case import Case, CaseFile, Topology
from perfsuite.case.hardware import Machine
from perfsuite.errors import FileError
from perfsuite.frameworks.ddp import DDP
from perfsuite.launch.base import Job, Launcher
from perfsuite.results.preflight import NodePreflight, Preflight
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run import LaunchFile
from perfsuite.results.run_dir import RunDir

TIMEOUT_S = 300.0
"""Seconds after which a preflight is ended: importing torch from a shared file system takes long."""


def preflight(
    launcher: Launcher, machine: Machine, nodes: int, directory: Path, *, names: Sequence[str] = ()
) -> Preflight:
    """Probe the first nodes, each with one rank per GPU, or one on all its cores.

    `names` are those of the nodes, if they are known before. All files of the preflight are in `directory`.
    What goes wrong is a problem of the nodes, and no error, but for what `Launcher.launch` raises.
    """
    run_dir = RunDir(directory)
    case = _case(machine, nodes)
    documents.write(run_dir.case, CaseFile(case=case, device=machine.device, preflight=True))
    started_at, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    ended = launcher.launch(Job(run_dir=run_dir, case=case, machine=machine))
    found, failure = _nodes(run_dir, case, names, ended)
    return judged(
        Preflight(
            started_at=started_at,
            duration_s=round(time.monotonic() - began, 3),
            machine=machine,
            nodes=tuple(found),
            failure=failure,
            directory=str(directory),
        )
    )


def _case(machine: Machine, nodes: int) -> Case:
    """A case of which only the topology counts: every rank leaves the rest alone."""
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
    """What each node left, and a failure that is no node's fault. `ended` is what the launcher says."""
    count = case.topology.nodes
    try:
        agents, reports = _written(run_dir, case)
    except FileError as error:
        agents, reports, ended = {}, {}, Failure(kind="missing_report", message=str(error))
    names = names or [agents[node].host if node in agents else f"node {node}" for node in range(count)]
    cause = _cause(run_dir, case, agents, reports, ended)
    why = None if cause is None else f"{cause.kind} in the preflight: {cause.message} (see {run_dir.path})"
    own = {rank for rank, each in reports.items() if each.failure is not None and not is_peer(each.failure)}
    failed_alike = all(own & set(_ranks(node, case)) for node in range(count))  # then it is the software
    bad = [] if cause is None or failed_alike else _to_blame(cause, run_dir, case, names)
    nodes = [
        NodePreflight(
            name=name,
            rates=_rates([reports[rank] for rank in _ranks(node, case) if rank in reports], case),
            health=agents[node].health if node in agents else None,
            problems=(why,) if why is not None and node in bad else (),
        )
        for node, name in enumerate(names)
    ]
    return nodes, None if bad else why


def _written(run_dir: RunDir, case: Case) -> tuple[dict[int, LaunchFile], dict[int, RankReport]]:
    """Read what agents and ranks have written, by their numbers. Raises `FileError` for a bad file."""
    agents = {node: run_dir.launch(node) for node in range(case.topology.nodes)}
    ranks = {rank: run_dir.rank(rank) for rank in range(case.topology.world_size)}
    return (
        {node: documents.read(file, LaunchFile) for node, file in agents.items() if file.exists()},
        {rank: documents.read(file, RankReport) for rank, file in ranks.items() if file.exists()},
    )


def _rates(reports: list[RankReport], case: Case) -> dict[str, float]:
    """The rates of a node's slowest rank; empty if a rank did not report."""
    return lowest_device_probe(reports) if len(reports) == case.topology.processes_per_node else {}


def _ranks(node: int, case: Case) -> range:
    per_node = case.topology.processes_per_node
    return range(node * per_node, (node + 1) * per_node)


def _cause(
    run_dir: RunDir,
    case: Case,
    agents: dict[int, LaunchFile],
    reports: dict[int, RankReport],
    ended: Failure | None,
) -> Failure | None:
    """Why the preflight failed; None if every rank has probed."""
    by_agents = [failure for agent in agents.values() for failure in agent.failures]
    cause = first_cause(reports, by_agents, run_dir, case)
    by_ranks = [report.failure for report in reports.values() if report.failure is not None]
    if cause is not None and ended is not None and (cause not in by_ranks or is_peer(cause)):
        return ended  # ranks that are killed report secondary errors
    return cause


def _to_blame(cause: Failure, run_dir: RunDir, case: Case, names: Sequence[str]) -> list[int]:
    """The nodes that a failure speaks of: none where nothing tells one from the others."""
    nodes = range(len(names))
    if cause.rank is not None and cause.kind != "missing_report":
        return [cause.rank // case.topology.processes_per_node]
    signs = (
        [node for node in nodes if re.search(rf"\b{re.escape(names[node])}\b", cause.message)],
        [node for node in nodes if not run_dir.launch(node).exists()],
        [node for node in nodes if not all(run_dir.rank(rank).exists() for rank in _ranks(node, case))],
    )
    return next((found for found in signs if 0 < len(found) < len(names)), [])
