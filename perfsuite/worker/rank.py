"""Assemble the measurement of one rank of a job, and write its report.

`worker.main` uses this module for our own training loops, and `worker.script.attach` for the loops of
scripts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfsuite import documents, errors
from perfsuite.case.case import CaseFile
from perfsuite.case.fault import Fault
from perfsuite.frameworks.base import Ranks, framework_of
from perfsuite.results.counts import COUNTED_STEP, Counts, StepsToCount
from perfsuite.results.rank_report import Failure, FailureKind, Memory, RankReport, SpanTimes
from perfsuite.results.run_dir import RUN_DIR, RunDir
from perfsuite.worker.clock.collector import CollectorClock
from perfsuite.worker.clock.levels import MemoryLevels
from perfsuite.worker.clock.profiling import Profiling
from perfsuite.worker.clock.recorder import Recorder
from perfsuite.worker.clock.startup_clock import PERFSUITE, START_UP, Part, process_started_at
from perfsuite.worker.counting.growth import Growth
from perfsuite.worker.counting.python_calls import outside_of_steps
from perfsuite.worker.extra_metrics import ExtraMetrics
from perfsuite.worker.faults.injector import Injector
from perfsuite.worker.spans import phases

if TYPE_CHECKING:
    from perfsuite.frameworks.base import Workload
    from perfsuite.worker.clock.memory import CudaMemory, HostMemory
    from perfsuite.worker.clock.timers import HostTimer
    from perfsuite.worker.counting.steps import Counting
    from perfsuite.worker.observation.observe import Observer

# Seconds that a rank waits for the other ranks' reports. If it left earlier, it would break their
# connections.
WAIT_S = 60
NO_FAULT_OF_THE_CODE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""System errors that are the machine's fault: the disk is full, or cannot be written to."""
OUT_OF_MEMORY = "can't allocate memory|out of memory"
OF_NCCL = "NCCL error"
LAST_ERROR = re.compile(r"Last error:[ \t]*\n?[ \t]*(?!Exception raised from)(\S.*)")
"""Matches the line that names the cause in an NCCL message. It is several lines below the first line."""
NCCL_ASKED = "NCCL asked for this memory, which does not belong to torch's allocator"
GRAPHS_UNKNOWN = "it is unknown whether torch.compile made graphs: this version of torch does not count them"
LEAVE_S = 30  # seconds within which a rank must exit after its last measurement. Then an alarm ends it


