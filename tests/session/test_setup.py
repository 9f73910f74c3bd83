from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from perfsuite import documents
from perfsuite.case import torch_build
from perfsuite.case.case import Case, Topology
from perfsuite.case.hardware import AllocatedNode, Allocation, Machine
from perfsuite.errors import FileError
from perfsuite.frameworks.ddp import DDP
from perfsuite.launch.local import LocalLauncher
from perfsuite.report.summary import reason
from perfsuite.results.session_file import NodePreflight, Preflight, SessionFile
from perfsuite.session.setup import missing_baselines
from tests.samples import make_case, make_gpu_machine, make_machine, make_run, never_run
from tests.session.making import HELD, Sessions


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "wait"),
        ({"wait_quiet_s": 0}, "again"),
        ({"allow_shared": True}, "stop"),
        ({"allow_shared": True, "wait_quiet_s": 0}, "stop"),
    ],
)
def test_options_decide_about_other_users(sessions: Sessions, options: dict[str, Any], expected: str) -> None:
    assert sessions.make(**options).setup.options.when_shared == expected


@pytest.mark.parametrize("strict", [frozenset[str](), frozenset({"improved"}), frozenset({"inconclusive"})])
def test_which_outcomes_fail(sessions: Sessions, strict: frozenset[str]) -> None:
    options = sessions.make(strict=strict).setup.options
    for outcome in ("regressed", "failed", "passed", "unhealthy", "improved", "inconclusive"):
        result = never_run().replace(verdict=never_run().verdict.replace(outcome=outcome))
        assert options.is_failing(result) is (outcome in {"regressed", "failed", *strict})


