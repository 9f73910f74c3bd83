import dataclasses
import errno
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.errors import MAX_TEXT, ExtensionError, FileError, MismatchError, PrivateNameError
from perfsuite.frameworks.base import Workload
from perfsuite.frameworks.fake import Fake
from perfsuite.results.rank_report import Failure, FailureKind, Memory, Observed, RankEvidence, RankReport
from perfsuite.results.run_dir import RunDir
from perfsuite.worker.clock.timers import SimulatedTimer
from perfsuite.worker.observation import engines
from perfsuite.worker.rank import GRAPHS_UNKNOWN, Rank, empty_report, failure_of, write_failure
from tests.packages import Packages
from tests.samples import known, make_case
from tests.test_errors import Unspeakable
from tests.worker import motor


def made(directory: Path, *, inject: str | None = None, rank: int = 0) -> Rank:
    """Return one of the two ranks of a simulated case."""
    request = CaseFile(case=make_case(framework=Fake()), device="cpu", inject=inject)
    return Rank(RunDir(directory), request, empty_report(rank, 2))


def simulated(directory: Path, *, inject: str | None = None, rank: int = 0) -> Rank:
    """Return one of the two ranks with its training built."""
    this = made(directory, inject=inject, rank=rank)
    this.build(SimulatedTimer())
    return this


def test_report_has_times_tokens_probe_and_memory(tmp_path: Path) -> None:
    rank = simulated(tmp_path)
    rank.device_probe = {"matmul_tflops": 1.0}
    rank.start()
    losses = rank.workload.run(25)
    report = rank.finish()
    assert (report.rank, report.world_size, report.clock) == (0, 2, "simulated")
    assert len(report.step_s) == len(losses) == 25
    assert report.wall_s == pytest.approx(sum(report.step_s))
    assert report.tokens_per_step == 256, "these are the tokens of both ranks"
    assert report.memory == Memory(peak=100 * 10**6, method="simulated")
    assert report.device_probe == {"matmul_tflops": 1.0}
    assert (report.probe_s, report.observed, report.evidence, report.failure) == ((), None, None, None)
    rank.workload = Workload(run=lambda steps: [], data_parallel=1)
    assert rank.finish().memory is None


def test_looks_again_for_engines_when_training_begins(
    tmp_path: Path, packages: Packages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "attach", engines.watch, raising=False)
    motor.install_attaching(packages)
    rank = simulated(tmp_path)
    rank.plan = dataclasses.replace(rank.plan, needs_torch=True)
    engine = motor.driving().Driver
    assert not hasattr(engine.__init__, "is_watched")
    rank.start()
    assert hasattr(engine.__init__, "is_watched"), "engines are noticed before the first step"


def observer() -> Mock:
    """Return an observer of a training that matches its case."""
    observed = Observed(settings={"wrapper": "none"}, environment={})
    evidence = RankEvidence(data_parallel=2)
    return Mock(**{"result.return_value": observed, "evidence.return_value": evidence, "dtypes": {}})


def test_unknown_compilation_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = simulated(tmp_path)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace())
    rank.observer = observer()
    rank.start()
    rank.workload.run(3)
    report = rank.finish()
    assert report.failure is None
    assert GRAPHS_UNKNOWN in report.notes