class Rank:
    """The measurement of one process. `report` identifies the rank, and has no measurements yet."""

    workload: Workload  # the training job, which `build` sets
    recorder: Recorder  # the clock, which `build` sets
    observer: Observer | None = None  # set by `observe`. None in a simulated job

    def __init__(self, run_dir: RunDir, request: CaseFile, report: RankReport) -> None:
        self.run_dir = run_dir
        self.request = request
        self.case = request.case
        self.framework = framework_of(request.case)
        self.plan = self.framework.plan(request.case)
        self.report = report
        self.device: Any = None  # the `torch.device`, which `build` sets. None in a simulated job
        self.device_probe: dict[str, float] = {}  # rates of the device (`perfsuite.worker.probes.node_probe`)
        self.notes: list[str] = []  # notes for readers of the results
        # Id of an optimizer -> the last training step in which `_show` passed on a step of this optimizer.
        self._shown_in: dict[int, int] = {}
        self._extra: ExtraMetrics | None = None
        self._injector: Injector | None = None
        if request.inject is not None:
            is_last_rank = report.rank == report.world_size - 1
            self._injector = Injector(
                Fault.parse(request.inject),
                is_last_rank=is_last_rank,
                training=self._training,
                on_reached=run_dir.injected.touch,
            )

    def build(
        self,
        timer: HostTimer,
        *,
        device: Any = None,
        probe: Callable[[], object] | None = None,
        memory: HostMemory | CudaMemory | None = None,
    ) -> None:
        """Create the clock, then let the framework build its training job on `device` (a `torch.device`)."""
        self.device = device
        before_end = None if self._injector is None else self._injector.before_end
        profiling = None
        if self.request.profile:
            profiling = Profiling(warmup=self.case.max_warmup_steps, device=self.request.device)
            probe = None  # the profile must not contain the probe's operators
        self.recorder = Recorder(timer, probe=probe, memory=memory, before_end=before_end)
        self.recorder.profiling = profiling
        if device is not None:
            self.recorder.collector = CollectorClock(timer.host)
            self.recorder.levels = MemoryLevels(device, self.case.total_steps)
        report = self.report
        directory = self.run_dir.path
        ranks = Ranks(rank=report.rank, world_size=report.world_size, device=device, directory=directory)
        self.workload = self.framework.build(self.case, ranks, self.recorder)

    def observe(self) -> None:
        """Create the observer of the job that `build` created.

        After this, `before_optimizer_step` must be called before every optimizer step.
        """
        from perfsuite.worker.observation.observe import Observer

        self.observer = Observer(self.case, self.workload)
        if self.request.counts:
            self._count()

    def before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Pass an optimizer step to the observer and the counting. This is a hook for torch's optimizers.

        If the framework itself ends training steps (`LaunchPlan.clock`), an optimizer can step several times
        in one training step. Then only the first of these optimizer steps is passed on. Raises
        `MismatchError` if the training cannot be observed.
        """
        assert self.observer is not None
        with Part(PERFSUITE):
            self._show(optimizer, args, kwargs)

    def _show(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        assert self.observer is not None
        if self.plan.clock == "framework":
            if self._shown_in.get(id(optimizer)) == self.recorder.steps:
                return
            self._shown_in[id(optimizer)] = self.recorder.steps
        self.observer.before_optimizer_step(optimizer, args, kwargs)
        if self.recorder.counting is not None:
            self.recorder.counting.before_optimizer_step(optimizer, args, kwargs)

    @property
    def is_profiled(self) -> bool:
        """Whether this launch is for a profile, and all steps of the profile have been recorded."""
        return self.recorder.profiling is not None and self.recorder.profiling.is_over

    def profiled(self) -> RankReport:
        """Stop the clock and write the profile. Return a report without measurements."""
        self.recorder.finish()
        assert self.recorder.profiling is not None
        self.recorder.profiling.write(self.run_dir, self.report.rank)
        return self.report.replace(notes=tuple(self.recorder.profiling.notes))

    def _count(self) -> None:
        case = self.case
        steps = StepsToCount.of_timed(case.max_warmup_steps, case.total_steps)
        if self.request.counted_steps is not None:
            steps = StepsToCount.consecutive(self.request.counted_steps, case.total_steps)
        if case.max_warmup_steps < COUNTED_STEP:
            self.notes.append(
                f"the work of a step was not counted: max_warmup_steps={case.max_warmup_steps} leaves no "
                f"step to count before the measured steps. Give {COUNTED_STEP} or more"
            )
            return
        if self.recorder.profiling is None:  # a profiled launch ends before the last step
            # Begin after the counted steps. By then, the counting has freed its data about these steps.
            first = max(steps.until + 1, case.max_warmup_steps)
            last = case.total_steps if steps.late is None else steps.late - 1
            self.recorder.growth = Growth(first, last)
            # Build the validator of `Memory` now. If it were built later, its objects would be counted as
            # objects that steps keep.
            Memory.model_rebuild()
        try:  # a private name of torch might be missing
            from perfsuite.worker.counting.steps import Counting

            self.recorder.counting = Counting(self.model, steps)
        except Exception as error:
            self.notes.append(f"the work of a step was not counted: {errors.error_text(error)}")

    def start(self) -> None:
        """Report to the driver that training begins, then start the clock."""
        with Part(PERFSUITE):
            self._start()

    def _start(self) -> None:
        self._tell_progress()  # before the clock starts, because the file system can be slow
        if self.request.metrics:
            report = self.report
            self._extra = ExtraMetrics(self.request.metrics, self.model, report.rank, report.world_size)
            self.recorder.between_steps = self._extra.boundary
        if self.plan.needs_torch:
            from perfsuite.worker.clock import loaders
            from perfsuite.worker.observation import engines
            from perfsuite.worker.spans import events

            self.recorder.data_wait = loaders.begin()
            engines.look_again()
            if phases.spans is not None:
                events.look_again()
                phases.spans.train(lambda: self.recorder.steps, self.run_dir.running(self.report.rank))
        self.recorder.start()

    def model(self) -> Any:
        """Return the model that is trained, or None while it is unknown."""
        return self.workload.model if self.observer is None else self.observer.model

    def _training(self) -> tuple[Any, Any]:
        return (None, None) if self.observer is None else (self.observer.model, self.observer.optimizer)

    def finish(self) -> RankReport:
        """Stop the clock and collect everything except loss and FLOPs.

        The report contains a failure if the training did not match the case.
        """
        self.recorder.finish()
        # Read the memory first, because the observer's fingerprint and the losses also use memory.
        own_memory = self.workload.memory
        memory: Any = self.recorder.peak_memory() if own_memory is None else own_memory()
        report = self.report.replace(
            clock=self.recorder.timer.name,
            tokens_per_step=self.workload.tokens_per_step(self.case),
            step_s=tuple(self.recorder.step_s),
            probe_s=tuple(self.recorder.probe_s),
            cpu_s=tuple(self.recorder.cpu_s),
            **self._data_wait(),
            gc_s=self._gc_s(),
            levels=self._levels(),
            spans={**self.recorder.start_up_spans, **self._spans()},
            wall_s=self.recorder.wall_s,
            elapsed_s=self.recorder.elapsed_s,
            uptime_s=self.recorder.uptime_s,
            own_tokens_per_s=self.workload.own_tokens_per_s(),
            memory=memory,
            device_probe=self.device_probe,
            extra={} if self._extra is None else self._extra.result(),
        )
        return report if self.observer is None else self._observed(report, self.observer)

    def _observed(self, report: RankReport, observer: Observer) -> RankReport:
        from perfsuite.worker.clock import loaders
        from perfsuite.worker.counting import flops
        from perfsuite.worker.observation import autotuned, code, engines, software

        counting = self.recorder.counting
        if counting is not None:
            report = report.replace(
                counts=self._counts(counting), hidden=counting.hidden, other_threads=counting.other_threads
            )
            if counting.has_counted_late:
                report = report.replace(timed_steps=self.recorder.steps - 1)
            report = report.replace(
                gradient_squares=counting.gradient_squares, unclipped_squares=counting.unclipped_squares
            )
            self.notes += counting.notes
        if phases.spans is not None:
            self.notes += phases.spans.notes
        self.notes += engines.notes
        graphs = software.compiled_graphs()
        if graphs is None:
            self.notes.append(GRAPHS_UNKNOWN)
        # Call `result` before `evidence`, because `evidence` needs the fingerprint that `result` takes.
        observed = observer.result()
        notes = (*self.notes, *flops.notes(self.case))
        report = report.replace(compiled_anew=software.is_compiled_anew())
        if report.rank == 0 and graphs:
            report = report.replace(autotuned=autotuned.choices(self.run_dir.inductor_cache))
        observed = observed.replace(
            code=code.digest(process_started_at()),
            environment={**observed.environment, **loaders.settings()},
        )
        report = report.replace(
            observed=observed, evidence=observer.evidence(), dtypes=observer.dtypes, notes=notes
        )
        try:
            observer.check(observed)
        except errors.MismatchError as error:  # all ranks get this error, so no rank waits for another rank
            return report.replace(failure=failure_of(error, report.rank))
        return report

    def _gc_s(self) -> tuple[float, ...]:
        """Return the seconds that Python's garbage collector took in each step. Empty if they are unknown."""
        collector = self.recorder.collector
        if collector is None or collector.error is None:
            return tuple(self.recorder.gc_s)
        why = f"{type(collector.error).__name__}: {collector.error}"
        self.notes.append(f"the time of Python's garbage collector is unknown ({why})")
        return ()

    def _data_wait(self) -> dict[str, Any]:
        """Return the fields of the report about the wait for data."""
        wait = self.recorder.data_wait
        if wait is None:
            return {}
        if wait.is_unknown:
            from perfsuite.worker.clock import loaders

            self.notes.append(loaders.ELSEWHERE)
        return {"data_wait_s": wait.result(), "data_wait_is_unknown": wait.is_unknown}

    def _levels(self) -> dict[str, dict[int, int]]:
        """Return the memory in use after some steps: kind of memory -> number of the step -> bytes."""
        if self.recorder.levels is None:
            return {}
        self.notes += self.recorder.levels.notes
        return self.recorder.levels.bytes_at

    def _spans(self) -> dict[str, SpanTimes]:
        """Return the times of each event and each phase of the training."""
        return {} if phases.spans is None else phases.spans.times()

    def _counts(self, counting: Counting) -> Counts | None:
        """Return all counts, including those of loader workers, objects that steps keep, and spans.

        Returns None if no step was counted.
        """
        counts = counting.result()
        if counts is None:
            return None
        if self.recorder.data_wait is not None:
            from perfsuite.worker.counting import loader_workers

            pids = self.recorder.data_wait.worker_pids.values()
            batch, notes = loader_workers.batch_of(self.run_dir, pids)
            counts = counts.replace(worker_batch=batch)
            self.notes += notes
        if self.recorder.growth is not None:
            counts = counts.replace(kept=self.recorder.growth.result())
            self.notes += self.recorder.growth.notes
        start_up = self.recorder.start_up
        if start_up is not None:
            calls = start_up.calls or {}
            parts = {
                name: Counts(python=outside_of_steps(part_calls))
                for name, part_calls in sorted(calls.items())
            }
            of_start_up = {START_UP: Counts(modules=start_up.modules), **parts}
            counts = counts.replace(spans={**counts.spans, **of_start_up})
            if start_up.note:
                self.notes.append(start_up.note)
        if phases.spans is not None:
            counts = counts.replace(spans={**counts.spans, **phases.spans.counts()})
        return counts

    def abandon(self) -> None:
        """Remove perfsuite's hooks after an error in perfsuite. The training continues without them."""
        if phases.spans is not None:
            phases.spans.stop_reporting()
        phases.spans = None
        if self.recorder.collector is not None:
            self.recorder.collector.stop()
        for hook in (self.recorder.counting, self.recorder.profiling, self.observer):
            with contextlib.suppress(Exception):
                if hook is not None:
                    hook.abandon()

    def write(self, report: RankReport) -> None:
        """Write the report of this rank. An injected fault can change the report or suppress it."""
        changed = report if self._injector is None else self._injector.report(report)
        if changed is not None:
            documents.write(self.run_dir.rank(report.rank), changed)

    def _tell_progress(self) -> None:
        """Report progress in a separate thread, so that ranks do not wait for a slow file system."""
        tokens = self.workload.tokens_per_step(self.case)
        writer = threading.Thread()

        def tell(step: int) -> None:
            nonlocal writer
            if step >= self.case.total_steps:  # write in this thread, because nothing is measured any more
                if writer.ident is not None:
                    writer.join(WAIT_S)
                self.tell(step, tokens)
            elif not writer.is_alive():
                # If the thread is still writing an earlier step, this step is skipped.
                writer = threading.Thread(target=self.tell, args=(step, tokens), daemon=True)
                writer.start()

        if self.report.rank == 0:
            self.tell(0, tokens)
            self.recorder.on_progress = tell

    def tell(self, steps: int, tokens: int) -> None:
        """If this is rank 0, write the number of steps that have ended, and the tokens per step."""
        if self.report.rank == 0:
            # Ignore errors here: if no file can be written, writing the report raises an error later.
            with contextlib.suppress(OSError):
                self.run_dir.progress.write_text(f"{steps} {tokens}")


