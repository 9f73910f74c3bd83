"""Looks at nodes before the first launch of a session on them: what each of them can do, and their links.

A preflight is a job like a launch, with `CaseFile.preflight` set: its ranks only probe (`worker.node_probe`).
`perfsuite.analysis.bad_nodes` judges what they found. Driver side; imports neither torch nor pytest.
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
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run import LaunchFile
from perfsuite.results.run_dir import RunDir
from perfsuite.results.session_file import NodePreflight, Preflight

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
    seen = Preflight(
        started_at=started_at,
        duration_s=round(time.monotonic() - began, 3),
        machine=machine,
        nodes=tuple(found),
        failure=failure,
        directory=str(directory),
    )
    return judged(seen)


def _case(machine: Machine, nodes: int) -> Case:
    """A case of which only the topology counts."""
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
    count, per_node = case.topology.nodes, case.topology.processes_per_node
    try:
        agents = {n: documents.read(file, LaunchFile) for n, file in run_dir.all_launches(count).items()}
        ranks = {rank: run_dir.rank(rank) for rank in range(case.topology.world_size)}
        reports = {n: documents.read(file, RankReport) for n, file in ranks.items() if file.exists()}
    except FileError as error:
        agents, reports, ended = {}, {}, Failure(kind="missing_report", message=str(error))
    names = names or [agents[node].host if node in agents else f"node {node}" for node in range(count)]
    by_ranks = {rank: report.failure for rank, report in reports.items() if report.failure is not None}
    cause = first_cause(
        reports, [each for agent in agents.values() for each in agent.failures], run_dir, case
    )
    if cause is not None and ended is not None and (cause not in by_ranks.values() or is_peer(cause)):
        cause = ended  # ranks that are killed report secondary errors
    why = None if cause is None else f"{cause.kind} in the preflight: {cause.message} (see {run_dir.path})"
    failed_nodes = {rank // per_node for rank, failure in by_ranks.items() if not is_peer(failure)}
    failed_alike = len(failed_nodes) == count  # then it is the software
    bad = [] if cause is None or failed_alike else _to_blame(cause, run_dir, case, names)
    nodes = []
    for node, name in enumerate(names):
        probed = [report for rank, report in reports.items() if rank // per_node == node]
        nodes.append(
            NodePreflight(
                name=name,
                rates=lowest_device_probe(probed) if len(probed) == per_node else {},
                health=agents[node].health if node in agents else None,
                problems=(why,) if why is not None and node in bad else (),
            )
        )
    return nodes, None if bad else why


def _to_blame(cause: Failure, run_dir: RunDir, case: Case, names: Sequence[str]) -> list[int]:
    """The nodes that a failure speaks of: none where nothing tells one from the others."""
    nodes, per_node = range(len(names)), case.topology.processes_per_node
    if cause.rank is not None and cause.kind != "missing_report":
        return [cause.rank // per_node]
    silent = [rank for rank in range(case.topology.world_size) if not run_dir.rank(rank).exists()]
    signs = (
        [node for node in nodes if re.search(rf"\b{re.escape(names[node])}\b", cause.message)],
        [node for node in nodes if not run_dir.launch(node).exists()],
        sorted({rank // per_node for rank in silent}),
    )
    return next((found for found in signs if 0 < len(found) < len(names)), [])
