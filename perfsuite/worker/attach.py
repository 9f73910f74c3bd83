"""Measures a training loop that is not ours, from inside its process. Worker side; imports torch.

An unmodified script knows nothing of this: hooks on torch's optimizers are the clock, and a wrapper around
`torch.autograd.backward` sees the loss. None of it touches a device before the script makes a step there.
After the last step that the case asks for, the report is written and the script is ended by `Measured`, on
every rank at the same step.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.errors import FileError, MismatchError, ScriptError
from perfsuite.frameworks.base import Ranks
from perfsuite.results.rank_report import Failure, Observed, RankReport
from perfsuite.results.run_dir import LAUNCH_DIR, RunDir
from perfsuite.worker import deepspeed, flops, leash, main, software, stacks
from perfsuite.worker import recorder as measure
from perfsuite.worker.losses import Losses, before_backward
from perfsuite.worker.observe import Observer
from perfsuite.worker.optimizers import Optimizers
from perfsuite.worker.preflight import device_probe

PASSES_WITHOUT_A_STEP = 100
"""Backward passes, or ten steps' worth of them, after which an optimizer of torch would have stepped."""


class Measured(SystemExit):
    """Everything is measured and written: ends the script by way of its `finally` blocks."""


def attach() -> None:
    """Measure this process if it turns out to train. Called when torch has been imported by a process that a
    script's command has started, or is (`perfsuite.worker.startup`)."""
    run_dir = RunDir(Path(os.environ[main.RUN_DIR]))
    stacks.listen(run_dir, int(os.environ["RANK"]) if "RANK" in os.environ else None)
    attached = Attached(run_dir, documents.read(run_dir.case, CaseFile))
    show = sys.excepthook

    def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
        attached.crashed(error)
        show(kind, error, trace)

    sys.excepthook = excepthook
    atexit.register(attached.exits)