def empty_report(rank: int | None = None, world_size: int | None = None) -> RankReport:
    """Return a report without measurements.

    By default, rank and world size come from torchrun's environment variables.
    """
    if rank is None or world_size is None:
        rank = int(os.environ.get("RANK", "0"))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return RankReport(rank=rank, world_size=world_size, host=socket.gethostname(), clock="none")


def write_failure(run_dir: RunDir, report: RankReport, failure: Failure) -> None:
    """Write a report with a failure instead of measurements. Raises `FileError` if it cannot be written."""
    documents.write(run_dir.rank(report.rank), report.replace(failure=failure))


def failure_of(error: BaseException, rank: int) -> Failure:
    """Return the `Failure` with which the rank's report describes an error.

    A `ScriptError` gets no traceback, because its message already says why the script could not be measured.
    A `MismatchError` gets none either: its traceback would show only perfsuite's code, and its message says
    what to change.
    """
    has_none = isinstance(error, errors.ScriptError | errors.MismatchError)
    message = errors.message_of(error)
    if not isinstance(error, errors.PerfsuiteError):
        message = _in_a_line(error)
    return Failure(
        kind=_kind(error),
        message=message if has_none else _first_line(message),
        rank=rank,
        traceback=None if has_none else errors.readable("".join(traceback.format_exception(error))),
        at=time.time(),
    )


