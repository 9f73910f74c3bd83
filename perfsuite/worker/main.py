"""One rank: build the case, run it under the clock, write `rank-N.json`. Never imports pytest.

Started by `perfsuite.launch.agent`, or by any torchrun as `python -m perfsuite.worker RUNDIR`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.case.fault import Fault
from perfsuite.errors import MismatchError, ScriptError
from perfsuite.frameworks.base import Ranks
from perfsuite.results.rank_report import Failure, FailureKind, RankReport
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import recorder as measure
from perfsuite.worker import stacks
from perfsuite.worker.faults import Injector

if TYPE_CHECKING:
    from perfsuite.case.case import Case
    from perfsuite.frameworks.base import Workload

from perfsuite.frameworks.base import NCCL_AFTER_S
from perfsuite.worker.leash import die_with_parent

RUN_DIR = "PERFSUITE_RUN_DIR"
"""Environment variable: where a process that somebody else started finds the case, and leaves its report."""
WAIT_S = 60
"""For the reports of the other ranks: one that leaves early breaks their connections."""
LEAVE_S = 30
"""To end in after everything is measured; then the kernel ends the process."""


def main(path: str) -> None:
    """Measure as the rank that the environment names. Writes its report on failure too."""
    run_dir = RunDir(Path(path))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    die_with_parent()
    stacks.listen(run_dir, rank)
    report = RankReport(rank=rank, world_size=world, host=socket.gethostname(), clock="none")
    try:
        asked = documents.read(run_dir.case, CaseFile)
        if asked.case.framework.needs_torch:
            report = _measure_torch(run_dir, asked, report)
        else:
            report = _measure_fake(run_dir, asked, report)
    except BaseException as error:
        documents.write(run_dir.rank(rank), report.replace(failure=failure_of(error, rank)))
        raise
    write_report(run_dir, asked, report)
    if asked.case.framework.needs_torch:
        _leave_process_group()


def write_report(run_dir: RunDir, asked: CaseFile, report: RankReport) -> None:
    """Write what a rank measured, or what an injected fault makes of it."""
    injector = injector_of(asked, report)
    changed = report if injector is None else injector.report(report)
    if changed is not None:
        documents.write(run_dir.rank(report.rank), changed)


def recorded(path: str) -> None:
    """`logged`, with torch elastic's error file as a second place that tells why a rank failed."""
    from torch.distributed.elastic.multiprocessing.errors import record

    # The fork server is the launcher's; processes that this rank starts (data loading) start as usual.
    multiprocessing.set_start_method(None, force=True)
    record(logged)(path)


