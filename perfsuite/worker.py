"""One rank: build the case, run it under the clock, write `rank-N.json`. Never imports pytest.

Started by `perfsuite.launcher`, or by any torchrun as `python -m perfsuite.worker RUNDIR`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from perfsuite import data, measure
from perfsuite.case import CaseFile
from perfsuite.errors import MismatchError
from perfsuite.framework import Ranks
from perfsuite.inject import Fault, Injector
from perfsuite.result import Failure, FailureKind, RankReport
from perfsuite.rundir import RunDir

if TYPE_CHECKING:
    from perfsuite.framework import Workload

ANCESTOR_PID = "PERFSUITE_ANCESTOR_PID"
"""Environment variable: the process without which this one has no purpose. The driver, for the launcher; the
launcher, for all that it starts."""


def main(path: str) -> None:
    """Measure as the rank that the environment names. Writes its report on failure too."""
    run_dir = RunDir(Path(path))
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    die_with_parent()
    report = RankReport(rank=rank, world_size=world, host=socket.gethostname(), clock="none")
    try:
        asked = data.read(run_dir.case, CaseFile)
        if asked.case.framework.needs_torch:
            report = _measure_torch(run_dir, asked, report)
        else:
            report = _measure_fake(run_dir, asked, report)
    except BaseException as error:
        data.write(run_dir.rank(rank), report.replace(failure=_failure(error, rank)))
        raise
    injector = _injector(asked, report)
    changed = report if injector is None else injector.report(report)
    if changed is not None:
        data.write(run_dir.rank(rank), changed)


def recorded(path: str) -> None:
    """`logged`, with torch elastic's error file as a second place that tells why a rank failed."""
    from torch.distributed.elastic.multiprocessing.errors import record

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
    except BaseException:
        traceback.print_exc()
        raise


def die_with_parent() -> None:
    """Be killed by the kernel when the parent process dies, however it dies (Linux)."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    ancestor = os.environ.get(ANCESTOR_PID)
    if ancestor is not None and not _is_alive(int(ancestor)):
        os._exit(1)  # it died before the kernel was asked


def _is_alive(pid: int) -> bool:
    """A zombie is dead: it only waits for its own parent to look."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _failure(error: BaseException, rank: int) -> Failure:
    return Failure(
        kind=_kind(error),
        message=f"{type(error).__name__}: {error}".splitlines()[0],
        rank=rank,
        traceback="".join(traceback.format_exception(error)),
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


def _recorder(asked: CaseFile, report: RankReport, timer: measure.Timer, **options: Any) -> measure.Recorder:
    injector = _injector(asked, report)
    return measure.Recorder(timer, before_end=None if injector is None else injector.before_end, **options)


def _injector(asked: CaseFile, report: RankReport) -> Injector | None:
    if asked.inject is None:
        return None
    return Injector(Fault.parse(asked.inject), is_last_rank=report.rank == report.world_size - 1)


def _run(
    run_dir: RunDir, asked: CaseFile, workload: Workload, recorder: measure.Recorder, report: RankReport
) -> RankReport:
    """Train under the clock. The losses stay where they are until the clock has stopped."""
    case = asked.case
    sequences = case.micro_batch * case.gradient_accumulation * workload.data_parallel
    tokens_per_step = sequences * case.sequence_length
    if report.rank == 0:
        recorder.on_progress = lambda step: run_dir.progress.write_text(f"{step} {tokens_per_step}")
    recorder.start()
    losses = workload.run(case.total_steps)
    recorder.finish()
    return report.replace(
        clock=recorder.timer.name,
        tokens_per_step=tokens_per_step,
        step_s=tuple(recorder.step_s),
        probe_s=tuple(recorder.probe_s),
        wall_s=recorder.wall_s,
        loss=tuple(float(loss) for loss in losses),
        own_tokens_per_s=workload.own_tokens_per_s(),
    )


def _measure_fake(run_dir: RunDir, asked: CaseFile, report: RankReport) -> RankReport:
    from perfsuite.frameworks.fake import SimulatedTimer

    recorder = _recorder(asked, report, SimulatedTimer())
    ranks = Ranks(rank=report.rank, local_rank=report.rank, world_size=report.world_size, device=None)
    workload = asked.case.framework.build(asked.case, ranks, recorder)
    report = _run(run_dir, asked, workload, recorder, report)
    assert workload.memory is not None
    return report.replace(memory=workload.memory())


def _measure_torch(run_dir: RunDir, asked: CaseFile, report: RankReport) -> RankReport:
    import torch
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from perfsuite import flops
    from perfsuite.device_probe import device_probe
    from perfsuite.observe import Observer

    case = asked.case
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = asked.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(local_rank)
        timer: measure.Timer = measure.CudaTimer()
        device, probe = torch.device("cuda", local_rank), None
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        timer = measure.HostTimer()
        device, probe = torch.device("cpu"), measure.cpu_probe()
    if not case.framework.own_process_group:
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)

    counted = flops.count(case.model, case.sequence_length) if case.model.config else None
    _rehearse(torch, device)
    report = report.replace(device_probe=device_probe(device))
    memory = measure.CudaMemory() if on_gpu else measure.HostMemory()
    recorder = _recorder(asked, report, timer, probe=probe, after_first_step=memory.reset_peak)
    ranks = Ranks(rank=report.rank, local_rank=local_rank, world_size=report.world_size, device=device)
    workload = case.framework.build(case, ranks, recorder)
    observer = Observer(case, workload)
    hooks = [
        register_optimizer_step_pre_hook(observer.before_optimizer_step),
        register_optimizer_step_post_hook(recorder.after_optimizer_step),
    ]
    report = _run(run_dir, asked, workload, recorder, report)
    for hook in hooks:
        hook.remove()
    observed = observer.result()
    report = report.replace(memory=memory.read(), observed=observed)
    try:
        observer.check(observed)
    except MismatchError as error:  # with all that was measured, and the same on every rank
        report = report.replace(failure=_failure(error, report.rank))
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves early breaks the connections of the others
        dist.destroy_process_group()
    return report.replace(flops=counted)


def _rehearse(torch: Any, device: Any) -> None:
    """Let the libraries load and allocate what they keep, so that memory above this level is the model's."""
    weight = torch.nn.Parameter(torch.ones(8, 8, device=device))
    weight.square().sum().backward()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(weight.grad)
    torch.optim.AdamW([weight]).step()


if __name__ == "__main__":
    main(sys.argv[1])
