"""The rank that a process of a script is, since its first step. Imports torch."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import torch

from perfsuite import documents
from perfsuite.analysis import agreement
from perfsuite.case.case import CaseFile
from perfsuite.errors import FileError, MismatchError
from perfsuite.frameworks.common import finetuning
from perfsuite.results.rank_report import Observed, RankReport
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import memory, software, timers
from perfsuite.worker.claim import Claim
from perfsuite.worker.flops import count_known
from perfsuite.worker.losses import Losses
from perfsuite.worker.node_probe import device_probe
from perfsuite.worker.optimizers import Optimizers, living
from perfsuite.worker.rank import WAIT_S, Rank, failure_of


class ScriptRank(Rank):
    """The measurement of a training that perfsuite has not built: it is observed from its first step on."""

    def __init__(
        self,
        run_dir: RunDir,
        request: CaseFile,
        report: RankReport,
        *,
        losses: Losses | None,
        optimizers: Optimizers,
    ) -> None:
        super().__init__(run_dir, request, report)
        self.claim = Claim(run_dir, report.rank)
        self._losses = losses
        self._optimizers = optimizers

    def begin(self, optimizer: Any, host_memory: memory.HostMemory) -> None:
        """Make clock and observer for what `optimizer`, the clock's, trains; the clock starts later."""
        device = torch.device("cpu")
        counters: memory.HostMemory | memory.CudaMemory | None = host_memory
        if self.request.device == "cuda":
            device, counters = device_of(optimizer), None
            try:
                counters = memory.CudaMemory(device)
            except RuntimeError as error:
                self.notes.append(
                    f"peak memory is unknown: torch's allocator is not in use ({str(error).splitlines()[0]})"
                )
        timer, probe = timers.clock_for(device)
        self.build(timer, device=device, probe=probe, memory=counters)
        self.observe()
        self._optimizers.begin(living(torch.optim.Optimizer))

    def before_clock_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Show a step of the clock, which may be a new optimizer in place of the first one."""
        assert self.observer is not None
        first = self.observer.optimizer
        if optimizer is not first and self.recorder.counting is not None:
            self.recorder.counting.rebuilt()
        self.before_optimizer_step(first, args, kwargs)

    def check_second_step(self) -> None:
        """Raise `MismatchError` if the second step was not as the case says; else tell what it was given."""
        assert self.observer is not None
        self.observer.check_second_step()
        self.claim.give(self.observer.given())

    def check_first_steps(self) -> None:
        """Raise `MismatchError` for micro-batches, and, as rank 0, for tokens, that are not the case's."""
        if self._losses is not None:
            self._losses.check(self.case.gradient_accumulation, more_come=True)
        if self.report.rank == 0:  # which looks for all: ranks may have different numbers of tokens
            told = [Claim(self.run_dir, number).given() for number in range(self.report.world_size)]
            report = self.report.replace(tokens_per_step=self.workload.tokens_per_step(self.case))
            of_ranks = [report.replace(evidence=each) for each in told]
            if None not in told and (why := agreement.tokens_differ(of_ranks, self.case)) is not None:
                raise MismatchError(why)

    def measured(self) -> RankReport:
        """Return the report of all steps, after the last one."""
        self.notes += self._optimizers.notes()
        report = self.finish()
        assert report.observed is not None
        assert self.observer is not None
        report = report.replace(observed=_with_script(report.observed, report.rank))
        if report.failure is not None:
            return report
        try:
            loss = () if self._losses is None else self._losses.of_steps(self.case.gradient_accumulation)
        except MismatchError as error:  # with all that was measured
            return report.replace(failure=failure_of(error, report.rank))
        # Last: only now it is known which share of the weights trains, and counting builds a model.
        flops = count_known(self.case, frozen_share=finetuning.frozen_share(self.observer.model))
        return report.replace(loss=loss, flops=flops)

    def wait_for_others(self) -> None:
        """Return when every rank has written its report, or after `WAIT_S`."""
        claims = [Claim(self.run_dir, rank) for rank in range(self.case.topology.world_size)]
        until = time.monotonic() + WAIT_S
        while not all(claim.is_over() for claim in claims) and time.monotonic() < until:
            time.sleep(0.02)

    def are_all_measured(self) -> bool:
        """Whether every rank has measured, so that none will be missing in a collective."""
        paths = [self.run_dir.rank(rank) for rank in range(self.case.topology.world_size)]
        with contextlib.suppress(FileError):
            return all(documents.read(path, RankReport).failure is None for path in paths)
        return False

    def probed(self) -> dict[str, float]:
        """Return the rates of the device; none if the memory that the script leaves is not enough."""
        is_gpu = self.device.type == "cuda"
        on_device = torch.cuda.device(self.device) if is_gpu else contextlib.nullcontext()
        with contextlib.suppress(Exception), on_device:
            return device_probe(self.device)
        return {}


def device_of(optimizer: Any) -> torch.device:
    """Return the GPU of the optimizer's first parameter that is on one, or the current GPU if none is."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    on_gpu = (p.device for p in parameters if p.device.type == "cuda")
    return next(on_gpu, None) or torch.device("cuda", torch.cuda.current_device())


def _with_script(observed: Observed, rank: int) -> Observed:
    """With what the script imported and a digest of it, so that a change of them is listed with a verdict."""
    environment = {**(software.imported() if rank == 0 else {}), **observed.environment}
    if (file := getattr(sys.modules["__main__"], "__file__", None)) is not None:
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
        environment["script"] = f"{Path(file).name} {digest}"
    return observed.replace(environment=environment)
