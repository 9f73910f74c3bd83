"""Measures a training loop that is not ours, from inside its process. Worker side; imports torch.

An unmodified script knows nothing of this: hooks on torch's optimizers are the clock, and a wrapper around
`torch.autograd.backward` sees the loss. After the last step that the case asks for, the report is written and
the script is ended by `Measured`, on every rank at the same step.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mode
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from perfsuite import data, flops, measure, stacks, worker
from perfsuite.case import CaseFile
from perfsuite.errors import MismatchError, ScriptError
from perfsuite.framework import Ranks
from perfsuite.observe import Observer
from perfsuite.result import Observed, RankReport
from perfsuite.rundir import RunDir

WAIT_S = 60
"""For the reports of the other ranks: one that leaves early breaks their connections."""
LEAVE_S = 30
"""To end in after everything is measured; then the kernel ends the process."""


class Measured(SystemExit):
    """Everything is measured and written: ends the script by way of its `finally` blocks."""


def attach() -> None:
    """Measure this process if it turns out to train. Called when a process that was not started by the
    launcher has imported torch (`perfsuite.startup`)."""
    run_dir = RunDir(Path(os.environ[worker.RUN_DIR]))
    stacks.listen(run_dir, int(os.environ["RANK"]) if "RANK" in os.environ else None)
    attached = Attached(run_dir, data.read(run_dir.case, CaseFile), level_at="when torch was imported")
    show = sys.excepthook

    def excepthook(kind: Any, error: BaseException, trace: Any) -> None:
        attached.crashed(error)
        show(kind, error, trace)

    sys.excepthook = excepthook
    atexit.register(attached.exits)


class Attached:
    """The hooks in one process. It becomes a rank when an optimizer steps."""

    def __init__(
        self,
        run_dir: RunDir,
        asked: CaseFile,
        *,
        device_probe: Mapping[str, float] | None = None,
        level_at: str = "when the script started",
    ) -> None:
        self.run_dir = run_dir
        self.asked = asked
        self.case = asked.case
        self.is_over = False
        """Whether this rank's report is written, of a measurement or of a failure."""
        self._device_probe = dict(device_probe or {})
        timer, probe = measure.clock_for(asked.device)
        self.recorder = measure.Recorder(
            timer,
            probe=probe,
            before_end=self._inject,
            memory=measure.HostMemory(level_at),
        )
        self._losses = Losses() if self.case.framework.reports_loss else None
        self._report: RankReport | None = None
        register_optimizer_step_pre_hook(self._before_optimizer_step)
        register_optimizer_step_post_hook(self._after_optimizer_step)

    def _before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        is_first = self._report is None
        if is_first:
            self._become_rank()
        self._observer.before_optimizer_step(optimizer, args, kwargs)
        if is_first:
            self.recorder.start()

    def _become_rank(self) -> None:
        worker.die_with_parent()
        report = _report().replace(device_probe=self._device_probe)
        stacks.listen(self.run_dir, report.rank)  # known only now, where a script starts its own processes
        device = torch.device("cpu")
        if self.asked.device == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
            self.recorder.memory = measure.CudaMemory()
        ranks = Ranks(
            rank=report.rank,
            world_size=report.world_size,
            device=device,
            directory=self.run_dir.path,
        )
        self._workload = self.case.framework.build(self.case, ranks, self.recorder)
        self._observer = Observer(self.case, self._workload)
        self._injector = worker.injector_of(self.asked, report)
        worker.tell_progress(self.run_dir, self.case, self._workload, self.recorder, report)
        self._report = report

    def _inject(self, step: int, recorder: measure.Recorder) -> None:
        if self._injector is not None:
            self._injector.before_end(step, recorder)

    def _after_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.is_over:
            raise Measured  # the script has caught the first one
        before = self.recorder.steps
        self.recorder.after_optimizer_step(optimizer, args, kwargs)
        if self.recorder.steps == before:
            return
        if self._losses is not None:
            self._losses.end_step()
        if self.recorder.steps == self.case.total_steps:
            self._finish()
            raise Measured

    def _finish(self) -> None:
        assert self._report is not None
        self.is_over = True
        self.recorder.finish()
        try:
            report = self._measured(self._report)
        except Exception as error:
            report = self._report.replace(failure=worker.failure_of(error, self._report.rank))
        worker.write_report(self.run_dir, self.asked, report)
        if report.failure is None:
            self._wait_for_the_others()
        signal.alarm(LEAVE_S)

    def _measured(self, report: RankReport) -> RankReport:
        observed = self._observer.result()
        report = worker.with_times(report, self.case, self._workload, self.recorder)
        assert self.recorder.memory is not None
        report = report.replace(memory=self.recorder.memory.read(), observed=_with_script(observed))
        try:
            self._observer.check(observed)
            loss = () if self._losses is None else self._losses.of_steps(self.case.gradient_accumulation)
        except MismatchError as error:  # with all that was measured
            return report.replace(failure=worker.failure_of(error, report.rank))
        return report.replace(loss=loss, flops=flops.count_known(self.case))

    def _wait_for_the_others(self) -> None:
        missing = [self.run_dir.rank(rank) for rank in range(self.case.topology.world_size)]
        until = time.monotonic() + WAIT_S
        while (missing := [path for path in missing if not path.exists()]) and time.monotonic() < until:
            time.sleep(0.02)

    def ended_early(self, code: object = None) -> ScriptError:
        """For a script that came to its end by itself: `code` as given to `sys.exit`."""
        steps = self.recorder.steps
        told = f"the script ended after {steps} of {self.case.total_steps} optimizer steps"
        if code:
            return ScriptError(f"{told}, by sys.exit({code!r})")
        if not steps:
            return ScriptError(f"{told}: it does not train, or with no optimizer of torch")
        return ScriptError(f"{told}: lower max_warmup_steps or steps, or give it more data")

    def crashed(self, error: BaseException) -> None:
        """Report an error that nobody caught. Before the first step, it may be a helper's of a rank."""
        if self._report is None and ("RANK" not in os.environ or self.run_dir.rank(_rank()).exists()):
            return
        self._fail(error)

    def exits(self) -> None:
        """Report, when its process ends, that a rank was not measured."""
        if self._report is not None:
            self._fail(self.ended_early())

    def _fail(self, error: BaseException) -> None:
        if not self.is_over:
            self.is_over = True
            report = _report()
            failure = worker.failure_of(error, report.rank)
            data.write(self.run_dir.rank(report.rank), report.replace(failure=failure))


