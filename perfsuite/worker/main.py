"""Run one rank of our own training loops: build the case, train under the clock, and write `rank-N.json`."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from perfsuite import documents
from perfsuite.case.case import Case, CaseFile
from perfsuite.errors import PrivateNameError
from perfsuite.frameworks.base import NCCL_AFTER_S
from perfsuite.frameworks.common.float8 import with_float8
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import leash
from perfsuite.worker.clock import startup_clock
from perfsuite.worker.clock.profiling import ProfileTaken
from perfsuite.worker.clock.startup_clock import PERFSUITE, PERFSUITE_BUILDS, PROCESS_GROUP, Part
from perfsuite.worker.clock.timers import SimulatedTimer, clock_for
from perfsuite.worker.counting.flops import count_known
from perfsuite.worker.rank import LEAVE_S, WAIT_S, Rank, empty_report, failure_of, write_failure


def main(path: str) -> None:
    """Measure as rank RANK of WORLD_SIZE. If this fails, report the failure and raise the error."""
    run_dir = RunDir(Path(path))
    report = empty_report()
    leash.die_with_parent()
    leash.listen(run_dir, report.rank)
    measure_rank(run_dir, report, measure=_measured)


def measure_rank(run_dir: RunDir, report: RankReport, *, measure: Callable[[Rank], RankReport]) -> None:
    """Measure the rank that `report` identifies, and write its report, also if measuring fails.

    The report is written before the rank waits for the other ranks at the end, because this wait can hang.
    """
    try:
        rank = Rank(run_dir, documents.read(run_dir.case, CaseFile), report)
        measured = measure(rank)
    except BaseException as error:
        write_failure(run_dir, report, failure_of(error, report.rank))
        raise
    rank.write(measured)
    if rank.plan.needs_torch:
        _leave_process_group()


def forked(path: str, environment: Mapping[str, str]) -> None:
    """Call `main` in a process that was forked as a rank. Send the process's output to the rank's log."""
    for number in leash.ENDING:  # undo the handlers inherited from the parent process
        signal.signal(number, signal.SIG_DFL)
    # Restore the default start method for processes that the rank starts.
    multiprocessing.set_start_method(None, force=True)
    os.environ.update(environment)
    file = RunDir(Path(path)).rank_log(int(os.environ["RANK"]))
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    main(path)


def _measured(rank: Rank) -> RankReport:
    """Measure the rank in the way that its case and its request need."""
    if rank.request.preflight:
        return _preflight(rank)
    return _measure(rank) if rank.plan.needs_torch else _simulate(rank)


def _simulate(rank: Rank) -> RankReport:
    rank.build(SimulatedTimer())
    rank.start()
    losses = rank.workload.run(rank.case.total_steps)
    return rank.finish().replace(loss=tuple(map(float, losses)))


def _measure(rank: Rank) -> RankReport:
    """Train and measure. Memory allocated before `memory_for` is called does not count as the model's."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from perfsuite.worker.clock.memory import memory_for
    from perfsuite.worker.probes.node_probe import device_probe

    _watch(rank)
    case = rank.case
    device = _device(rank.request)
    timer, probe = clock_for(device)
    startup_clock.go_on()
    _init_process_group(rank, device)
    with Part(PERFSUITE_BUILDS):
        flops = count_known(case)  # imports transformers and builds the model once, on the meta device
    rank.framework.load(case, device)
    with Part(PERFSUITE):
        _warm_up(device, counts=rank.request.counts)
        # Probe now, while nothing else runs. On a CPU, probing later would also raise the peak memory.
        rank.device_probe = device_probe(device)
        memory = memory_for(device)
    rank.build(timer, device=device, probe=probe, memory=memory)
    with Part(PERFSUITE):
        _after_build(rank, device)
    register_optimizer_step_pre_hook(rank.before_optimizer_step)
    if rank.plan.clock == "torch":
        register_optimizer_step_post_hook(rank.recorder.after_optimizer_step)
    with contextlib.suppress(ProfileTaken):
        rank.start()
        startup_clock.begin_loop()
        # Do not read the losses yet. On a GPU, reading a loss waits for its step.
        losses = rank.workload.run(case.total_steps)
        rank.recorder.finish()
    if rank.is_profiled:
        return rank.profiled()
    flops = rank.workload.flops or with_float8(flops, rank.model())
    return rank.finish().replace(loss=tuple(map(float, losses)), flops=flops)


