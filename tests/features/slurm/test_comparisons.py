"""Tests of this repository's published comparisons on several nodes.

Each has a twin, a tiny case that shares a model in the same way. The twin runs on two nodes of a real Slurm.
"""

from pathlib import Path

import pytest

from bench_cases.published import compare
from perfsuite import Case
from perfsuite.features.slurm.launcher import SlurmLauncher
from perfsuite.launch.requirements import unsupported
from perfsuite.measure import Launching, launch_once
from perfsuite.node.machine import detect_cpu
from perfsuite.results.store import BaselineStore
from perfsuite.verdict.exact import check
from tests.bench_cases.test_published import CASES, PUBLISHED
from tests.case_files import BENCH_CASES
from tests.features.slurm.allocation import Allocation
from tests.frameworks.removable import needs_every_framework
from tests.samples import make_result

TWINS = sorted(
    {row.two_node_twin for comparison in PUBLISHED for row in comparison.rows if row.two_node_twin in CASES}
)
REVIEWED = BaselineStore(BENCH_CASES.parent / "baselines", None)

pytestmark = pytest.mark.launch


@needs_every_framework
def test_each_way_to_share_a_model_has_a_twin() -> None:
    ways = {
        (CASES[name].framework.name, CASES[name].topology.nodes, CASES[name].topology.processes_per_node)
        for name in TWINS
    }
    assert ways == {
        ("accelerate", 2, 1),
        ("fsdp2", 2, 2),
        ("lightning", 2, 1),
        ("nanotron", 2, 2),
        ("torchtitan", 2, 1),
    }


@pytest.mark.parametrize(
    "case", [pytest.param(CASES[name], marks=pytest.mark.nightly) for name in TWINS], ids=TWINS
)
def test_twin_matches_its_review_and_table(case: Case, allocation: Allocation, tmp_path: Path) -> None:
    machine = detect_cpu("of two nodes").replace(nodes=2)
    reason = unsupported(case, machine)
    if reason is not None:
        pytest.skip(reason)  # torchtitan needs a newer torch than perfsuite does
    run = launch_once(case, machine, tmp_path / "run", Launching(launcher=SlurmLauncher()))
    assert run.failure is None, run.failure
    assert [node.name for node in run.nodes] == ["n1", "n2"]
    stored = REVIEWED.counts.find("cpu", case)
    assert stored is not None
    judged = check([run], stored.baseline)
    assert judged is not None
    assert (judged.outcome, judged.compared) == ("passed", True), judged
    rows = [
        cells
        for comparison in PUBLISHED
        for row, cells in zip(
            comparison.rows, compare(comparison, {case.id: make_result(run)}).rows, strict=True
        )
        if row.two_node_twin == case.id
    ]
    assert rows
    assert {cells[-1].partition(":")[0] for cells in rows} == {"on two nodes"}
    assert all("tokens/s" in cells[-1] for cells in rows)