class Attached:
    """The hooks in one process. It becomes a rank when the clock's optimizer steps."""

    def __init__(self, run_dir: RunDir, asked: CaseFile) -> None:
        self.run_dir = run_dir
        self.asked = asked
        self.case = asked.case
        self.is_over = False
        """Whether this rank's report is written, of a measurement or of a failure."""
        self._memory: measure.HostMemory | measure.CudaMemory | None = measure.HostMemory(
            "when torch was imported"
        )
        self._notes: list[str] = []
        if asked.device == "cuda":
            measure.keep_peaks()
        self._optimizers = Optimizers(getattr(self.case.framework, "clock", None))
        self._engines = deepspeed.Engines(self._before, self._after)
        self._losses = Losses() if self.case.framework.asks_of_loss is not None else None
        self._passes = 0
        """Backward passes before any optimizer has stepped."""
        self._recorder: measure.Recorder | None = None
        self._report: RankReport | None = None
        before_backward(self._before_backward)
        register_optimizer_step_pre_hook(self._before_optimizer_step)
        register_optimizer_step_post_hook(self._after_optimizer_step)

    # The clock: torch calls these two for every optimizer, or DeepSpeed's engine stands for the one in it.

    def _before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._engines.take(optimizer):
            self._before(optimizer)

    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._engines.take(optimizer):
            self._after(optimizer)

    def _before(self, optimizer: Any) -> None:
        if self._optimizers.is_clock(optimizer):
            self.before_step(optimizer)

    def _after(self, optimizer: Any) -> None:
        self._optimizers.count(optimizer)
        if self._optimizers.is_clock(optimizer):
            self.after_step(optimizer)

    def before_step(self, optimizer: Any) -> None:
        """The gradients of a step are there, and `optimizer` is about to use them."""
        is_first = self._report is None
        if is_first:
            self._become_rank(optimizer)
        self._observe(optimizer)
        if is_first:
            self.recorder.start()

    def after_step(self, optimizer: Any) -> None:
        """A step has ended. Raises `Measured` when it was the last one that is asked for."""
        if self.is_over:
            raise Measured  # the script has caught the first one
        self.recorder.boundary()
        if self._losses is not None:
            self._losses.end_step(optimizer)
        if self.recorder.steps == self.case.total_steps:
            self._finish()
            raise Measured

    def _observe(self, optimizer: Any) -> None:
        """Raises `SystemExit` where the script is not as the case says, or cannot be observed: an error of
        the measurement is none that the script may catch or is to be blamed for."""
        try:
            self._observer.before_optimizer_step(optimizer, (), {})
        except Exception as error:
            self._fail(error, _failure_of_ours)
            raise SystemExit(1) from None

    @property
    def recorder(self) -> measure.Recorder:
        """There since the first step."""
        assert self._recorder is not None
        return self._recorder

    @property
    def steps(self) -> int:
        """Finished so far."""
        return 0 if self._recorder is None else self._recorder.steps

    def _become_rank(self, optimizer: Any) -> None:
        leash.die_with_parent()
        report = _report()
        stacks.listen(self.run_dir, report.rank)  # known only now, where a script starts its own processes
        self._device = device_of(optimizer) if self.asked.device == "cuda" else torch.device("cpu")
        if self._device.type == "cuda":
            self._memory = self._cuda_memory()
        timer, probe = measure.clock_for(self._device)
        self._recorder = main.recorder_of(self.asked, report, timer, probe=probe, memory=self._memory)
        ranks = Ranks(
            rank=report.rank,
            world_size=report.world_size,
            device=self._device,
            directory=self.run_dir.path,
        )
        self._workload = self.case.framework.build(self.case, ranks, self.recorder)
        self._observer = Observer(self.case, self._workload)
        main.tell_progress(self.run_dir, self.case, self._workload, self.recorder, report)
        self._optimizers.begin()
        self._report = report

    def _cuda_memory(self) -> measure.CudaMemory | None:
        """None where an allocator of the script's own keeps no such counters."""
        try:
            return measure.CudaMemory(self._device)
        except RuntimeError as error:
            self._notes.append(
                f"peak memory is unknown: torch's allocator is not in use ({str(error).splitlines()[0]})"
            )
            return None

    def _before_backward(self, tensors: Any, grad_tensors: Any) -> None:
        if grad_tensors is not None or not isinstance(tensors, Tensor) or tensors.is_meta:
            return  # within another backward, as checkpointing calls it; or nothing but a count of operations
        if self._losses is not None and tensors.numel() == 1:
            self._losses.see(tensors)
        if not self._optimizers.seen and not self.is_over:
            self._passes += 1
            if self._passes > max(PASSES_WITHOUT_A_STEP, 10 * self.case.gradient_accumulation):
                self._give_up()

    def _give_up(self) -> None:
        """Raises `SystemExit` where this process must be a rank: not in a helper of one."""
        if "RANK" in os.environ or dist.is_initialized() or self.case.topology.world_size == 1:
            self._fail(
                ScriptError(
                    f"no optimizer of torch has stepped after {self._passes - 1} backward passes (the case "
                    f"says gradient_accumulation={self.case.gradient_accumulation}): the clock is the step "
                    "of a torch.optim.Optimizer, and what trains without one cannot be measured"
                )
            )
            raise SystemExit(1)

    def _finish(self) -> None:
        assert self._report is not None
        self.is_over = True
        self.recorder.finish()
        try:
            report = self._measured(self._report)
        except Exception as error:
            report = self._report.replace(failure=_failure_of_ours(error, self._report.rank))
        main.write_report(self.run_dir, self.asked, report)
        if report.failure is None:
            self._wait_for_the_others()
        signal.alarm(main.LEAVE_S)
        if report.failure is None and self._are_all_measured():
            main.write_report(self.run_dir, self.asked, report.replace(device_probe=self._probed()))

    def _measured(self, report: RankReport) -> RankReport:
        report = main.with_times(report, self.case, self._workload, self.recorder)
        if self._memory is not None:  # before anything of ours takes some
            report = report.replace(memory=self._memory.read())
        observed = self._observer.result()
        report = report.replace(
            observed=_with_script(observed),
            evidence=self._observer.evidence(),
            notes=(*self._notes, *self._optimizers.notes(), *software.compile_notes()),
        )
        try:
            self._observer.check(observed)
            loss = () if self._losses is None else self._losses.of_steps(self.case.gradient_accumulation)
        except MismatchError as error:  # with all that was measured
            return report.replace(failure=main.failure_of(error, report.rank))
        counted = flops.count_known(self.case, frozen_share=self._observer.frozen_share())
        return report.replace(loss=loss, flops=counted)

    def _wait_for_the_others(self) -> None:
        missing = self._reports()
        until = time.monotonic() + main.WAIT_S
        while (missing := [path for path in missing if not path.exists()]) and time.monotonic() < until:
            time.sleep(0.02)

    def _are_all_measured(self) -> bool:
        """Whether no rank will be missing in a collective."""
        with contextlib.suppress(FileError):
            return all(documents.read(path, RankReport).failure is None for path in self._reports())
        return False

    def _reports(self) -> list[Path]:
        return [self.run_dir.rank(rank) for rank in range(self.case.topology.world_size)]

    def _probed(self) -> dict[str, float]:
        """What the device can do, while the script still has its memory: nothing, where that is not enough.

        A rank that has none may leave the others waiting in the all-reduce: for `LEAVE_S`, all is written.
        """
        on_device = (
            torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()
        )
        with contextlib.suppress(Exception), on_device:
            return device_probe(self._device)
        return {}

    def ended_early(self) -> ScriptError:
        """For a script that came to its end by itself."""
        steps, clock = self.steps, self._optimizers.wanted
        if not steps and clock is not None:
            return ScriptError(f"clock={clock!r}: no such optimizer stepped. {self._optimizers.told()}")
        told = f"the script ended after {steps} of {self.case.total_steps} optimizer steps"
        if self.run_dir.is_first:
            return ScriptError(
                f"{told}: lower max_warmup_steps or steps, or give it more data; or, where it goes on from "
                f"files of an earlier run, have it keep them in {LAUNCH_DIR}, a new directory in each launch"
            )
        return ScriptError(
            f"{told}, but not so in the launch before: that may have left files which this one went on from. "
            f"Have the script keep its files in {LAUNCH_DIR} (in its arguments, command or env), a new "
            "directory in each launch"
        )

    def crashed(self, error: BaseException) -> None:
        """Report an error that nobody caught. Before the first step, it may be a helper's of a rank."""
        if self._report is None and ("RANK" not in os.environ or self.run_dir.rank(_rank()).exists()):
            return
        self._fail(error)

    def exits(self) -> None:
        """Report, when its process ends, that a rank was not measured."""
        if self._optimizers.seen:
            self._fail(self.ended_early())

    def _fail(
        self, error: BaseException, failure_of: Callable[[BaseException, int], Failure] = main.failure_of
    ) -> None:
        if not self.is_over:
            self.is_over = True
            report = _report()
            failure = failure_of(error, report.rank)
            documents.write(self.run_dir.rank(report.rank), report.replace(failure=failure))


def _failure_of_ours(error: BaseException, rank: int) -> Failure:
    """What a rank's report says of an error that observing has raised, where the script has made none."""
    failure = main.failure_of(error, rank)
    if failure.kind != "crash":
        return failure
    message = f"perfsuite could not observe this script, which is an error in perfsuite: {failure.message}"
    return failure.replace(kind="error", message=message)


def _report() -> RankReport:
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    return RankReport(rank=_rank(), world_size=world, host=socket.gethostname(), clock="none")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def device_of(optimizer: Any) -> torch.device:
    """The GPU that its first parameter on one is on, or the current one where it steps on the host: a script
    need not make its device the current one."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    on_gpu = (p.device for p in parameters if p.device.type == "cuda")
    return next(on_gpu, None) or torch.device("cuda", torch.cuda.current_device())


def _with_script(observed: Observed) -> Observed:
    """With a digest of the running script, so that a change of it is listed beside a verdict."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        return observed
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    return observed.replace(environment={**observed.environment, "script": f"{Path(file).name} {digest}"})