def _watch(rank: Rank) -> None:
    """Put hooks into torch and Python, before the framework is imported and the training is built."""
    import torch.distributed as dist

    from perfsuite.worker import flight_recorder
    from perfsuite.worker.clock import loaders
    from perfsuite.worker.counting import gradients
    from perfsuite.worker.hooks import calls, dynamo
    from perfsuite.worker.observation import engines, frozen
    from perfsuite.worker.spans import events

    calls.watch()
    dynamo.watch()
    frozen.watch()
    gradients.watch()
    loaders.watch()
    engines.watch()
    startup_clock.watch(dist, "init_process_group", PROCESS_GROUP)
    flight_recorder.watch(rank.run_dir)
    events.watch()
    if rank.request.counts:
        # If torch lacks a private name, this is reported when a step is counted.
        with contextlib.suppress(Exception):
            from perfsuite.worker.counting import loader_workers

            loader_workers.watch(rank.run_dir, counts_objects=rank.request.times_nothing)


def _after_build(rank: Rank, device: Any) -> None:
    """Finish the set-up that needs the framework's process groups, and observe the job that was built."""
    from perfsuite.worker.probes.node_probe import all_reduce_probe

    if device.type == "cuda":
        wait_as_long_as_the_driver(rank.case)
    if rank.plan.process_group == "library":
        rank.device_probe |= all_reduce_probe(device)
    rank.observe()


def _preflight(rank: Rank) -> RankReport:
    """Probe the nodes. Rank 0 reports each round as a step, so that health is sampled during the rounds."""
    from perfsuite.worker import flight_recorder
    from perfsuite.worker.probes.node_probe import node_probe

    flight_recorder.watch(rank.run_dir)
    device = _device(rank.request)
    _init_process_group(rank, device)
    rank.tell(0, 1)
    probed = node_probe(device, rank.case.topology.nodes, lambda rounds: rank.tell(rounds, 1))
    return rank.report.replace(device_probe=probed)


def wait_as_long_as_the_driver(case: Case) -> None:
    """Set the timeout of all process groups of this rank.

    Otherwise, groups that a framework creates would have NCCL's default timeout of 10 minutes. If one rank
    compiled for more than 10 minutes in its first step, NCCL's watchdog would end the ranks that wait for
    this rank. Groups that the training loop creates later keep NCCL's default.
    """
    with contextlib.suppress(PrivateNameError):
        from perfsuite.frameworks.common.private import process_groups, set_pg_timeout

        for group in list(process_groups.pg_map):
            set_pg_timeout(_nccl_timeout(case), group)


def _nccl_timeout(case: Case) -> timedelta:
    """Return a timeout for NCCL that is longer than perfsuite's.

    So if a job hangs, perfsuite ends it before NCCL does.
    """
    return timedelta(seconds=case.timeout_s + NCCL_AFTER_S)


def _init_process_group(rank: Rank, device: Any) -> None:
    """Create the process group, unless a library creates it.

    A preflight loads no library, so this function always creates the group of a preflight. If the group is
    eager, NCCL gets the device, and connects all ranks now. Otherwise, NCCL connects them in the first
    collective.
    """
    import torch.distributed as dist

    kind = "eager" if rank.request.preflight else rank.plan.process_group
    if kind == "library":
        return
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        device_id=device if on_gpu and kind == "eager" else None,
        timeout=_nccl_timeout(rank.case) if on_gpu else None,
    )


def _leave_process_group() -> None:
    """Leave the process group together with the other ranks. If this hangs, an alarm ends this process."""
    import torch.distributed as dist

    signal.alarm(WAIT_S + LEAVE_S)
    if dist.is_initialized():
        dist.barrier()  # a rank that left early would break the connections of the other ranks
        dist.destroy_process_group()


def _device(request: CaseFile) -> Any:
    import torch

    if request.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return torch.device("cpu")


def _warm_up(device: Any, *, counts: bool) -> None:
    """Run one small training step, so that libraries load now, and allocate their lasting memory now."""
    import torch

    weight = torch.nn.Parameter(torch.ones(8, 8, device=device))
    weight.square().sum().backward()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(weight.grad)
    torch.optim.AdamW([weight]).step()
    # If torch lacks a private name, this is reported when a step is counted.
    with contextlib.suppress(Exception):
        from perfsuite.worker.counting.steps import warm_up

        # Load the modules for counting before host memory is first read, because host memory includes these
        # modules. The memory of a GPU does not include them.
        if counts and device.type == "cpu":
            warm_up()
