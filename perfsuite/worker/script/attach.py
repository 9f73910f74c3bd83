"""Measure the training loop of a script from inside its process.

Hooks on optimizers determine when a step ends. No hook uses a device before the script takes a training step
on that device. Errors in hooks never reach the script.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.errors import MismatchError, ScriptError
from perfsuite.results.rank_report import Failure, RankReport
from perfsuite.results.run_dir import ANCESTOR_PID, LAUNCH_DIR, RANK, RUN_DIR, RunDir
from perfsuite.worker import flight_recorder, leash
from perfsuite.worker.clock import loaders, memory, startup_clock
from perfsuite.worker.clock.profiling import ProfileTaken
from perfsuite.worker.counting import gradients
from perfsuite.worker.hooks import calls, dynamo
from perfsuite.worker.hooks.named import Search
from perfsuite.worker.observation import engines, frozen, scalers
from perfsuite.worker.observation.optimizers import Optimizers
from perfsuite.worker.rank import LEAVE_S, empty_report, failure_of, failure_of_ours, write_failure
from perfsuite.worker.script.losses import Losses, loss_of
from perfsuite.worker.script.script_rank import (
    TOLD_AFTER,
    Claim,
    ScriptRank,
    Standing,
    named_functions,
    without_launcher,
)
from perfsuite.worker.spans import events

if TYPE_CHECKING:
    from perfsuite.worker.counting.steps import Counting

# Load the code for counting before memory is read for the first time. If torch lacks a private name, counting
# a step will report this.
with contextlib.suppress(Exception):
    import perfsuite.worker.counting.loader_workers  # noqa: F401

# If there is no optimizer step in this many backward passes, the launch fails. If ten steps of the case need
# more passes, the limit is the number of passes in ten steps.
PASSES_WITHOUT_A_STEP = 100

CAPTURED = (
    "the script captures its optimizer's step in a CUDA graph. perfsuite recognises the end of a training "
    "step by the call of the optimizer, but a replay of the graph does not call the optimizer. Capture only "
    "forward and backward, or turn the graph off"
)

State = Literal["waiting", "measuring", "over", "aside"]


class Measured(SystemExit):
    """Ends the script when everything is measured and written. The script's `finally` blocks still run."""


