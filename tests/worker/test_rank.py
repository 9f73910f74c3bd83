from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.errors import MAX_TOLD, ExtensionError, FileError, MismatchError, ScriptError
from perfsuite.frameworks.base import Ranks, Workload
from perfsuite.frameworks.fake import Fake
from perfsuite.results.rank_report import (
    UNREPORTED,
    Evidence,
    Failure,
    FailureKind,
    Memory,
    Observed,
    RankReport,
)
from perfsuite.results.run_dir import RunDir
from perfsuite.worker.observe import Observer
from perfsuite.worker.rank import Rank, empty_report, failure_of, write_failure
from perfsuite.worker.timers import SimulatedTimer
from tests.samples import make_case


def made(run_dir: RunDir, *, inject: str | None = None, rank: int = 0) -> Rank:
    """A rank of two of a simulated case."""
    request = CaseFile(case=make_case(framework=Fake()), device="cpu", inject=inject)
    return Rank(run_dir, request, empty_report(rank, 2))


def simulated(run_dir: RunDir, *, inject: str | None = None, rank: int = 0) -> Rank:
    """The same with its training job."""
    this = made(run_dir, inject=inject, rank=rank)
    this.build(SimulatedTimer())
    return this


def failure_in(run_dir: RunDir) -> Failure:
    failure = documents.read(run_dir.rank(0), RankReport).failure
    assert failure is not None
    return failure


def test_a_framework_builds_for_the_place_and_device_of_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []
    workload = Workload(run=lambda steps: [], data_parallel=2)

    def build(framework: Fake, *given: Any) -> Workload:
        built.extend(given)
        return workload

    monkeypatch.setattr(Fake, "build", build)
    rank = made(RunDir(tmp_path), rank=1)
    device = torch.device("cpu")
    rank.build(SimulatedTimer(), device=device)
    expected = Ranks(rank=1, world_size=2, device=device, directory=tmp_path)
    assert built == [rank.case, expected, rank.recorder]
    assert (rank.workload, rank.device) == (workload, device)


def test_a_report_holds_times_tokens_probe_and_memory(tmp_path: Path) -> None:
    rank = simulated(RunDir(tmp_path))
    rank.device_probe = {"matmul_tflops": 1.0}
    rank.start()
    losses = rank.workload.run(25)
    report = rank.finish()
    assert (report.rank, report.world_size, report.clock) == (0, 2, "simulated")
    assert len(report.step_s) == len(losses) == 25
    assert report.wall_s == pytest.approx(sum(report.step_s))
    assert report.tokens_per_step == 256, "of both ranks"
    assert report.memory == Memory(peak=100 * 10**6, method="simulated")
    assert report.device_probe == {"matmul_tflops": 1.0}
    assert (report.probe_s, report.observed, report.evidence, report.failure) == ((), None, None, None)


class Tracked:
    """Memory, an observer and a library's own log that say when they are read."""

    def __init__(self, rank: Rank, monkeypatch: pytest.MonkeyPatch, mismatch: str | None = None) -> None:
        self.order: list[str] = []
        finish = rank.recorder.finish

        def check(observer: Observer, observed: Observed) -> None:
            self.order.append("check")
            if mismatch is not None:
                raise MismatchError(mismatch)

        def saying(what: str, value: Any) -> Any:
            def say(*args: Any) -> Any:
                self.order.append(what)
                return value

            return say

        def stop() -> None:
            self.order.append("clock")
            finish()

        monkeypatch.setattr(rank.recorder, "finish", stop)
        self.observed = Observed(settings={"wrapper": "none"}, environment={})
        self.evidence = Evidence(data_parallel=2)
        monkeypatch.setattr(Observer, "result", saying("result", self.observed))
        monkeypatch.setattr(Observer, "evidence", saying("evidence", self.evidence))
        monkeypatch.setattr(Observer, "check", check)
        rank.workload = Workload(
            run=rank.workload.run,
            data_parallel=2,
            own_tokens_per_s=saying("own", 5.0),
            memory=saying("memory", Memory(peak=1, method="said")),
        )
        rank.observe()


def test_memory_is_read_when_the_clock_has_stopped_and_before_the_observer_takes_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = simulated(RunDir(tmp_path))
    tracked = Tracked(rank, monkeypatch)
    rank.notes = ["known before"]
    rank.start()
    report = rank.finish()
    assert tracked.order == ["clock", "memory", "own", "result", "evidence", "check"]
    assert (report.observed, report.evidence) == (tracked.observed, tracked.evidence)
    assert (report.own_tokens_per_s, report.notes[0], report.failure) == (5.0, "known before", None)


@pytest.mark.fault("something else runs")
def test_a_run_that_is_not_the_one_asked_for_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = simulated(RunDir(tmp_path), rank=1)
    tracked = Tracked(rank, monkeypatch, mismatch="wrapper: the case asks for 'FSDP'")
    rank.start()
    rank.workload.run(3)
    report = rank.finish()
    assert report.failure is not None
    assert (report.failure.kind, report.failure.rank) == ("mismatch", 1)
    assert len(report.step_s) == 3
    assert (report.observed, report.evidence) == (tracked.observed, tracked.evidence)


def test_without_counters_memory_is_unknown(tmp_path: Path) -> None:
    rank = simulated(RunDir(tmp_path))
    rank.workload = Workload(run=lambda steps: [], data_parallel=1)
    rank.start()
    assert rank.finish().memory is None