def test_chosen_baselines_must_exist(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert missing_baselines(tmp_path / "mine", tmp_path) is None
    assert missing_baselines(tmp_path / "baselines", tmp_path) is None, "accepting creates the default"
    there = tmp_path / "typo"
    assert f"because there is no directory {there}. " in str(missing_baselines(there, tmp_path))


def test_cpu_case_sees_gpu_machine_as_cpu_machine(sessions: Sessions) -> None:
    gpus = make_gpu_machine()
    ours = sessions.make()
    ours.setup.host.launcher = Mock(machine=lambda shared: gpus)
    assert ours.setup.host.machine_for(make_case(hardware="cpu")).device == "cpu"
    assert ours.setup.host.machine_for(make_case(hardware=("cpu", "h100"))) == gpus
    assert ours.setup.host.machine_for(make_case(hardware="a100")) == gpus
    assert "this machine is h100-80gb-sxm" in str(ours.skip_reason(make_case(hardware="a100")))
    assert ours.skip_reason(make_case(hardware="cpu")) is None


class Elsewhere(LocalLauncher):
    """A launcher whose jobs run on other machines."""

    runs_here = False


def test_other_users_matter_where_jobs_run_here(sessions: Sessions) -> None:
    here = sessions.make().setup
    there = sessions.make().setup
    there.host.launcher = Elsewhere()
    assert here.neighbours is not None
    assert there.neighbours is None


FOUR = Allocation(job_id="7", nodes=tuple(AllocatedNode(name=f"n{number}") for number in range(1, 5)))


def on_nodes(count: int, micro_batch: int = 1) -> Case:
    topology = Topology(nodes=count, processes_per_node=1)
    return make_case(framework=DDP(), topology=topology, micro_batch=micro_batch)


class Nodes:
    """A session on four nodes. Each set in `bad` has the names of the nodes that one preflight finds bad."""

    def __init__(self, sessions: Sessions, *bad: set[str], **options: Any) -> None:
        self.bad = list(bad)
        self.session = sessions.make(**options)
        self.session.setup.host.machine = make_machine().replace(nodes=4, allocation=FOUR)
        self.session.setup.host.launcher = Mock(check_nodes=self.check, runs_here=True)
        sessions.launch(make_run())

    def check(self, machine: Machine, nodes: int, directory: Path, *, names: list[str]) -> Preflight:
        assert names == ["n1", "n2", "n3", "n4"][:nodes]
        assert machine.allocation is None
        assert self.session.record.running is not None
        directory.mkdir(parents=True)
        bad = self.bad.pop(0)
        node_results = [
            NodePreflight(name=name, problems=("matmul 0.02 TFLOP/s",) if name in bad else ())
            for name in names
        ]
        return Preflight(
            started_at="2026-01-02T03:04:05+00:00",
            duration_s=1,
            machine=machine,
            nodes=tuple(node_results),
            directory=str(directory),
        )

    def outcomes(self, *counts: int) -> list[str]:
        cases = [on_nodes(count, number) for number, count in enumerate(counts, 1)]
        return [self.session.measure(case, f"test_it[{case.id}]").outcome for case in cases]


@pytest.mark.fault("node is bad")
def test_case_on_a_bad_node_is_not_launched(sessions: Sessions) -> None:
    nodes = Nodes(sessions, {"n3"}, {"n3"}, set())
    assert nodes.outcomes(3, 4, 2, 1) == ["unhealthy", "unhealthy", "passed", "passed"]
    launched = [result.case_id for result in nodes.session.record.results if result.runs]
    assert launched == [on_nodes(2, 3).id, on_nodes(1, 4).id]
    verdict = nodes.session.record.results[0].verdict
    assert (verdict.launches, verdict.reasons) == (0, ("n3 was bad in two preflights: matmul 0.02 TFLOP/s",))
    assert reason(nodes.session.record.results[0]) == "n3 was bad in two preflights: matmul 0.02 TFLOP/s"
    stored = nodes.session.record.session_file("complete")
    assert [len(preflight.nodes) for preflight in stored.preflights] == [3, 3, 2], (
        "a preflight of 4 nodes would find n3 again"
    )
    names = [Path(preflight.directory).name for preflight in stored.preflights]
    assert names == ["preflight-1", "preflight-2", "preflight-3"]
    assert documents.read(nodes.session.record.directory.results, SessionFile).preflights == stored.preflights
    assert nodes.session.record.running is None


def test_second_preflight_clears_a_node(sessions: Sessions) -> None:
    nodes = Nodes(sessions, {"n1"}, {"n2"})
    assert nodes.outcomes(2, 2) == ["passed", "passed"]
    assert nodes.bad == []
    assert any(
        "a node is only considered bad if both preflights find problems" in line for line in sessions.said
    )


def test_preflights_each_set_of_nodes_once(sessions: Sessions) -> None:
    nodes = Nodes(sessions, set(), set())
    assert nodes.outcomes(2, 4, 2, 4) == ["passed"] * 4
    assert nodes.bad == []
    assert [line.splitlines()[0] for line in sessions.said if "preflight" in line] == [
        f"perfsuite: preflight of {count} nodes ({make_machine().device_name}) in 1 s: none of them bad"
        for count in (2, 4)
    ]


def test_needs_no_preflight_without_training(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(sessions)
    assert nodes.outcomes(1) == ["passed"]
    simulated = make_case(topology=Topology(nodes=2, processes_per_node=1))
    assert nodes.session.measure(simulated, "test").outcome == "passed"
    assert Nodes(sessions, preflight=False).outcomes(4) == ["passed"]
    monkeypatch.setattr(torch_build, "installed", dict)
    assert Nodes(sessions).outcomes(2) == ["passed"]


def test_resumed_session_repeats_the_preflight(sessions: Sessions) -> None:
    first = Nodes(sessions, {"n2"}, {"n2"})
    assert first.outcomes(2) == ["unhealthy"]
    second = Nodes(sessions, set())
    second.session.record.earlier = first.session.record.session_file("interrupted")
    second.session.record.directory = first.session.record.directory
    assert second.outcomes(2) == ["passed"]
    preflights = second.session.record.session_file("complete").preflights
    assert [bool(preflight.problems) for preflight in preflights] == [True, True, False]
    assert Path(preflights[2].directory).name == "preflight-3"


def test_takes_the_lock_before_the_preflight(sessions: Sessions) -> None:
    nodes = Nodes(sessions)
    nodes.session.setup.lock = HELD
    with pytest.raises(FileError):
        nodes.outcomes(2)