def _report() -> RankReport:
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    return RankReport(rank=_rank(), world_size=world, host=socket.gethostname(), clock="none")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _with_script(observed: Observed) -> Observed:
    """With a digest of the running script, so that a change of it is listed beside a verdict."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None:
        return observed
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    return observed.replace(environment={**observed.environment, "script": f"{Path(file).name} {digest}"})


class Losses:
    """The scalars that backward is called on, summed over the micro-batches of each step.

    They stay on the device, in fp32: nothing waits for them.
    """

    def __init__(self) -> None:
        self._steps: list[Tensor | None] = []
        self._passes: list[int] = []
        """Backward passes of each step."""
        self._begin_step()
        original = torch.autograd.backward  # Tensor.backward calls it, too

        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if grad_tensors is None and isinstance(tensors, Tensor) and tensors.numel() == 1:
                self._see(tensors)
            original(tensors, grad_tensors, *args, **kwargs)

        torch.autograd.backward = backward

    def _begin_step(self) -> None:
        self._total: Tensor | None = None
        self._seen = 0

    def _see(self, loss: Tensor) -> None:
        local = getattr(loss, "_local_tensor", loss).detach()
        # A copy: a script may go on to average its loss over the ranks, in place.
        value = local.to(torch.float32, copy=True)
        self._total = value if self._total is None else self._total + value
        self._seen += 1

    def end_step(self) -> None:
        """The optimizer has stepped."""
        self._steps.append(self._total)
        self._passes.append(self._seen)
        self._begin_step()

    def of_steps(self, micro_batches: int) -> tuple[float, ...]:
        """The loss of each step. Raises `MismatchError` where that is not what was seen."""
        if 0 in self._passes:
            raise MismatchError(
                f"loss: backward was called on no scalar in step {self._passes.index(0)}: "
                "say loss=None where a script's loss cannot be seen so"
            )
        if (usual := mode(self._passes)) != micro_batches:
            raise MismatchError(
                f"gradient_accumulation: the case says {micro_batches}, but backward was called on {usual} "
                "losses a step. Correct the case, or say loss=None if these are not its micro-batches"
            )
        return tuple(float(loss) for loss in self._steps if loss is not None)