@pytest.mark.fault("training differs from the case")
@pytest.mark.parametrize("mismatch", [None, "wrapper: the case asks for 'FSDP'"])
def test_reads_memory_after_clock_before_observer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mismatch: str | None
) -> None:
    """If a run differs from the case, the measured values are kept."""
    rank = simulated(tmp_path, rank=1)
    order = Mock()
    order.clock.side_effect = rank.recorder.finish
    order.memory.return_value = Memory(peak=1, method="said")
    order.own.return_value = 5.0
    order.attach_mock(observer(), "observer")
    order.observer.check.side_effect = None if mismatch is None else MismatchError(mismatch)
    monkeypatch.setattr(rank.recorder, "finish", order.clock)
    rank.workload = Workload(
        run=rank.workload.run, data_parallel=2, own_tokens_per_s=order.own, memory=order.memory
    )
    rank.observer = order.observer
    rank.notes = ["known before"]
    rank.start()
    rank.workload.run(3)
    report = rank.finish()
    calls = [name for name, _, _ in order.mock_calls]
    assert calls == ["clock", "memory", "own", "observer.result", "observer.evidence", "observer.check"]
    observed = order.observer.result.return_value
    assert known(report.observed).replace(code=None) == observed  # without the digest of this process's code
    assert report.evidence == order.observer.evidence.return_value
    assert (report.own_tokens_per_s, report.notes[0], len(report.step_s)) == (5.0, "known before", 3)
    failure = None if report.failure is None else (report.failure.kind, report.failure.rank)
    assert failure == (None if mismatch is None else ("mismatch", 1))


def test_injected_fault_changes_steps_and_last_rank(tmp_path: Path) -> None:
    def steps(inject: str | None) -> list[float]:
        rank = simulated(tmp_path, inject=inject)
        rank.start()
        rank.workload.run(9)
        rank.recorder.finish()
        return rank.recorder.step_s

    before = steps(None)
    now = steps("slowdown=50%")
    assert now[:3] == before[:3]
    assert now[3:] == pytest.approx([1.5 * step for step in before[3:]], rel=0.05)
    ranks = [made(tmp_path, inject="missing-rank", rank=number) for number in (0, 1)]
    ranks[0].write(ranks[0].report)
    assert not RunDir(tmp_path).injected.exists()
    ranks[1].write(ranks[1].report)
    assert documents.read(RunDir(tmp_path).rank(0), RankReport) == ranks[0].report
    assert not RunDir(tmp_path).rank(1).exists()
    assert RunDir(tmp_path).injected.exists()


def no_room() -> FileError:
    error = FileError("cannot write rank-0.json")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MismatchError("m"), "mismatch"),
        (ExtensionError("x"), "error"),
        (PrivateNameError("x"), "error"),
        (MemoryError(), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (ValueError("out of memory"), "crash"),
        (RuntimeError("shapes"), "crash"),
        (OSError(errno.ENOSPC, "No space left on device"), "error"),
        (OSError(errno.EROFS, "Read-only file system"), "error"),
        (no_room(), "error"),
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
    if kind == "mismatch":
        assert failure.traceback is None
    else:
        assert "test_each_error_has_its_kind" in known(failure.traceback)


REAL = "cannot import name 'is_fake' from 'torch'"
LAZY = "Failed to import models.llama because of the following error (look up to see its traceback):"


def raised_by(code: str) -> Failure:
    try:
        exec(code, {"LAZY": LAZY, "REAL": REAL})
    except Exception as error:
        return failure_of(error, 0)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError(LAZY + '\\n' + REAL) from error", f"RuntimeError: {LAZY} {REAL}"),
        ("raise RuntimeError(LAZY + '\\n' + REAL)", f"RuntimeError: {LAZY} {REAL}"),
        ("raise RuntimeError(LAZY) from error", f"RuntimeError: {LAZY[:-1]}: caused by ImportError: {REAL}"),
        (
            "raise ModuleNotFoundError('Could not import module Llama. Are its needs right?') from error",
            "ModuleNotFoundError: Could not import module Llama. Are its needs right?: caused by "
            f"ImportError: {REAL}",
        ),
        ("raise ImportError('no Llama')", f"ImportError: no Llama: caused by ImportError: {REAL}"),
        ("raise ImportError('no Llama') from None", "ImportError: no Llama"),
        ("raise ValueError('shapes')", "ValueError: shapes"),
    ],
)
def test_an_error_is_told_with_its_cause(code: str, message: str) -> None:
    failure = raised_by(f"try:\n    raise ImportError(REAL)\nexcept ImportError as error:\n    {code}\n")
    assert failure.message == message


NCCL = (
    "NCCL error in: /pytorch/NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details)"
    ", NCCL version 2.27.3\nncclSystemError: System call (e.g. socket, malloc) or external library call "
    "failed or device error. \nLast error:"
)
FULL = "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888), error: No space left (28)"
FIRST_LINE = NCCL.splitlines()[0]