def test_an_injected_fault_lengthens_steps_and_changes_the_report_of_the_last_rank(tmp_path: Path) -> None:
    def steps(inject: str | None) -> list[float]:
        rank = simulated(RunDir(tmp_path), inject=inject)
        rank.start()
        rank.workload.run(5)
        rank.recorder.finish()
        return rank.recorder.step_s

    assert steps("slowdown=50%") == pytest.approx([1.5 * step for step in steps(None)])
    ranks = [made(RunDir(tmp_path), inject="missing-rank", rank=number) for number in (0, 1)]
    for rank in ranks:
        rank.write(rank.report)
    assert documents.read(RunDir(tmp_path).rank(0), RankReport) == ranks[0].report
    assert not RunDir(tmp_path).rank(1).exists()


def test_a_failure_is_written_without_figures(tmp_path: Path) -> None:
    failure = failure_of(ValueError("bad\nand more"), 1)
    write_failure(RunDir(tmp_path), empty_report(1, 2), failure)
    read = documents.read(RunDir(tmp_path).rank(1), RankReport)
    assert read.failure == failure
    assert (read.rank, read.world_size, read.clock, read.step_s) == (1, 2, "none", ())
    assert json.loads(RunDir(tmp_path).rank(1).read_text())["failure"]["message"] == "ValueError: bad"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MismatchError("m"), "mismatch"),
        (ExtensionError("x"), "error"),
        (MemoryError(), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (ValueError("out of memory"), "crash"),
        (RuntimeError("shapes"), "crash"),
        (OSError(errno.ENOSPC, "No space left on device"), "error"),
        (OSError(errno.EROFS, "Read-only file system"), "error"),
        (FileNotFoundError(errno.ENOENT, "No such file"), "crash"),
    ],
    ids=repr,
)
def test_each_error_has_its_kind(error: BaseException, kind: FailureKind) -> None:
    try:
        raise error
    except BaseException as raised:
        failure = failure_of(raised, 3)
    assert (failure.kind, failure.rank) == (kind, 3)
    assert failure.at > 0
    assert failure.traceback is not None
    assert "test_each_error_has_its_kind" in failure.traceback


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("no file \udcff"), "OSError: no file \\udcff"),
        (Unspeakable(), "Unspeakable: (its message cannot be shown: RuntimeError in __str__)"),
    ],
)
def test_an_error_that_cannot_be_written_as_it_is_keeps_its_cause(
    tmp_path: Path, error: Exception, message: str
) -> None:
    run_dir = RunDir(tmp_path)
    write_failure(run_dir, empty_report(0, 1), failure_of(error, 0))
    assert failure_in(run_dir).message == message


def test_a_very_long_message_is_cut(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_failure(run_dir, empty_report(0, 1), failure_of(RuntimeError("A" * 10**6 + "Z"), 0))
    assert run_dir.rank(0).stat().st_size < 3 * MAX_TOLD
    failure = failure_in(run_dir)
    assert failure.message.startswith("RuntimeError: AAA")
    assert str(failure.traceback).rstrip().endswith("AZ")


NO_DESCRIPTOR = """
import os, resource, sys
from pathlib import Path
from perfsuite.results.run_dir import RunDir
from perfsuite.worker.rank import empty_report, failure_of, keep_a_descriptor, write_failure
keep_a_descriptor()
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
report, failure = empty_report(0, 1), failure_of(ValueError("the cause"), 0)
try:
    while True:
        os.dup(0)
except OSError as error:
    assert error.errno == 24
write_failure(RunDir(Path(sys.argv[1])), report, failure)
"""


def test_a_rank_without_a_free_descriptor_reports_its_failure(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", NO_DESCRIPTOR, str(tmp_path)], check=True)
    assert failure_in(RunDir(tmp_path)).message == "ValueError: the cause"


def test_a_failure_that_no_report_can_take_is_told_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    write_failure(RunDir(tmp_path / "file"), empty_report(0, 1), failure_of(ValueError("the cause"), 0))
    said = capsys.readouterr().err
    assert said.startswith(f"{UNREPORTED} crash: ValueError: the cause (cannot write ")


def test_a_report_that_found_no_room_is_no_crash() -> None:
    error = FileError("cannot write rank-0.json")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert failure_of(error, 0).kind == "error"


def test_the_end_of_a_script_is_told_in_its_own_words_without_a_traceback() -> None:
    failure = failure_of(ScriptError("the script ended after 0 of 5 optimizer steps"), 0)
    assert failure.message == "the script ended after 0 of 5 optimizer steps"
    assert failure.traceback is None


def test_progress_is_written_beside_the_steps_and_a_slow_file_system_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path)
    begun, quick = threading.Semaphore(0), threading.Event()
    written: list[str] = []
    writers: list[threading.Thread] = []

    def write_text(file: Path, text: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            writers.append(threading.current_thread())
            begun.release()
            assert quick.wait(30)
        assert file == run_dir.progress
        written.append(text)

    def wait_for_writer() -> None:
        writers[-1].join(30)

    monkeypatch.setattr(Path, "write_text", write_text)
    rank = simulated(run_dir)
    rank.start()
    recorder = rank.recorder
    assert written == ["0 256"], "that training begins is known at once"
    recorder.on_progress(3)
    assert begun.acquire(timeout=30)
    recorder.on_progress(4)  # the writer is still at 3
    assert written == ["0 256"]
    quick.set()
    wait_for_writer()
    recorder.on_progress(9)
    assert begun.acquire(timeout=30)
    wait_for_writer()
    assert written == ["0 256", "3 256", "9 256"]
    quick.clear()
    recorder.on_progress(11)
    assert begun.acquire(timeout=30)
    threading.Timer(0.05, quick.set).start()
    recorder.on_progress(rank.case.total_steps)
    assert written[3:] == ["11 256", f"{rank.case.total_steps} 256"], "the last one is never left out"


def test_of_a_progress_that_cannot_be_written_nobody_dies(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.progress.mkdir()
    simulated(run_dir).start()
