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
from perfsuite.worker import flight_recorder, leash
from perfsuite.worker import main as worker
from perfsuite.worker.clock import loaders, startup_clock
from perfsuite.worker.counting import loader_workers
from perfsuite.worker.observation import engines
from perfsuite.worker.probes import node_probe
from perfsuite.worker.rank import LEAVE_S, WAIT_S, Rank
from perfsuite.worker.spans import events
from tests.fake_group import alone
from tests.samples import known, make_case, make_report


class StopError(Exception):
    pass


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Write the case of a rank. This process acts as the rank, but is not tied to its parent."""
    documents.write(RunDir(tmp_path).case, CaseFile(case=make_case(framework=DDP()), device="cpu"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(leash, "die_with_parent", lambda: None)
    monkeypatch.setattr(leash, "listen", lambda run_dir, rank: None)
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # a rank replaces this function
    monkeypatch.setattr(startup_clock, "_clock", None)  # importing `node.preload` started one
    # These hooks cannot be undone in this process, and later tests would have them as well.
    for hooks in (engines, events, flight_recorder, loader_workers, loaders):
        monkeypatch.setattr(hooks, "watch", lambda *_: None)
    return RunDir(tmp_path)


def test_a_rank_writes_before_it_meets_the_others(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    alarms: list[int] = []
    monkeypatch.setattr(worker, "_measure", lambda rank: make_report())
    monkeypatch.setattr(signal, "alarm", alarms.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", Mock(side_effect=StopError))
    with pytest.raises(StopError):
        worker.main(str(run_dir.path))
    assert alarms == [WAIT_S + LEAVE_S], "otherwise the rank might hang here for ever"
    assert documents.read(run_dir.rank(0), RankReport) == make_report(), "no crash overwrites the report"


@pytest.mark.parametrize(("process_group", "device_id"), [("eager", torch.device("cuda", 1)), ("lazy", None)])
def test_nccl_connects_lazily_if_the_library_would(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, process_group: Any, device_id: Any
) -> None:
    monkeypatch.setattr(DDP, "plan", lambda self, case: LaunchPlan(process_group=process_group))
    init_process_group = Mock(side_effect=StopError)
    monkeypatch.setattr(worker, "_device", lambda request: torch.device("cuda", 1))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    case = CaseFile(case=make_case(framework=DDP()), device="cuda")
    with pytest.raises(StopError):
        worker._measure(Rank(run_dir, case, make_report()))
    after_the_driver = timedelta(seconds=case.case.timeout_s + 60)
    init_process_group.assert_called_once_with("nccl", device_id=device_id, timeout=after_the_driver)


def test_backward_is_watched_in_loops_of_ours(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library can clip with a function that perfsuite does not know.

    Then the norm before clipping is unknown.
    """
    original = Mock(spec=())
    original.__name__ = "backward"
    monkeypatch.setattr(torch.autograd, "backward", original)
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=StopError))
    case = CaseFile(case=make_case(framework=DDP()), device="cpu")
    with pytest.raises(StopError):
        worker._measure(Rank(run_dir, case, make_report()))
    assert torch.autograd.backward is not original


def test_a_preflight_probes_and_trains_nothing(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(device: Any, nodes: int, on_round: Any) -> dict[str, float]:
        assert (device, nodes) == (torch.device("cpu"), 2)
        assert run_dir.progress.read_text() == "0 1"
        on_round(7)
        return {"matmul_tflops": 0.1, "next_gb_s": 2.0}

    case = make_case(framework=DDP(), topology=Topology(nodes=2, processes_per_node=1))
    documents.write(run_dir.case, CaseFile(case=case, device="cpu", preflight=True))
    monkeypatch.setattr(worker, "_init_process_group", lambda case, device, connects_at_once: None)
    monkeypatch.setattr(worker, "_measure", lambda rank: pytest.fail("trained"))
    monkeypatch.setattr(node_probe, "node_probe", probe)
    monkeypatch.setattr(signal, "alarm", lambda seconds: None)
    worker.main(str(run_dir.path))
    report = documents.read(run_dir.rank(0), RankReport)
    assert report.device_probe == {"matmul_tflops": 0.1, "next_gb_s": 2.0}
    assert (report.step_s, report.failure) == ((), None)
    assert run_dir.progress.read_text() == "7 1"


@pytest.mark.parametrize(("device", "expected"), [("cuda", ["wait", "observe"]), ("cpu", ["observe"])])
def test_groups_wait_longer_as_soon_as_they_exist(
    monkeypatch: pytest.MonkeyPatch, device: str, expected: list[str]
) -> None:
    """A framework creates its groups while it builds, and the first step can compile for long."""
    done: list[str] = []
    rank = Mock(plan=LaunchPlan(process_group="lazy"))
    rank.observe = lambda: done.append("observe")
    monkeypatch.setattr(worker, "wait_as_long_as_the_driver", lambda case: done.append("wait"))
    worker._after_build(rank, torch.device(device))
    assert done == expected


def test_all_groups_wait_as_long_as_the_driver() -> None:
    with alone():
        further = dist.new_group([0], timeout=timedelta(seconds=600))
        worker.wait_as_long_as_the_driver(make_case(timeout_s=3600))
        groups = [further, known(dist.group.WORLD)]
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        timeouts = [backend.options._timeout.total_seconds() for backend in backends]
    assert timeouts == [3600 + NCCL_AFTER_S] * 2