@pytest.mark.parametrize(
    ("message", "kind", "end"),
    [
        (f"{NCCL}\n{FULL}\n", "crash", f": {FULL}"),
        (f"{NCCL} {FULL}", "crash", f": {FULL}"),
        (f"{NCCL}\n\nmore", "crash", ""),
        (f"{NCCL}\nException raised from f at x.cpp", "crash", ""),
        (
            f"{NCCL}\nCuda failure 2 'out of memory'",
            "out_of_memory",
            ": Cuda failure 2 'out of memory'. NCCL asked for this memory, which does not belong to torch's "
            "allocator",
        ),
    ],
)
def test_an_error_of_nccl_is_told_with_its_cause(message: str, kind: FailureKind, end: str) -> None:
    failure = failure_of(dist.DistBackendError(message), 0)
    assert (failure.kind, failure.message) == (kind, f"DistBackendError: {FIRST_LINE}{end}")


def test_the_cause_is_the_last_error_of_a_chain() -> None:
    inner = "try:\n        raise OSError('libcudart.so.13: cannot open')\n    except OSError as first:\n"
    code = f"try:\n    {inner}        raise ImportError('b') from first\nexcept ImportError as second:\n"
    message = raised_by(f"{code}    raise RuntimeError('a') from second\n").message
    assert message == "RuntimeError: a: caused by OSError: libcudart.so.13: cannot open"


@pytest.mark.parametrize(
    ("error", "message", "end"),
    [
        (ValueError("bad\nand more"), "ValueError: bad", "and more"),
        (OSError("no file \udcff"), "OSError: no file \\udcff", ""),
        (Unspeakable(), "Unspeakable: (its message cannot be shown: RuntimeError in __str__)", ""),
        (RuntimeError("A" * 10**6 + "Z"), "RuntimeError: AAA", "AZ"),
    ],
    ids=["of two lines", "a lone surrogate", "no message", "too long"],
)
def test_writes_even_unencodable_errors(tmp_path: Path, error: Exception, message: str, end: str) -> None:
    file = RunDir(tmp_path).rank(1)
    write_failure(RunDir(tmp_path), empty_report(1, 2), failure_of(error, 1))
    assert file.stat().st_size < 3 * MAX_TEXT
    read = documents.read(file, RankReport)
    assert (read.rank, read.world_size, read.clock, read.step_s) == (1, 2, "none", ())
    failure = known(read.failure)
    assert failure.message.startswith(message)
    assert "\n" not in failure.message
    assert str(failure.traceback).rstrip().endswith(end)


def test_a_slow_file_system_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Semaphore(0)
    quick = threading.Event()
    written: list[str] = []
    writers: list[threading.Thread] = []

    def write_text(file: Path, text: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            writers.append(threading.current_thread())
            begun.release()
            assert quick.wait(30)
        assert file == RunDir(tmp_path).progress
        written.append(text)

    monkeypatch.setattr(Path, "write_text", write_text)
    rank = simulated(tmp_path)
    rank.start()
    tell = rank.recorder.on_progress
    assert written == ["0 256"], "the beginning of the training is reported at once"
    tell(3)
    assert begun.acquire(timeout=30)
    tell(4)  # the writer is still at step 3
    assert written == ["0 256"]
    quick.set()
    writers[-1].join(30)
    tell(9)
    assert begun.acquire(timeout=30)
    writers[-1].join(30)
    assert written == ["0 256", "3 256", "9 256"]
    quick.clear()
    tell(11)
    assert begun.acquire(timeout=30)
    threading.Timer(0.05, quick.set).start()
    tell(rank.case.total_steps)
    assert written[3:] == ["11 256", f"{rank.case.total_steps} 256"], "the last step is never left out"


def test_unwritable_progress_ends_nobody(tmp_path: Path) -> None:
    RunDir(tmp_path).progress.mkdir()
    simulated(tmp_path).start()