def _in_a_line(error: BaseException) -> str:
    """Return the class and the first line of an error, then the class and the first line of its root cause.

    The cause is needed because a library that imports lazily raises an error of its own. The message of that
    error might only say where to look for the cause.
    """
    message = _class_and_message(error)
    root = _root(error)
    if root is error:
        return message
    cause = _class_and_message(root)
    return message if cause.partition(": ")[2] in message else f"{message.rstrip(':. ')}: caused by {cause}"


def _class_and_message(error: BaseException) -> str:
    message = errors.message_of(error)
    said = f"{type(error).__name__}: {_first_line(message)}"
    if OF_NCCL not in message:
        return said
    cause = LAST_ERROR.search(message)
    if cause is not None:
        said = f"{said}: {cause[1].strip()}"
    if re.search(OUT_OF_MEMORY, message):
        said = f"{said}. {NCCL_ASKED}"
    return said


def _first_line(message: str) -> str:
    """Return the first line of a message, or the first two if the first one ends with a colon."""
    first, *others = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    return f"{first} {others[0]}" if others and first.endswith(":") else first


def _root(error: BaseException) -> BaseException:
    """Return the original error at the end of a chain of `raise ... from` and failed imports."""
    seen = [error]
    while (cause := _cause(seen[-1])) is not None and cause not in seen:
        seen.append(cause)
    return seen[-1]