def _guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Report an error in a hook instead of raising it. The hook then returns None.

    A mismatch, or an error of the script, is reported and ends the script. Errors of the accelerator are
    raised. In a launch with an injected fault, all other errors are raised too.
    """

    @functools.wraps(hook)
    def guarded(attached: Attached, *args: Any, **kwargs: Any) -> Any:
        try:
            return None if attached.is_aside() else hook(attached, *args, **kwargs)
        except torch.AcceleratorError:
            raise
        except (MismatchError, ScriptError) as error:
            attached.fail_with(error)
            raise SystemExit(1) from error
        except Exception as error:
            if attached.request.inject is not None:
                raise
            attached.give_up(error)
        return None

    return guarded


def attach() -> None:
    """Measure this process if it trains. Call this as soon as the process has imported torch."""
    run_dir = RunDir(Path(os.environ[RUN_DIR]))
    leash.listen(run_dir, started_rank())
    attached = Attached(run_dir, documents.read(run_dir.case, CaseFile))
    flight_recorder.watch(run_dir)
    calls.before(sys, "excepthook", lambda kind, error, trace: attached.crashed(error))
    atexit.register(attached.exits)


def started_rank() -> int | None:
    """Return the rank that a launcher or the agent gave this process, or None if neither gave it one."""
    rank = os.environ.get("RANK") or os.environ.get(RANK)
    return None if rank is None else int(rank)


class Attached:
    """The hooks in one process. The process is in one of these states:

    - `waiting`: the optimizer whose steps are timed has not taken its first step
    - `measuring`: the process is measured as a rank
    - `aside`: the process is the child of a rank, and the hooks do nothing
    - `over`: the measurement or a failure has been reported. After the last step, the hooks still end the
    script

    If a rank forks a process, the forked process also counts as `aside`.
    """

    def __init__(
        self, run_dir: RunDir, request: CaseFile, *, new_rank: Callable[..., ScriptRank] = ScriptRank
    ) -> None:
        self.run_dir = run_dir
        self.request = request
        self._new_rank = new_rank
        self.case = request.case
        self.state: State = "waiting"
        self.rank: ScriptRank | None = None  # the measurement of this process. None before its first step
        self.steps = 0  # number of steps of the clock that have ended
        self._written: RankReport | None = None  # the report with all measurements
        # Read the memory for the first time now, because the script can build its model at any time.
        self._host_memory = memory.HostMemory("when torch was imported")
        if request.device == "cuda":
            # Call this now, because the script can import `reset_peak_memory_stats` by name later.
            memory.keep_peaks()
        calls.watch()
        dynamo.watch()
        frozen.watch()
        gradients.watch()
        scalers.watch(self._skipped)
        loaders.watch()
        engines.watch()
        if dist.is_available():
            startup_clock.watch(dist, "init_process_group", startup_clock.PROCESS_GROUP)
        if request.counts:
            with contextlib.suppress(Exception):  # the import can fail
                from perfsuite.worker.counting import loader_workers

                loader_workers.watch(run_dir, counts_objects=request.times_nothing)
        events.watch()
        self._search = Search(named_functions(self.case.framework))
        self._search.begin()
        startup_clock.around_import = self._search.around_import
        self._optimizers = Optimizers(getattr(self.case.framework, "clock", None))
        self._losses = Losses() if self.case.framework.promises.loss is not None else None
        self._pid: int | None = None  # the process id at the first step, to recognise forked processes
        # The report without measurements. It is made at the first step, because a rank can leave its group
        # later.
        self._at_first_step: RankReport | None = None
        self._passes = 0  # number of backward passes before any optimizer step
        calls.before(torch.autograd, "backward", self._before_backward)  # `Tensor.backward` calls it too
        register_optimizer_step_pre_hook(self._before_optimizer_step)
        register_optimizer_step_post_hook(self._after_optimizer_step)

    def is_aside(self) -> bool:
        """Return whether this process is a child of the measured process."""
        return self.state == "aside" or self._pid not in (None, os.getpid())

    # The clock. If an engine of a library steps the optimizer, the engine's steps are counted instead.

    @_guarded
    def _before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not engines.steps(optimizer, self._before, self._after):
            self._before(optimizer, args, kwargs)

    @_guarded
    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        scalers.stepped()
        if not engines.steps(optimizer, self._before, self._after):
            self._after(optimizer)

    @_guarded
    def _before(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        """Handle the start of a step. At the first step, prepare the measurement and start the clock."""
        with startup_clock.Part(startup_clock.PERFSUITE):
            self._take(optimizer, args, kwargs)

    def _take(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._optimizers.takes_turn(optimizer):
            if self.state == "measuring" and self._counting is not None:
                self._counting.before_other_step(optimizer)
            return
        self._search.end()  # do this first, because the search would make all other work slower
        if self.state == "over":
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise ScriptError(CAPTURED)
        if self.rank is not None:
            self.rank.before_optimizer_step(optimizer, args, kwargs)
            return
        standing = self._stand()
        if standing == "child":
            self.state = "aside"
            startup_clock.end()
        else:
            self.rank = self._become_rank(optimizer, is_next=standing == "next")
            self.state = "measuring"
            self.rank.before_optimizer_step(optimizer, args, kwargs)
            self.rank.start()

    def _after(self, optimizer: Any) -> None:
        """Handle the end of a step.

        After the last step of the case, end the script, even if there were errors in hooks.
        """
        if not self._ends_step(optimizer):
            if self.state == "measuring" and self._counting is not None:
                self._counting.after_other_step()
        else:
            self.steps += 1
            if self.state == "measuring":
                self._end_step(optimizer)
            if self.steps >= self.case.total_steps or (self.rank is not None and self.rank.is_profiled):
                raise Measured

    @property
    def _counting(self) -> Counting | None:
        return None if self.rank is None else self.rank.recorder.counting

    @_guarded
    def _ends_step(self, optimizer: Any) -> bool:
        return self._optimizers.count(optimizer)

    @_guarded
    def _end_step(self, optimizer: Any) -> None:
        assert self.rank is not None
        with contextlib.suppress(ProfileTaken):
            self.rank.recorder.boundary()
        if self._losses is not None:
            self._losses.end_step(optimizer)
        if self.steps == TOLD_AFTER:
            self.rank.check_first_steps()
        self.rank.look_for_names()
        if self.rank.is_profiled:
            self._write(self.rank, self.rank.profiled())
            self.rank.wait_for_others()
            signal.alarm(LEAVE_S)
        elif self.steps == self.case.total_steps:
            self._finish(self.rank)

    @_guarded
    def _skipped(self, optimizer: Any) -> None:
        """Handle a step of an optimizer that a loss scaler has skipped.

        The passes since the last step do not count, and the running step begins again. If an engine steps the
        optimizer, do nothing, because the engine's step ends even if its scaler skips the optimizer.
        """
        if self.rank is None or self.state != "measuring" or engines.of(optimizer) is not None:
            return
        if self._optimizers.is_clock(optimizer):
            if self._losses is not None:
                self._losses.skip_step()
            self.rank.skip_step()
        elif self.rank.recorder.counting is not None:
            self.rank.recorder.counting.lack(f"a loss scaler skipped a step of {type(optimizer).__name__}")

    @_guarded
    def _before_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        loss = loss_of(tensors)
        if loss is None:
            return
        if self._losses is not None and loss.numel() == 1:
            self._losses.see(loss)
        if not self._optimizers.seen and self.state != "over":
            self._passes += 1
            accumulation = self.case.gradient_accumulation
            if self._passes > max(PASSES_WITHOUT_A_STEP, 10 * accumulation) and self._must_be_rank():
                raise ScriptError(
                    f"no optimizer of torch has stepped after {self._passes - 1} backward passes (the case "
                    f"says gradient_accumulation={accumulation}). perfsuite measures the time between "
                    "steps of a torch.optim.Optimizer, so training without such an "
                    "optimizer cannot be measured"
                )

    # Decide which process of a launch is a rank.

    def _stand(self) -> Standing:
        """Return how this process relates to the other processes of its rank (`Claim.stand`)."""
        self._pid = os.getpid()
        self._at_first_step = self._empty
        return Claim(self.run_dir, self._empty.rank).stand() if self._may_be_rank() else "child"

    def _must_be_rank(self) -> bool:
        is_alone = self.case.topology.world_size == 1
        return self._may_be_rank() and (started_rank() is not None or dist.is_initialized() or is_alone)

    def _may_be_rank(self) -> bool:
        # With `path` or `module` in the case, only a process that the agent itself started can be a rank.
        is_command = getattr(self.case.framework, "command", None) is not None
        agent = os.environ.get(ANCESTOR_PID)
        return is_command or agent is None or os.getppid() == int(agent)

    @property
    def _empty(self) -> RankReport:
        ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ()
        return self._at_first_step or empty_report(*ranks)

    def _become_rank(self, optimizer: Any, *, is_next: bool) -> ScriptRank:
        leash.die_with_parent()
        empty = self._empty
        leash.listen(self.run_dir, empty.rank)  # call this again: `attach` might not have known the rank
        rank = self._new_rank(
            *(self.run_dir, self.request, empty),
            losses=self._losses,
            optimizers=self._optimizers,
            search=self._search,
        )
        if is_next:
            self.run_dir.rank(empty.rank).unlink(missing_ok=True)
            rank.notes.append(
                f"another process trained as rank {empty.rank} earlier, and ended without being measured"
            )
        rank.begin(optimizer, self._host_memory)
        return rank

    # The report.

    def _finish(self, rank: ScriptRank) -> None:
        """Write the report. Then probe the device, and write the report again with the device's rates.

        The report is written before the probe, because the probe can hang or run out of memory.
        """
        rank.recorder.finish()
        report = self._written = rank.measured()
        self._write(rank, report)
        if report.failure is None:
            rank.wait_for_others()
        signal.alarm(LEAVE_S)
        if report.failure is None and rank.are_all_measured():
            self._write(rank, report.replace(device_probe=rank.probed()))

    def _write(self, rank: ScriptRank, report: RankReport) -> None:
        rank.write(report)
        self.state = "over"
        # Check this after writing the report. A process that claims the rank after this check will see the
        # report.
        if rank.claim.is_twice():
            rank.write(report.replace(failure=failure_of(rank.claim.twice(), report.rank)))

    @_guarded
    def crashed(self, error: BaseException) -> None:
        """Report an uncaught error, unless this process might be only a helper of a rank."""
        is_known = started_rank() is not None and self._may_be_rank()
        if self.rank is not None or (is_known and not self.run_dir.rank(self._empty.rank).exists()):
            self.fail_with(error)

    @_guarded
    def exits(self) -> None:
        """When the process ends, report a failure if its rank was not measured."""
        if self._counting is not None:
            self._counting.abandon()  # otherwise, counting would go on while Python ends
        # Python keeps the last uncaught error even if the script has replaced our `excepthook`.
        if self._optimizers.seen and self.state != "over":
            self.fail_with(getattr(sys, "last_value", None) or self._ended_early())

    def _ended_early(self) -> ScriptError:
        optimizers = self._optimizers
        if not self.steps and optimizers.wanted is not None:
            return ScriptError(
                f"clock={optimizers.wanted!r}: no such optimizer stepped. {optimizers.summary()}"
            )
        several = f". {optimizers.summary()}" if len(optimizers.seen) > 1 else ""
        return ScriptError(
            f"the script ended after {self.steps} of {self.case.total_steps} optimizer steps. Lower "
            "max_warmup_steps or steps, or give the script more data. If it resumes from files of an earlier "
            f"launch, pass {LAUNCH_DIR} in its arguments, command or env, so that it writes its files to a "
            f"directory that is new in each launch{several}"
        )

    def give_up(self, error: Exception) -> None:
        """Report an error in perfsuite, and let the script continue without being measured."""
        traceback.print_exception(error)
        try:
            startup_clock.end()
            failure = failure_of_ours(error, self._empty.rank)
            if self.rank is not None:
                self.rank.abandon()
                if self._written is not None and self.state == "over":
                    self.rank.write(self._written.replace(notes=(*self._written.notes, failure.message)))
            self._fail(failure)
        except Exception:  # for example because the disk is full. The driver will notice the missing report
            traceback.print_exc()

    def fail_with(self, error: BaseException) -> None:
        """Report an error that ends the script."""
        signal.alarm(LEAVE_S)
        failure = failure_of(error, self._empty.rank)
        self._fail(failure.replace(message=f"{failure.message}{without_launcher(error)}"))

    def _fail(self, failure: Failure) -> None:
        if self.state != "over":
            self.state = "over"
            steps = None if self.rank is None else self.steps
            write_failure(self.run_dir, self._empty.replace(steps=steps), failure)