def logged(path: str) -> None:
    """`main`, with everything that this rank writes in a file of its own."""
    log = os.open(
        RunDir(Path(path)).rank_log(int(os.environ["RANK"])), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        main(path)
    except Exception:
        traceback.print_exc()
        raise


def failure_of(error: BaseException, rank: int) -> Failure:
    """What a rank's report says of an error. Of a script that merely ended, what it wrote is told instead."""
    is_end = isinstance(error, ScriptError)
    return Failure(
        kind=_kind(error),
        message=str(error) if is_end else f"{type(error).__name__}: {error}".splitlines()[0],
        rank=rank,
        traceback=None if is_end else "".join(traceback.format_exception(error)),
        at=time.time(),
    )


def _kind(error: BaseException) -> FailureKind:
    if isinstance(error, MismatchError):
        return "mismatch"
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out_of_memory"
    if isinstance(error, RuntimeError) and re.search("can't allocate memory|out of memory", str(error)):
        return "out_of_memory"  # the CPU's allocator and the driver have no type of their own
    return "crash"


def recorder_of(
    asked: CaseFile, report: RankReport, timer: measure.Timer, **options: Any
) -> measure.Recorder:
    """The clock of a rank, with the fault that is asked for."""
    injector = injector_of(asked, report)
    return measure.Recorder(timer, before_end=None if injector is None else injector.before_end, **options)


def injector_of(asked: CaseFile, report: RankReport) -> Injector | None:
    """What carries out the fault that is asked for, in this rank."""
    if asked.inject is None:
        return None
    return Injector(Fault.parse(asked.inject), is_last_rank=report.rank == report.world_size - 1)


def _run(
    run_dir: RunDir, asked: CaseFile, workload: Workload, recorder: measure.Recorder, report: RankReport
) -> RankReport:
    """Train under the clock. The losses stay where they are until the clock has stopped."""
    tell_progress(run_dir, asked.case, workload, recorder, report)
    recorder.start()
    losses = workload.run(asked.case.total_steps)
    recorder.finish()
    return with_times(report, asked.case, workload, recorder).replace(
        loss=tuple(float(loss) for loss in losses),
        own_tokens_per_s=workload.own_tokens_per_s(),
    )


def tell_progress(
    run_dir: RunDir, case: Case, workload: Workload, recorder: measure.Recorder, report: RankReport
) -> None:
    """Let rank 0 write how far it is: that it begins now, then now and then.

    Then by a thread, because a shared file system may take its time, and the other ranks would wait for this
    one. What comes up while that thread is still writing is not told.
    """
    tokens = _tokens_per_step(case, workload)
    writer = threading.Thread()

    def tell(step: int) -> None:
        nonlocal writer
        if not writer.is_alive():
            writer = threading.Thread(target=write, args=(step,), daemon=True)
            writer.start()

    def write(step: int) -> None:
        with contextlib.suppress(OSError):  # of the file system: the report will tell
            run_dir.progress.write_text(f"{step} {tokens}")

    if report.rank == 0:
        write(0)
        recorder.on_progress = tell


def with_times(report: RankReport, case: Case, workload: Workload, recorder: measure.Recorder) -> RankReport:
    """The report with what the clock says, after `recorder.finish`."""
    return report.replace(
        clock=recorder.timer.name,
        tokens_per_step=_tokens_per_step(case, workload),
        step_s=tuple(recorder.step_s),
        probe_s=tuple(recorder.probe_s),
        wall_s=recorder.wall_s,
    )


def _tokens_per_step(case: Case, workload: Workload) -> int:
    sequences = case.micro_batch * case.gradient_accumulation * workload.data_parallel
    return sequences * case.sample_length


def _measure_fake(run_dir: RunDir, asked: CaseFile, report: RankReport) -> RankReport:
    from perfsuite.frameworks.fake import SimulatedTimer

    recorder = recorder_of(asked, report, SimulatedTimer())
    ranks = Ranks(
        rank=report.rank,
        world_size=report.world_size,
        device=None,
        directory=run_dir.path,
    )
    workload = asked.case.framework.build(asked.case, ranks, recorder)
    report = _run(run_dir, asked, workload, recorder, report)
    assert workload.memory is not None
    return report.replace(memory=workload.memory())


def _measure_torch(run_dir: RunDir, asked: CaseFile, report: RankReport) -> RankReport:
    import torch
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from perfsuite.worker import flops, software
    from perfsuite.worker.observe import Observer
    from perfsuite.worker.preflight import all_reduce_probe, device_probe

    case = asked.case
    device = _device(asked)
    on_gpu = device.type == "cuda"
    timer, probe = measure.clock_for(device)
    if not case.framework.own_process_group:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            device_id=device if on_gpu and case.framework.eager_nccl else None,
            timeout=timedelta(seconds=case.timeout_s + NCCL_AFTER_S) if on_gpu else None,
        )

    counted = flops.count_known(case)
    case.framework.load(case, device)
    _rehearse(torch, device)
    report = report.replace(device_probe=device_probe(device))
    memory = measure.CudaMemory(device) if on_gpu else measure.HostMemory()
    recorder = recorder_of(asked, report, timer, probe=probe, memory=memory)
    workload = case.framework.build(case, _ranks(run_dir, report, device), recorder)
    if case.framework.own_process_group:
        report = report.replace(device_probe={**report.device_probe, **all_reduce_probe(device)})
    observer = Observer(case, workload)
    hooks = [
        register_optimizer_step_pre_hook(observer.before_optimizer_step),
        register_optimizer_step_post_hook(recorder.after_optimizer_step),
    ]
    report = _run(run_dir, asked, workload, recorder, report)
    for hook in hooks:
        hook.remove()
    observed = observer.result()
    report = report.replace(
        memory=memory.read(),
        observed=observed,
        evidence=observer.evidence(),
        notes=software.compile_notes(),
    )
    try:
        observer.check(observed)
    except MismatchError as error:  # with all that was measured, and the same on every rank
        report = report.replace(failure=failure_of(error, report.rank))
    return report.replace(flops=counted)


def _leave_process_group() -> None:
    """Together with the other ranks. The report is written: the kernel ends a process that hangs here."""
    import torch.distributed as dist

    signal.alarm(WAIT_S + LEAVE_S)
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves early breaks the connections of the others
        dist.destroy_process_group()


def _ranks(run_dir: RunDir, report: RankReport, device: Any) -> Ranks:
    return Ranks(
        rank=report.rank,
        world_size=report.world_size,
        device=device,
        directory=run_dir.path,
    )


def _device(asked: CaseFile) -> Any:
    """This rank's `torch.device`, made the current one."""
    import torch

    if asked.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return torch.device("cpu")


def _rehearse(torch: Any, device: Any) -> None:
    """Let the libraries load and allocate what they keep, so that memory above this level is the model's."""
    weight = torch.nn.Parameter(torch.ones(8, 8, device=device))
    weight.square().sum().backward()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(weight.grad)
    torch.optim.AdamW([weight]).step()
