import signal
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from perfsuite import DDP, Topology, documents
from perfsuite.case.case import CaseFile
from perfsuite.frameworks.base import NCCL_AFTER_S, LaunchPlan
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import main as worker
from perfsuite.worker.clock import loaders, startup_clock
from perfsuite.worker.observation import engines
from perfsuite.worker.probes import node_probe
from perfsuite.worker.rank import LEAVE_S, WAIT_S, Rank, empty_report
from perfsuite.worker.spans import events
from tests.fake_group import alone
from tests.samples import make_case, make_report


class StopError(Exception):
    pass


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """Write the case of a rank. This process acts as the rank."""
    documents.write(RunDir(tmp_path).case, CaseFile(case=make_case(framework=DDP()), device="cpu"))
    return RunDir(tmp_path)


@pytest.fixture
def init_process_group(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Replace torch's function. A mock has every attribute, so it seems to be watched already."""
    init_process_group = Mock()
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    return init_process_group


def test_a_rank_writes_before_it_meets_the_others(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    alarms: list[int] = []
    monkeypatch.setattr(signal, "alarm", alarms.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", Mock(side_effect=StopError))
    with pytest.raises(StopError):
        worker.measure_rank(run_dir, empty_report(0, 2), measure=lambda rank: make_report())
    assert alarms == [WAIT_S + LEAVE_S], "otherwise the rank might hang here for ever"
    assert documents.read(run_dir.rank(0), RankReport) == make_report(), "no crash overwrites the report"


def rank_of(run_dir: RunDir, device: Any, plan: LaunchPlan | None = None) -> Rank:
    """Return the first of two ranks."""
    rank = Rank(run_dir, CaseFile(case=make_case(framework=DDP()), device=device), empty_report(0, 2))
    rank.plan = plan or rank.plan
    return rank


@pytest.mark.parametrize(("process_group", "device_id"), [("eager", torch.device("cuda", 1)), ("lazy", None)])
def test_nccl_connects_lazily_if_the_library_would(
    run_dir: RunDir, init_process_group: Mock, process_group: Any, device_id: Any
) -> None:
    rank = rank_of(run_dir, "cuda", LaunchPlan(process_group=process_group))
    worker._init_process_group(rank, torch.device("cuda", 1))
    after_the_driver = timedelta(seconds=rank.case.timeout_s + 60)
    init_process_group.assert_called_once_with("nccl", device_id=device_id, timeout=after_the_driver)


def test_leaves_the_process_group_to_the_library(run_dir: RunDir, init_process_group: Mock) -> None:
    rank = rank_of(run_dir, "cpu", LaunchPlan(process_group="library"))
    worker._init_process_group(rank, torch.device("cpu"))
    init_process_group.assert_not_called()


def test_a_preflight_connects_its_ranks_at_once(run_dir: RunDir, init_process_group: Mock) -> None:
    rank = rank_of(run_dir, "cuda", LaunchPlan(process_group="lazy"))
    rank.request = rank.request.replace(preflight=True)
    worker._init_process_group(rank, torch.device("cuda", 1))
    assert init_process_group.call_args.kwargs["device_id"] == torch.device("cuda", 1)


def test_backward_is_watched_in_loops_of_ours(
    run_dir: RunDir, init_process_group: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library can clip with a function that perfsuite does not know.

    Then the norm before clipping is unknown.
    """
    original = Mock(spec=())
    original.__name__ = "backward"
    monkeypatch.setattr(torch.autograd, "backward", original)
    monkeypatch.setattr(startup_clock, "_clock", None)  # importing `node.preload` started one
    # These hooks cannot be undone in this process, and later tests would have them as well.
    for hooks in (engines, events, loaders):
        monkeypatch.setattr(hooks, "watch", lambda *_: None)
    init_process_group.side_effect = StopError
    with pytest.raises(StopError):
        worker._measure(rank_of(run_dir, "cpu"))
    assert torch.autograd.backward is not original


@pytest.mark.usefixtures("init_process_group")
def test_a_preflight_probes_and_trains_nothing(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(device: Any, nodes: int, on_round: Any) -> dict[str, float]:
        assert (device, nodes) == (torch.device("cpu"), 2)
        assert run_dir.progress.read_text() == "0 1"
        on_round(7)
        return {"matmul_tflops": 0.1, "next_gb_s": 2.0}

    case = make_case(framework=DDP(), topology=Topology(nodes=2, processes_per_node=1))
    documents.write(run_dir.case, CaseFile(case=case, device="cpu", preflight=True))
    monkeypatch.setattr(node_probe, "node_probe", probe)
    monkeypatch.setattr(signal, "alarm", lambda seconds: None)
    worker.measure_rank(run_dir, empty_report(0, 2), measure=worker._measured)
    report = documents.read(run_dir.rank(0), RankReport)
    assert report.device_probe == {"matmul_tflops": 0.1, "next_gb_s": 2.0}
    assert (report.step_s, report.failure) == ((), None)
    assert run_dir.progress.read_text() == "7 1"


def timeouts_s(*groups: Any) -> list[float]:
    """Return how long each group waits for its ranks."""
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return [backend.options._timeout.total_seconds() for backend in backends]


@pytest.mark.parametrize(("device", "waits_longer"), [("cuda", True), ("cpu", False)])
def test_groups_wait_longer_as_soon_as_they_exist(device: str, waits_longer: bool) -> None:
    """A framework creates its groups while it builds, and the first step can compile for long."""
    rank = Mock(plan=LaunchPlan(process_group="lazy"), case=make_case(timeout_s=3600))
    with alone():
        before = timeouts_s(dist.group.WORLD)
        seen: list[float] = []
        rank.observe.side_effect = lambda: seen.extend(timeouts_s(dist.group.WORLD))
        worker._after_build(rank, torch.device(device))
    assert seen == ([3600 + NCCL_AFTER_S] if waits_longer else before)


def test_all_groups_wait_as_long_as_the_driver() -> None:
    with alone():
        further = dist.new_group([0], timeout=timedelta(seconds=600))
        worker.wait_as_long_as_the_driver(make_case(timeout_s=3600))
        assert timeouts_s(further, dist.group.WORLD) == [3600 + NCCL_AFTER_S] * 2
