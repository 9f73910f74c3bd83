"""Measures a training loop that is not ours, from inside its process. Worker side; imports torch.

The script is not modified: hooks on torch's optimizers are the clock, and a wrapper around
`torch.autograd.backward` sees the loss. No hook touches a device before the script makes a step there. After
the last step that the case asks for, the report is written and `Measured` ends the script, on every rank at
the same step. An error in a hook never reaches the script: it is reported, and the script trains on.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from perfsuite import documents
from perfsuite.analysis import agreement
from perfsuite.case.case import CaseFile
from perfsuite.errors import MismatchError, ScriptError
from perfsuite.results.rank_report import Failure, Observed, RankReport
from perfsuite.results.run_dir import ANCESTOR_PID, RUN_DIR, RunDir
from perfsuite.worker import calls, deepspeed, leash, memory, script_errors, stack_writer, timers
from perfsuite.worker.claim import Claim
from perfsuite.worker.flops import count_known
from perfsuite.worker.losses import Losses, before_backward
from perfsuite.worker.node_probe import device_probe
from perfsuite.worker.optimizers import Optimizers
from perfsuite.worker.rank import (
    LEAVE_S,
    Rank,
    empty_report,
    failure_of,
    failure_of_ours,
    keep_a_descriptor,
    write_failure,
)
from perfsuite.worker.second_step import in_backward

with contextlib.suppress(Exception):  # what torch lacks for it is said where a step is to be counted
    import perfsuite.worker.counting  # noqa: F401  before the level of memory is taken

TOLD_AFTER = 3
"""Steps after which it is told that the launch has failed, where the first ones show it."""
PASSES_WITHOUT_A_STEP = 100
"""Backward passes (or those of ten steps, if more) without an optimizer step, after which none will come."""


P = ParamSpec("P")
T = TypeVar("T")


class Measured(SystemExit):
    """Ends the script when everything is measured and written; its `finally` blocks still run."""


def _guarded(hook: Callable[Concatenate[Attached, P], T]) -> Callable[Concatenate[Attached, P], T | None]:
    """Keep an error of a hook from the script that runs it: it is reported, and the hook returns None.

    Two errors pass, as none of perfsuite: an injected fault, and what a device says late of the script's
    own work. A script that is not as the case says is ended: the launch has failed then.
    """

    @functools.wraps(hook)
    def guarded(attached: Attached, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return None if attached.is_aside() else hook(attached, *args, **kwargs)
        except torch.AcceleratorError:
            raise
        except (MismatchError, ScriptError) as error:
            attached.end(error)
        except Exception as error:
            if attached.request.inject is not None:
                raise
            attached.give_up(error)
        return None

    return guarded


def attach() -> None:
    """Measure this process if it turns out to train.

    `perfsuite.worker.startup` calls this when a process of a script's command has imported torch.
    """
    run_dir = RunDir(Path(os.environ[RUN_DIR]))
    keep_a_descriptor()
    stack_writer.listen(run_dir, int(os.environ["RANK"]) if "RANK" in os.environ else None)
    attached = Attached(run_dir, documents.read(run_dir.case, CaseFile))
    show = sys.excepthook

    def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
        attached.crashed(error)
        show(kind, error, trace)

    sys.excepthook = excepthook
    atexit.register(attached.exits)


class Attached:
    """The hooks in one process. The process becomes a rank when the clock's optimizer steps."""

    def __init__(self, run_dir: RunDir, request: CaseFile) -> None:
        self.run_dir = run_dir
        self.request = request
        self.case = request.case
        self.rank: Rank | None = None
        """This process's measurement; there since the first step."""
        self.is_over = False
        """Whether a report is written, of a measurement or of a failure."""
        self._written: RankReport | None = None
        """The report of a measurement."""
        # The level is taken now: nobody knows when the script will build its model.
        self._host_memory = memory.HostMemory("when torch was imported")
        if request.device == "cuda":
            memory.keep_peaks()  # before the script imports torch's function under a name of its own
        calls.watch()
        self._optimizers = Optimizers(getattr(self.case.framework, "clock", None))
        self._engines = deepspeed.Engines(self._before, self._after)
        self._losses = Losses() if self.case.framework.asks_of_loss is not None else None
        self._last_step = self.case.total_steps
        self.steps = 0
        """Optimizer steps of the clock that have ended so far."""
        self._pid: int | None = None
        """This process, since its first step: what it forks is another."""
        self._is_child = self._is_next = False
        self._passes = 0
        """Backward passes before any optimizer has stepped."""
        before_backward(self._before_backward)
        register_optimizer_step_pre_hook(self._before_optimizer_step)
        register_optimizer_step_post_hook(self._after_optimizer_step)

    # Torch calls these two for every optimizer. For the one inside of DeepSpeed's engine, the step of the
    # engine counts instead.

    @_guarded
    def _before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._engines.take(optimizer):
            self._before(optimizer, args, kwargs)

    @_guarded
    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._engines.take(optimizer):
            self._after(optimizer)

    @_guarded
    def _before(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        if self.is_over or not self._optimizers.is_clock(optimizer):
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise ScriptError(script_errors.CAPTURED)
        self._before_step(optimizer, args, kwargs)

    def _after(self, optimizer: Any) -> None:
        """End the script after its last step that the case asks for, whatever went wrong before."""
        if self._ends_step(optimizer):
            self.steps += 1
            if not self.is_over:
                self._end_step(optimizer)
            if self.steps >= self._last_step or (self.rank is not None and self.rank.is_profiled):
                raise Measured

    @_guarded
    def _ends_step(self, optimizer: Any) -> bool:
        self._optimizers.count(optimizer)
        return self._optimizers.is_clock(optimizer)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Observe a step whose gradients are there and which `optimizer` is about to make.

        The clock starts here, once: after all that perfsuite itself does before the first step.
        """
        if self.rank is not None:
            self.rank.before_clock_step(optimizer, args, kwargs)
            if self.steps == 1:
                self._check_second_step(self.rank)
        elif self._is_to_be_measured():
            self.rank = self._become_rank(optimizer)
            self.rank.before_optimizer_step(optimizer, args, kwargs)
            self.rank.start()

    @_guarded
    def _end_step(self, optimizer: Any) -> None:
        assert self.rank is not None
        self.rank.recorder.boundary()
        if self._losses is not None:
            self._losses.end_step(optimizer)
        if self.steps == TOLD_AFTER:
            self._check_first_steps(self.rank)
        if self.rank.is_profiled:
            self._end_profiled(self.rank)
        elif self.steps == self._last_step:
            self._finish(self.rank)

    # What is known not to be as the case says ends the launch: it has failed, and may be long.

    def _check_second_step(self, rank: Rank) -> None:
        assert rank.observer is not None
        rank.observer.check_second_step()
        self._claim.give(rank.observer.given())

    def _check_first_steps(self, rank: Rank) -> None:
        if self._losses is not None:
            self._losses.check(self.case.gradient_accumulation, more_come=True)
        if rank.report.rank == 0:  # which looks for all: ranks may have different numbers of tokens
            world = rank.report.world_size
            told = [Claim(self.run_dir, number).given() for number in range(world)]
            of_ranks = [
                rank.report.replace(tokens_per_step=rank.tokens_per_step, evidence=each) for each in told
            ]
            if None not in told and (why := agreement.tokens_differ(of_ranks, self.case)) is not None:
                raise MismatchError(why)

    def _is_to_be_measured(self) -> bool:
        """Whether this process, which is about to train, is the one of its rank.

        Raises `MismatchError` if another process is.
        """
        self._pid = os.getpid()
        standing = self._claim.stand() if self._may_be_rank() else "child"
        if standing == "second":
            self._claim.told_twice()
            raise MismatchError(script_errors.twice(_number()))
        self._is_next = standing == "next"
        self._is_child = standing == "child"
        return not self._is_child

    def _may_be_rank(self) -> bool:
        """Whether this is no child of a rank: the rank of a `path` or `module` is what the agent started."""
        is_command = getattr(self.case.framework, "command", None) is not None
        agent = os.environ.get(ANCESTOR_PID)
        return is_command or agent is None or os.getppid() == int(agent)

    def is_aside(self) -> bool:
        """Whether this process is a child of the one that is measured: it is left alone."""
        return self._is_child or self._pid not in (None, os.getpid())

    @property
    def _claim(self) -> Claim:
        return Claim(self.run_dir, _number())

    def _become_rank(self, optimizer: Any) -> Rank:
        leash.die_with_parent()
        rank = Rank(self.run_dir, self.request, _report())
        if self._is_next:
            self.run_dir.rank(rank.report.rank).unlink(missing_ok=True)
            rank.notes.append(
                f"another process trained as rank {rank.report.rank} before, and ended without being measured"
            )
        # The rank is known only now if the script starts its own processes.
        stack_writer.listen(self.run_dir, rank.report.rank)
        device = device_of(optimizer) if self.request.device == "cuda" else torch.device("cpu")
        counters = _cuda_memory(rank, device) if device.type == "cuda" else self._host_memory
        timer, probe = timers.clock_for(device)
        rank.build(timer, device=device, probe=probe, memory=counters)
        rank.observe()
        self._optimizers.begin()
        return rank

    @_guarded
    def _before_backward(self, tensors: Any) -> None:
        if isinstance(tensors, list | tuple) and len(tensors) == 1:
            tensors = tensors[0]
        if in_backward() or not isinstance(tensors, Tensor) or tensors.is_meta:
            return  # recomputation (checkpointing), or a count of operations without data
        if self._losses is not None and tensors.numel() == 1:
            self._losses.see(tensors)
        if not self._optimizers.seen and not self.is_over:
            self._passes += 1
            if self._passes > max(PASSES_WITHOUT_A_STEP, 10 * self.case.gradient_accumulation):
                self._end_without_steps()

    def _end_without_steps(self) -> None:
        """End this process if it must be a rank, and not a helper process of one."""
        is_alone = self.case.topology.world_size == 1
        if self._may_be_rank() and ("RANK" in os.environ or dist.is_initialized() or is_alone):
            raise script_errors.no_optimizer(self._passes - 1, self.case.gradient_accumulation)

    def _finish(self, rank: Rank) -> None:
        """Write the report; then, with nothing left to lose, probe the device and write it again.

        The probe may fail in the little memory that the script leaves, or hang in its all-reduce.
        """
        rank.recorder.finish()
        report = self._written = self._measured(rank)
        self._write(rank, report)
        if report.failure is None:
            rank.wait_for_others()
        signal.alarm(LEAVE_S)
        if report.failure is None and rank.are_all_measured():
            self._write(rank, report.replace(device_probe=_probed(rank.device)))

    def _write(self, rank: Rank, report: RankReport) -> None:
        rank.write(report)
        self.is_over = True
        if self._claim.is_twice():  # after it is written: the other process looks for it after it has told
            failure = failure_of(MismatchError(script_errors.twice(report.rank)), report.rank)
            rank.write(report.replace(failure=failure))
        self._claim.over()

    def _end_profiled(self, rank: Rank) -> None:
        """Write the profile, then the report, which has no figures."""
        self._write(rank, rank.profiled())
        rank.wait_for_others()
        signal.alarm(LEAVE_S)

    def _measured(self, rank: Rank) -> RankReport:
        rank.notes += self._optimizers.notes()
        report = rank.finish()
        assert report.observed is not None
        assert rank.observer is not None
        report = report.replace(observed=_with_script(report.observed))
        if report.failure is not None:
            return report
        try:
            loss = () if self._losses is None else self._losses.of_steps(self.case.gradient_accumulation)
        except MismatchError as error:  # with all that was measured
            return report.replace(failure=failure_of(error, report.rank))
        # Last: only now it is known which share of the weights trains, and counting builds a model.
        flops = count_known(self.case, frozen_share=rank.observer.frozen_share())
        return report.replace(loss=loss, flops=flops)

    def ended_early(self) -> ScriptError:
        """Return the error of a script that came to its end by itself."""
        optimizers = self._optimizers
        if not self.steps and optimizers.wanted is not None:
            return script_errors.no_clock(optimizers)
        return script_errors.ended_early(self.steps, self._last_step, optimizers, self.run_dir)

    @_guarded
    def crashed(self, error: BaseException) -> None:
        """Report an error that nobody caught, but not of a process that may be just a helper of a rank."""
        is_known = "RANK" in os.environ and self._may_be_rank()
        if self.rank is None and (not is_known or self.run_dir.rank(_number()).exists()):
            return
        signal.alarm(LEAVE_S)
        self._fail(failure_of(error, _number()))

    @_guarded
    def exits(self) -> None:
        """Report, when the process of a rank ends, that it was not measured.

        Whatever replaced our hook of uncaught errors: Python keeps such an error before it calls any hook.
        """
        if self._optimizers.seen and not self.is_over:
            signal.alarm(LEAVE_S)
            error = getattr(sys, "last_value", None) or self.ended_early()
            self._fail(failure_of(error, _number()))

    def end(self, error: Exception) -> None:
        """End a script that cannot be measured as the case says. Raises `SystemExit`."""
        signal.alarm(LEAVE_S)
        self._fail(failure_of(error, _number()))
        raise SystemExit(1)

    def give_up(self, error: Exception) -> None:
        """Report an error of ours, and let the script train on without us."""
        traceback.print_exception(error)
        try:
            if self.rank is not None:
                self.rank.abandon()
            failure = failure_of_ours(error, _number())
            if self.rank is not None and self.is_over and self._written is not None:
                self.rank.write(self._written.replace(notes=(*self._written.notes, failure.message)))
            self._fail(failure)
        except Exception:  # a disk that is full: the driver misses the report
            traceback.print_exc()

    def _fail(self, failure: Failure) -> None:
        if not self.is_over:
            self.is_over = True
            steps = None if self.rank is None else self.steps
            write_failure(self.run_dir, _report().replace(steps=steps), failure)
            self._claim.over()


def _cuda_memory(rank: Rank, device: torch.device) -> memory.CudaMemory | None:
    """Return the counters of torch's allocator; None, and a note, if the script uses another allocator."""
    try:
        return memory.CudaMemory(device)
    except RuntimeError as error:
        rank.notes.append(
            f"peak memory is unknown: torch's allocator is not in use ({str(error).splitlines()[0]})"
        )
        return None


def _probed(device: torch.device) -> dict[str, float]:
    """Return the rates of the device; none if the memory that the script leaves is not enough.

    A rank that fails here may leave the others waiting in the all-reduce, until the kernel ends them.
    """
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with contextlib.suppress(Exception), on_device:
        return device_probe(device)
    return {}


def _report() -> RankReport:
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    return empty_report(_number(), world)


def _number() -> int:
    """Return this process's rank as torch or torchrun's environment knows it."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def device_of(optimizer: Any) -> torch.device:
    """Return the GPU of the optimizer's first parameter that is on one, or the current GPU if none is.

    A script need not make the device that it trains on the current one.
    """
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    on_gpu = (p.device for p in parameters if p.device.type == "cuda")
    return next(on_gpu, None) or torch.device("cuda", torch.cuda.current_device())


def _with_script(observed: Observed) -> Observed:
    """Add a digest of the running script, so that a change of the script is listed beside a verdict."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        return observed
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    return observed.replace(environment={**observed.environment, "script": f"{Path(file).name} {digest}"})
