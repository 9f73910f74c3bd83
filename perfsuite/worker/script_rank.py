"""The rank that a process of a script is, since its first step. Imports torch."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING, Any, Literal

import torch

from perfsuite import documents
from perfsuite.analysis import agreement
from perfsuite.case.case import CaseFile
from perfsuite.errors import FileError, MismatchError
from perfsuite.frameworks.common import finetuning
from perfsuite.frameworks.common.float8 import with_float8
from perfsuite.results.rank_report import Evidence, Observed, RankReport
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import leash, memory, software, timers
from perfsuite.worker.flops import count_known
from perfsuite.worker.losses import Losses
from perfsuite.worker.node_probe import device_probe
from perfsuite.worker.optimizers import Optimizers, living, parameters_of
from perfsuite.worker.rank import WAIT_S, Rank, failure_of

if TYPE_CHECKING:
    from perfsuite.worker.observe import Observer

Standing = Literal["first", "next", "child", "second"]
"""`first`: nobody has trained as this rank. `next`: who did has ended by itself. `child`: an ancestor of this
process trains as it. `second`: another process does, or has been measured."""
TRAINS, GIVEN, TWICE, OVER = "trains", "given", "twice", "over"


class Claim:
    """Decides which process of a launch is a rank: the first one that trains as it.

    Stages of a shell script, a child process, or workers may train as well. Each adds a line to the rank's
    file: `trains PID HOST` of each process, `given EVIDENCE`, `twice`, `over`.
    """

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self._report = run_dir.rank(rank)
        self._path = run_dir.training(rank)

    def stand(self) -> Standing:
        """Add this process, which is about to train as this rank. Returns how it stands to the one before."""
        host = socket.gethostname()
        mine = f"{os.getpid()} {host}"
        self._add(TRAINS, mine)  # before it reads: of two that begin at once, one is the second
        processes = self._all(TRAINS)
        before = processes[: processes.index(mine)]
        if not before:
            return "first"
        pid, _, where = before[-1].partition(" ")
        if where == host and int(pid) in leash.ancestors():
            return "child"
        try:
            failure = documents.read(self._report, RankReport).failure
            has_ended_by_itself = failure is not None and failure.kind in ("crash", "out_of_memory")
        except FileError:
            has_ended_by_itself = where == host and not leash.is_alive(int(pid))
        if has_ended_by_itself:
            return "next"
        self._add(TWICE)  # the first one has yet to hear of it
        return "second"

    def give(self, evidence: Evidence) -> None:
        """Tell what the model was given in the second step."""
        self._add(GIVEN, evidence.model_dump_json())

    def given(self) -> Evidence | None:
        """Return what the model was given, None if that is not told yet."""
        told = self._all(GIVEN)
        return Evidence.model_validate_json(told[-1]) if told else None

    def is_twice(self) -> bool:
        """Whether two processes have trained as this rank."""
        return bool(self._all(TWICE))

    def over(self) -> None:
        """Say that this rank's report is written. Where that fails, the others wait for it in vain."""
        with contextlib.suppress(OSError):
            self._add(OVER)

    def is_over(self) -> bool:
        """Whether this rank's report is written, by the last process that trains as it."""
        return [word for word, _ in self._lines() if word != TWICE][-1:] == [OVER]

    def _add(self, word: str, told: str = "") -> None:
        with self._path.open("a") as file:
            file.write(f"{word} {told}\n")

    def _all(self, wanted: str) -> list[str]:
        return [told for word, told in self._lines() if word == wanted]

    def _lines(self) -> list[tuple[str, str]]:
        whole, _, _ = self._path.read_text().rpartition("\n") if self._path.exists() else ("", "", "")
        return [(word, told) for word, _, told in (line.partition(" ") for line in whole.splitlines())]


class ScriptRank(Rank):
    """The measurement of a training that perfsuite has not built: it is observed from its first step on."""

    observer: Observer  # there since `begin`

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
        first = self.observer.optimizer
        if optimizer is not first and self.recorder.counting is not None:
            self.recorder.counting.rebuilt()
        self.before_optimizer_step(first, args, kwargs)

    def check_second_step(self) -> None:
        """Raise `MismatchError` if the second step was not as the case says; else tell what it was given."""
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
        report = report.replace(observed=_with_script(report.observed, report.rank))
        if report.failure is not None:
            return report
        try:
            loss = () if self._losses is None else self._losses.of_steps(self.case.gradient_accumulation)
        except MismatchError as error:  # with all that was measured
            return report.replace(failure=failure_of(error, report.rank))
        # Last: only now it is known which share of the weights trains, and counting builds a model.
        flops = count_known(self.case, frozen_share=finetuning.frozen_share(self.observer.model))
        return report.replace(loss=loss, flops=with_float8(flops, self.observer.model))

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
    on_gpu = (p.device for p in parameters_of(optimizer) if p.device.type == "cuda")
    return next(on_gpu, None) or torch.device("cuda", torch.cuda.current_device())


def _with_script(observed: Observed, rank: int) -> Observed:
    """With what the script imported and a digest of it, so that a change of them is listed with a verdict."""
    imported = software.imported() if rank == 0 else {}
    return observed.replace(environment={**imported, **observed.environment, **software.program()})
