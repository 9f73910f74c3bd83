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
from perfsuite.worker.probes import node_probe
from perfsuite.worker.rank import LEAVE_S, WAIT_S, Rank, empty_report
from tests.fake_group import alone
from tests.samples import known, make_case, make_report
from tests.worker.loops import in_a_copy


class StopError(Exception):
    pass


def first_rank(directory: Path, **request: Any) -> Rank:
    """Write the request for a case on two ranks, and return the first rank."""
    request = {"case": make_case(framework=DDP()), "device": "cpu", **request}
    file = CaseFile(**request)
    documents.write(RunDir(directory).case, file)
    return Rank(RunDir(directory), file, empty_report(0, 2))


def test_a_rank_writes_before_it_meets_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alarms: list[int] = []
    monkeypatch.setattr(signal, "alarm", alarms.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", Mock(side_effect=StopError))
    run_dir = first_rank(tmp_path).run_dir
    with pytest.raises(StopError):
        worker.run_rank(run_dir, empty_report(0, 2), lambda rank: make_report())
    assert alarms == [WAIT_S + LEAVE_S], "otherwise the rank might hang here for ever"
    assert documents.read(run_dir.rank(0), RankReport) == make_report(), "no crash overwrites the report"


@pytest.mark.parametrize(("process_group", "device_id"), [("eager", torch.device("cuda", 1)), ("lazy", None)])
def test_nccl_connects_lazily_if_the_library_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process_group: Any, device_id: Any
) -> None:
    init_process_group = Mock()
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    rank = first_rank(tmp_path)
    rank.plan = LaunchPlan(process_group=process_group)
    worker._init_planned_process_group(rank, torch.device("cuda", 1))
    after_the_driver = timedelta(seconds=rank.case.timeout_s + 60)
    init_process_group.assert_called_once_with("nccl", device_id=device_id, timeout=after_the_driver)


def test_a_library_creates_its_own_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init_process_group = Mock()
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    rank = first_rank(tmp_path)
    rank.plan = LaunchPlan(process_group="library")
    worker._init_planned_process_group(rank, torch.device("cpu"))
    init_process_group.assert_not_called()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_backward_is_watched_in_loops_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library can clip with a function that perfsuite does not know.

    Then the norm before clipping is unknown.
    """
    original = Mock(spec=())
    original.__name__ = "backward"
    monkeypatch.setattr(torch.autograd, "backward", original)
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=StopError))
    rank = first_rank(tmp_path)

    def is_watched() -> bool:
        with pytest.raises(StopError):
            worker._measure(rank)
        return torch.autograd.backward is not original

    assert in_a_copy(is_watched)


def test_a_preflight_probes_and_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(device: Any, nodes: int, on_round: Any) -> dict[str, float]:
        assert (device, nodes) == (torch.device("cpu"), 2)
        assert rank.run_dir.progress.read_text() == "0 1"
        on_round(7)
        return {"matmul_tflops": 0.1, "next_gb_s": 2.0}

    case = make_case(framework=DDP(), topology=Topology(nodes=2, processes_per_node=1))
    rank = first_rank(tmp_path, case=case, preflight=True)
    monkeypatch.setattr(dist, "init_process_group", Mock())
    monkeypatch.setattr(node_probe, "node_probe", probe)
    report = worker._measure_as_requested(rank)
    assert report.device_probe == {"matmul_tflops": 0.1, "next_gb_s": 2.0}
    assert (report.step_s, report.failure) == ((), None)
    assert rank.run_dir.progress.read_text() == "7 1"


def timeout_s(group: dist.ProcessGroup) -> float:
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


@pytest.mark.parametrize(("device", "is_raised"), [("cuda", True), ("cpu", False)])
def test_groups_wait_longer_as_soon_as_they_exist(device: str, is_raised: bool) -> None:
    """A framework creates its groups while it builds, and the first step can compile for long."""
    rank = Mock(plan=LaunchPlan(process_group="lazy"), case=make_case(timeout_s=7200))
    observed_s: list[float] = []
    with alone():
        group = known(dist.group.WORLD)
        before_s = timeout_s(group)
        rank.observe = lambda: observed_s.append(timeout_s(group))
        worker._after_build(rank, torch.device(device))
    assert observed_s == [7200 + NCCL_AFTER_S if is_raised else before_s]


def test_all_groups_wait_as_long_as_the_driver() -> None:
    with alone():
        further = dist.new_group([0], timeout=timedelta(seconds=600))
        worker.wait_as_long_as_the_driver(make_case(timeout_s=3600))
        timeouts = [timeout_s(group) for group in (further, known(dist.group.WORLD))]
    assert timeouts == [3600 + NCCL_AFTER_S] * 2
