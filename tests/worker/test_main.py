from __future__ import annotations

import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.frameworks.base import Framework, Workload
from perfsuite.frameworks.ddp import DDP
from perfsuite.frameworks.fake import SimulatedTimer
from perfsuite.frameworks.nanotron import Nanotron
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import leash, stacks
from perfsuite.worker import main as worker
from perfsuite.worker.recorder import Recorder
from tests.samples import make_case, make_report


class StopError(Exception):
    pass


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Of a case for a rank that this process stands for, unless it would be tied to its parent for good."""
    documents.write(RunDir(tmp_path).case, CaseFile(case=make_case(framework=DDP()), device="cpu"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(leash, "die_with_parent", lambda: None)
    monkeypatch.setattr(stacks, "listen", lambda run_dir, rank: None)
    return RunDir(tmp_path)


def test_a_measurement_is_written_before_the_ranks_part(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms: list[int] = []

    def breaks() -> None:
        assert alarms == [worker.WAIT_S + worker.LEAVE_S], "or it might hang here for ever"
        assert documents.read(run_dir.rank(0), RankReport) == make_report()
        raise StopError

    monkeypatch.setattr(worker, "_measure_torch", lambda *args: make_report())
    monkeypatch.setattr(signal, "alarm", alarms.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", breaks)
    with pytest.raises(StopError):
        worker.main(str(run_dir.path))
    assert documents.read(run_dir.rank(0), RankReport) == make_report(), "no crash takes its place"


@pytest.mark.parametrize(
    ("framework", "device_id"),
    [(DDP(), torch.device("cuda", 1)), (Nanotron(dp=1, pp=2), None)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_nccl_connects_lazily_where_the_library_would_have_it_so(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, framework: Framework, device_id: Any
) -> None:
    asked: list[Any] = []

    def init_process_group(backend: str, device_id: Any, timeout: timedelta) -> None:
        asked.extend([backend, device_id, timeout])
        raise StopError

    monkeypatch.setattr(worker, "_device", lambda asked: torch.device("cuda", 1))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    case = CaseFile(case=make_case(framework=framework), device="cuda")
    with pytest.raises(StopError):
        worker._measure_torch(run_dir, case, make_report())
    after_the_driver = timedelta(seconds=case.case.timeout_s + 60)
    assert asked == ["nccl", device_id, after_the_driver]


def test_progress_is_written_beside_the_steps_and_a_slow_file_system_holds_nobody_up(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, quick = threading.Semaphore(0), threading.Event()
    written: list[str] = []

    def write_text(file: Path, text: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.release()
            assert quick.wait(30)
        assert file == run_dir.progress
        written.append(text)

    monkeypatch.setattr(Path, "write_text", write_text)
    recorder = Recorder(SimulatedTimer())
    workload = Workload(run=lambda steps: [], data_parallel=2)
    worker.tell_progress(run_dir, make_case(), workload, recorder, make_report())
    assert written == ["0 256"], "that training begins is known at once"
    recorder.on_progress(3)
    assert begun.acquire(timeout=30)
    recorder.on_progress(4)  # the writer is still at 3
    assert written == ["0 256"]
    quick.set()
    for thread in threading.enumerate():
        if thread.daemon and thread is not threading.current_thread():
            thread.join(30)
    recorder.on_progress(9)
    assert begun.acquire(timeout=30)
    for thread in threading.enumerate():
        if thread.daemon and thread is not threading.current_thread():
            thread.join(30)
    assert written == ["0 256", "3 256", "9 256"]


def test_of_a_progress_that_cannot_be_written_nobody_dies(run_dir: RunDir) -> None:
    run_dir.progress.mkdir()
    recorder = Recorder(SimulatedTimer())
    workload = Workload(run=lambda steps: [], data_parallel=2)
    worker.tell_progress(run_dir, make_case(), workload, recorder, make_report())