def _cause(error: BaseException) -> BaseException | None:
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    # The context is not always the cause: it can be an unrelated error that was being handled at the time.
    is_of_import = isinstance(error, ImportError) or "import" in errors.message_of(error)
    return error.__context__ if is_of_import and isinstance(error.__context__, ImportError) else None


def failure_of_ours(error: BaseException, rank: int) -> Failure:
    """Return the `Failure` that describes an error in perfsuite's observation of a script."""
    failure = failure_of(error, rank)
    if failure.kind != "crash":
        return failure
    message = f"perfsuite could not observe this script because of an error in perfsuite: {failure.message}"
    return failure.replace(kind="error", message=message)


def report_error(error: BaseException) -> None:
    """Report the error that prevented perfsuite from attaching to this process of a script."""
    report = empty_report()
    write_failure(RunDir(Path(os.environ[RUN_DIR])), report, failure_of_ours(error, report.rank))


def _kind(error: BaseException) -> FailureKind:
    cause = error.__cause__ if isinstance(error, errors.FileError) else error
    is_of_the_system = isinstance(cause, OSError) and cause.errno in NO_FAULT_OF_THE_CODE
    if is_of_the_system or isinstance(error, errors.ExtensionError | errors.PrivateNameError):
        return "error"
    if isinstance(error, errors.MismatchError):
        return "mismatch"
    if isinstance(error, errors.DryRunError):
        return "not_dry"
    # If memory runs out, torch's CPU allocator and the GPU's driver raise a plain RuntimeError.
    is_told = isinstance(error, RuntimeError) and re.search(OUT_OF_MEMORY, errors.message_of(error))
    if is_told or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out_of_memory"
    return "crash"
