"""Measure a process of a script as a rank, beginning with its first step. Imports torch."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable
from itertools import starmap
from typing import TYPE_CHECKING, Any, Literal

import torch

from perfsuite import documents
from perfsuite.analysis import agreement
from perfsuite.case.case import CaseFile
from perfsuite.errors import MismatchError, message_of
from perfsuite.frameworks.common import finetuning
from perfsuite.frameworks.common.float8 import with_float8
from perfsuite.inputs.files import LARGEST_OWN, read_text
from perfsuite.results.rank_report import RankEvidence, RankReport
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import leash
from perfsuite.worker.clock import loaders, memory, timers
from perfsuite.worker.counting.flops import count_known
from perfsuite.worker.hooks.named import NamedFunction, Search
from perfsuite.worker.observation import software
from perfsuite.worker.observation.optimizers import Optimizers, living, parameters_of
from perfsuite.worker.probes.node_probe import device_probe
from perfsuite.worker.rank import WAIT_S, Rank, failure_of
from perfsuite.worker.script.losses import Losses
from perfsuite.worker.spans.phases import NamedPhase

if TYPE_CHECKING:
    from perfsuite.worker.observation.observe import Observer

Standing = Literal["first", "next", "child"]
TOLD_AFTER = 3  # number of steps after which the first steps are checked. A mismatch then ends the launch
ENDED = ("crash", "out_of_memory")  # kinds of failures after which a shell script can start the rank again
TRAINS = "trains"
GIVEN = "given"
TWICE = "twice"
SKIPPED = (
    "a loss scaler skipped optimizer steps because gradients overflowed. The time of a skipped pass is part "
    "of the next step: {}"
)
MAY_BE_SCALED = (
    "the loss is unknown: the model computes in float16, and perfsuite has seen no loss scaler. A scaler "
    "that perfsuite does not know might have multiplied the losses"
)
WAIT_POLL_S = 0.1  # seconds between checks for the other ranks' reports. A check can access a file server
COPIES = (
    "the norm of the gradients is unknown: the optimizer {} updates copies of the model's parameters, and "
    "the ranks might hold different parts of these copies"
)


def named_functions(framework: Any) -> list[NamedFunction]:
    """Return the functions that the case names: the loader and the phases of the script."""
    loader = getattr(framework, "loader", None)
    named = [] if loader is None else [loaders.NamedLoader(loader)]
    return [*named, *starmap(NamedPhase, getattr(framework, "phases", {}).items())]


class Claim:
    """Decides which process of a launch is measured as `rank`: the first process that trains as this rank.

    Other processes can train as well: later stages of a shell script, child processes, or workers. All these
    processes share a file, to which they add the following lines:

    - `trains PID HOST`: this process trains as the rank
    - `given EVIDENCE`: the input of the model in the second step
    - `twice`: two processes have trained as the rank
    """

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self._rank = rank
        self._report = run_dir.rank(rank)
        self._path = run_dir.training(rank)

    def stand(self) -> Standing:
        """Record that this process is about to train as this rank. Return its relation to other processes:

        - `first`: no other process has trained as this rank
        - `next`: the previous process that trained as this rank ended or crashed before it was measured
        - `child`: an ancestor of this process trains as this rank

        Raises `MismatchError` if another process trains as this rank, or has been measured as this rank.
        """
        host = socket.gethostname()
        mine = f"{os.getpid()} {host}"
        # Write before reading. If two processes do this at the same time, one of them then sees the other's
        # line.
        self._add(TRAINS, mine)
        processes = self._all(TRAINS)
        before = processes[: processes.index(mine)]
        if not before:
            return "first"
        pid, _, where = before[-1].partition(" ")
        if where == host and int(pid) in leash.ancestors():
            return "child"
        report = documents.read_or_none(self._report, RankReport)
        if report is None:
            has_ended_by_itself = where == host and not leash.is_alive(int(pid))
        else:
            has_ended_by_itself = report.failure is not None and report.failure.kind in ENDED
        if has_ended_by_itself:
            return "next"
        self._add(TWICE)  # this line tells the first process that this process has trained
        raise self.twice()

    def give(self, evidence: RankEvidence) -> None:
        """Record the evidence of the second step, such as the number of tokens that the model got."""
        self._add(GIVEN, evidence.model_dump_json())

    def given(self) -> RankEvidence | None:
        """Return the evidence of the second step, or None if it is not recorded yet."""
        lines = self._all(GIVEN)
        return RankEvidence.model_validate_json(lines[-1]) if lines else None

    def is_twice(self) -> bool:
        """Return whether two processes have trained as this rank."""
        return bool(self._all(TWICE))

    def twice(self) -> MismatchError:
        """Create the error that both processes report."""
        return MismatchError(
            f"two processes of this command trained as rank {self._rank}, but only one process per rank can "
            "be measured, and it ends after its last measured step. Give each stage of training its own "
            "case. Processes that train together need a process group"
        )

    def _add(self, word: str, value: str = "") -> None:
        with self._path.open("a") as file:
            file.write(f"{word} {value}\n")

    def _all(self, wanted: str) -> list[str]:
        whole, _, _ = (
            read_text(self._path, LARGEST_OWN).rpartition("\n") if self._path.exists() else ("", "", "")
        )
        lines = (line.partition(" ") for line in whole.splitlines())
        return [value for word, _, value in lines if word == wanted]


class ScriptRank(Rank):
    """The measurement of a training run that a script has built. It begins with the first step."""

    observer: Observer  # set by `begin`

    def __init__(
        self,
        run_dir: RunDir,
        request: CaseFile,
        report: RankReport,
        *,
        losses: Losses | None,
        optimizers: Optimizers,
        search: Search,
        probe: Callable[[torch.device], dict[str, float]] = device_probe,
    ) -> None:
        super().__init__(run_dir, request, report)
        self.claim = Claim(run_dir, report.rank)
        self._probe = probe
        self._losses = losses
        self._optimizers = optimizers
        self._search = search
        self._skipped: list[int] = []  # for each skipped optimizer step: the number of the next step

    def begin(self, optimizer: Any, host_memory: memory.HostMemory) -> None:
        """Create the observer, and the clock for the steps of `optimizer`. Do not start the clock yet."""
        device = torch.device("cpu")
        counters: memory.HostMemory | memory.CudaMemory | None = host_memory
        if self.request.device == "cuda":
            device = device_of(optimizer)
            counters = None
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

    def before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Pass a step of the timed optimizer to the observer and the counting.

        A new optimizer can replace the first one. In the second step, also check that the step matches the
        case, and record its evidence. Raises `MismatchError` if the step does not match.
        """
        if self.observer.optimizer is not None and self.observer.optimizer is not optimizer:
            self.observer.optimizer = optimizer
            if self.recorder.counting is not None:
                self.recorder.counting.rebuilt(optimizer)
        super().before_optimizer_step(optimizer, args, kwargs)
        if self.recorder.steps == 1:
            self.observer.check_second_step()
            self.claim.give(self.observer.evidence())

    def skip_step(self) -> None:
        """Begin the running step again, because a loss scaler has skipped the optimizer's step."""
        self._skipped.append(self.recorder.steps + 1)
        self.observer.skip_step()
        if self.recorder.counting is not None:
            self.recorder.counting.skip_step()

    def check_first_steps(self) -> None:
        """Raise `MismatchError` if the first steps do not match the case.

        Each rank checks the names of loaders and phases and the number of micro-batches. Rank 0 also checks
        the number of tokens.
        """
        for named in self._search.named:
            named.check()
        if self._losses is not None:
            self._losses.check(self.case.gradient_accumulation, more_come=True)
        # Rank 0 checks the number of tokens for all ranks, because ranks can get different numbers of tokens.
        if self.report.rank == 0:
            evidence = [Claim(self.run_dir, number).given() for number in range(self.report.world_size)]
            report = self.report.replace(tokens_per_step=self.workload.tokens_per_step(self.case))
            of_ranks = [report.replace(evidence=of_rank) for of_rank in evidence]
            if None not in evidence:
                why = agreement.tokens_differ(of_ranks, self.case)
                if why is not None:
                    raise MismatchError(why)

    def look_for_names(self) -> None:
        """Look for functions that the case names and that the script did not define before its first step."""
        for named in self._search.look_late():
            self.notes.append(
                f"{named.name} was defined during the first {self.recorder.steps} steps: its times do not "
                "include earlier calls"
            )

    def measured(self) -> RankReport:
        """Return the report on all steps. Call this after the last step."""
        self.notes += self._optimizers.notes()
        steps_copies = self.observer.steps_copies
        if steps_copies:
            self.notes.append(COPIES.format(type(self.observer.optimizer).__name__))
        if self._skipped:
            skipped = Counter(self._skipped).items()
            steps = ", ".join(f"step {step} ({number} skipped)" for step, number in skipped)
            self.notes.append(SKIPPED.format(steps))
        why_unknown = self._why_loss_is_unknown()
        if why_unknown is not None:
            self.notes.append(why_unknown)
        report = self.finish()
        if steps_copies:
            report = report.replace(gradient_squares=None, unclipped_squares=None)
        assert report.observed is not None
        # Add the imported packages and a digest of the script, so that a verdict can list changes in them.
        imported = software.imported() if report.rank == 0 else {}
        environment = {**imported, **report.observed.environment, **software.program()}
        report = report.replace(observed=report.observed.replace(environment=environment))
        if report.failure is not None:
            return report
        try:
            loss = () if self._losses is None else self._losses.of_steps(self.case.gradient_accumulation)
        except MismatchError as error:  # report the failure, but keep all measurements
            return report.replace(failure=failure_of(error, report.rank))
        # Count FLOPs last, because counting builds a model, and because it needs the share of frozen weights,
        # which is known only now.
        flops = count_known(self.case, frozen_share=finetuning.frozen_share(self.observer.model))
        report = report.replace(flops=with_float8(flops, self.observer.model))
        if why_unknown is not None:
            return report.replace(loss_is_unknown=True)
        return report.replace(loss=loss)

    def _why_loss_is_unknown(self) -> str | None:
        if self._losses is None or self._losses.unknown is not None:
            return None if self._losses is None else self._losses.unknown
        computes_in = self.observer.settings.get("compute_dtype")
        is_fp16 = computes_in == "float16" or self.case.precision == "fp16-mixed"
        return MAY_BE_SCALED if is_fp16 and not self._losses.were_scaled else None

    def wait_for_others(self) -> None:
        """Wait until every rank has written its report, but not longer than `WAIT_S`."""
        until = time.monotonic() + WAIT_S
        while not self.run_dir.has_reports(self.case.topology.world_size) and time.monotonic() < until:
            time.sleep(WAIT_POLL_S)

    def are_all_measured(self) -> bool:
        """Return whether all ranks were measured without a failure. Only then can all join a collective."""
        files = map(self.run_dir.rank, range(self.case.topology.world_size))
        reports = [documents.read_or_none(file, RankReport) for file in files]
        return all(report is not None and report.failure is None for report in reports)

    def probed(self) -> dict[str, float]:
        """Return the rates of the device. Empty if the probe fails, for example for lack of memory."""
        is_gpu = self.device.type == "cuda"
        on_device = torch.cuda.device(self.device) if is_gpu else contextlib.nullcontext()
        with contextlib.suppress(Exception), on_device:
            return self._probe(self.device)
        return {}


def without_launcher(error: BaseException) -> str:
    """Return advice if an error is about a variable that a launcher would set. Empty for other errors."""
    named = re.search(r"\b(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR)\b", message_of(error))
    if named is None or not isinstance(error, KeyError | ValueError) or named[0] in os.environ:
        return ""
    return (
        f". {named[0]} is not set, because a single process is started as `python` would start it. If the "
        'script needs torchrun, give command=("torchrun", "--standalone", "--nproc-per-node=1", ...) in the '
        "case"
    )


def device_of(optimizer: Any) -> torch.device:
    """Return the GPU of the first parameter that is on a GPU. If there is none, return the current GPU."""
    on_gpu = (p.device for p in parameters_of(optimizer) if p.device.type == "cuda")
    return next(on_gpu, None) or torch.device("cuda", torch.cuda.current_device())
