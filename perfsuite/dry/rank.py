"""Run one rank dry: build the case as this rank of its world, take a few steps, and count them."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.dry import compilation, cuda, values
from perfsuite.dry.fit import predict
from perfsuite.dry.operators import Operators
from perfsuite.dry.storages import recorded
from perfsuite.errors import DryRunError, MismatchError, error_text, message_of
from perfsuite.frameworks.base import DryPlan, Framework, Ranks, Workload, framework_of
from perfsuite.frameworks.common import finetuning, float8, own_list
from perfsuite.frameworks.common.model import DTYPES, dtype_name, model_without_weights
from perfsuite.frameworks.common.private import FakeTensor, FakeTensorMode, active_fake_mode
from perfsuite.results import device_log_file
from perfsuite.results.counts import COUNTED_STEP, StepsToCount
from perfsuite.results.device_log import DeviceLog, EmptyCache, EndOfStep
from perfsuite.results.rank_report import Observed, RankReport
from perfsuite.results.run_dir import RunDir
from perfsuite.worker.clock.recorder import Recorder
from perfsuite.worker.clock.startup_clock import process_started_at
from perfsuite.worker.clock.timers import HostTimer
from perfsuite.worker.counting.flops import count_known
from perfsuite.worker.counting.growth import Growth
from perfsuite.worker.counting.steps import Counting
from perfsuite.worker.hooks import calls
from perfsuite.worker.observation import code, frozen, software
from perfsuite.worker.observation.dtypes import dtypes_of
from perfsuite.worker.observation.observe import owner, wrapping

STEPS_OF_GROWTH = 3
"""Number of steps that run after the counted steps, to count the objects that each step keeps.

`Growth` counts objects before the first of these steps, after the first, and after the third. perfsuite looks
for the holders of objects that the second step created, because objects that the third step created might
still be in use."""
COUNT_FEWER = "If this is intended, count fewer steps: Case(counted_steps=...)"


class DryGrowth(Growth):
    """Counts the objects that steps keep, without the objects that fake tensors and perfsuite keep.

    `FakeTensorMode` caches the result of each operator by its arguments. Some arguments differ in each step,
    so the cache would grow.
    """

    def _count(self) -> None:
        FakeTensorMode.cache_clear()
        _forget_dead_constants()
        own_list.clear(FakeTensor)  # empties the lists of fake losses, whose values nobody can read
        super()._count()


def _forget_dead_constants() -> None:
    """Drop the fake mode's records of constant tensors that no longer exist."""
    mode = active_fake_mode()
    if mode is None:
        return
    constants = mode.fake_tensor_converter.constant_storage_mapping
    for storage, tensors in [*constants.items()]:
        alive = [tensor for tensor in tensors if tensor() is not None]
        if alive and not storage.expired():
            constants[storage] = alive
        else:
            del constants[storage]


class Enough(BaseException):
    """Ends the training once its steps are counted. No library catches its base, `BaseException`."""


class DryRank:
    """One simulated rank. `report` contains the number of the rank and the world size."""

    workload: Workload  # the training; set once it is built
    environment: dict[str, str]  # versions and variables of this process
    answers: type[values.NoValues] = values.NoValues
    builds_as_launched = False  # whether the model is built by the same operators as in a launch

    def __init__(
        self, case: Case, report: RankReport, machine: Machine, directory: Path, counted_steps: int = 1
    ) -> None:
        self.case = case
        self.steps = StepsToCount.consecutive(counted_steps, case.total_steps, left=STEPS_OF_GROWTH)
        self.last_step = self.steps.until + STEPS_OF_GROWTH
        self.report = report
        self.framework: Framework = framework_of(case)
        self.plan = self.framework.dry(case) or DryPlan()
        self.device = torch.device("cuda", 0) if machine.device == "cuda" else torch.device("cpu")
        self.recorder = Recorder(HostTimer())
        self._growth = self.recorder.growth = DryGrowth(self.steps.until, self.last_step)
        self.ranks = Ranks(
            rank=report.rank, world_size=report.world_size, device=self.device, directory=directory
        )
        self.compilation = compilation.Compilation()
        self.log = DeviceLog()  # up to the end of the reported step
        self._operators = Operators(self.log) if self.device.type == "cuda" else None
        self.notes: list[str] = []  # facts that a reader of the counts needs to know
        self._error: Exception | None = None  # what ended the training after the reported step was counted
        self._machine = machine
        self._optimizer: Any = None
        self._built_bytes = 0

    def counted(self) -> RankReport:
        """Build the case, take the steps, and return a report with their counts."""
        # Read the environment before anything is faked.
        self.environment = software.environment(self.case.framework.packages)
        flops = count_known(self.case)
        if self.plan.builds_whole:
            # The case's attention might need a GPU, which is not faked yet. Eager attention has the same
            # parameters.
            plain = self.case.replace(attention="eager")
            model = model_without_weights(plain, torch.device("meta"))
            whole = sum(each.numel() * each.element_size() for each in model.parameters())
            self._built_bytes = whole // self.plan.built_over
        self._pretend()
        calls.watch()
        frozen.watch()
        with FakeTensorMode(allow_non_fake_inputs=True), self.answers(), self._recorded():
            counting = self.recorder.counting = Counting(self._model, self.steps, self._operators)
            self._train()
            settings = self._settings()
            dtypes = dtypes_of(self._model(), self._optimizer) if self._optimizer is not None else {}
        self._check(settings)
        if counting.counts is None:
            why = "; ".join(counting.notes) or f"training ended after {self.recorder.steps} steps"
            raise DryRunError(f"nothing was counted: {why}")
        counts = compilation.without_kernels(counting.counts, software.compiled_counts())
        counts = counts.replace(kept=self._growth.result())
        self._write_log()
        return self.report.replace(
            counts=counts,
            hidden=self._cut_short(),
            fit=predict(
                self.log.entries,
                counts,
                self._machine,
                self.report.rank,
                built=self._built_bytes,
                builds_as_launched=self.builds_as_launched,
            ),
            flops=self.workload.flops or flops,
            dtypes=dtypes,
            observed=Observed(
                settings=settings,
                environment={**software.imported(), **self.environment},
                code=code.digest(process_started_at()),
            ),
            tokens_per_step=self.workload.tokens_per_step(self.case),
            notes=(
                *self.workload.notes,
                *self.notes,
                *self.compilation.notes(counts),
                *counting.notes,
                *self._growth.notes,
            ),
        )

    def _pretend(self) -> None:
        """Load the framework's libraries, and replace the functions that cannot run dry.

        The order of the calls matters, because imports copy names.
        """
        if self.device.type == "cuda":
            cuda.pretend(self._machine, self.log)
        else:
            cuda.hide()
        self.compilation.pretend()
        values.pretend()
        self.framework.load(self.case, self.device)
        values.pretend_ranks()
        self.plan.pretend()

    def _train(self) -> None:
        """Train with the framework's `build` and the workload's `run` until all steps are counted."""
        plan = self.framework.plan(self.case)
        if plan.process_group != "library":
            dist.init_process_group()
        self.workload = self.framework.build(self.case, self.ranks, self.recorder)
        register_optimizer_step_pre_hook(self._before_optimizer_step)
        if plan.clock == "torch":
            register_optimizer_step_post_hook(self.recorder.after_optimizer_step)
        self.recorder.between_steps = self._end_when_counted
        self._start()
        with contextlib.suppress(Enough), self._later_steps_may_fail():
            self.workload.run(self.case.total_steps)

    @contextlib.contextmanager
    def _later_steps_may_fail(self) -> Iterator[None]:
        """Catch an error that follows the reported step.

        `_cut_short` then reports that this error ended the training.
        """
        try:
            yield
        except Exception as error:
            assert self.recorder.counting is not None
            if self.recorder.counting.counts is None:
                raise
            self._error = error

    def _cut_short(self) -> tuple[str, ...]:
        """Return why the training took fewer steps than were to be counted. Empty if it took all steps.

        The missing steps could do more work, or keep more objects, than the counted ones.
        """
        wanted = min(self.last_step, self.case.total_steps)
        made = self.recorder.steps
        if made >= wanted:
            return ()
        why = f": {type(self._error).__name__}: {message_of(self._error)}" if self._error else ""
        return (f"the training ended after {made} of {wanted} steps{why}. {COUNT_FEWER}",)

    def _before_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        assert self.recorder.counting is not None
        self.recorder.counting.before_optimizer_step(optimizer, args, kwargs)

    def _write_log(self) -> None:
        """Write the log, from which the time of a step can be predicted."""
        if self._operators is None:
            return
        if self._operators.error is not None:
            self.notes.append(f"the time of a step is unknown: {error_text(self._operators.error)}")
            return
        device_log_file.write(RunDir(self.ranks.directory).device_log(self.report.rank), self.log.entries)

    def _recorded(self) -> contextlib.AbstractContextManager[None]:
        return recorded(self.log) if self.device.type == "cuda" else contextlib.nullcontext()

    def _start(self) -> None:
        """Begin the first step. In a launch, `Recorder.start` also empties the allocator's cache."""
        self.log.add(EmptyCache())
        self.recorder.start()

    def _end_when_counted(self, steps: int) -> None:
        self.log.add(EndOfStep(steps))
        if steps == COUNTED_STEP:
            self.log.close()
        if steps == self.last_step:
            raise Enough

    def _model(self) -> Any:
        model = self.workload.model
        # Compare with None. A compiled model has no length, so its truth value cannot be tested.
        return owner(self._optimizer) if model is None else model

    def _settings(self) -> dict[str, str]:
        """Return the settings of the model and the optimizer that can be observed without values."""
        model = self._model()
        return {
            **wrapping(model),
            "world_size": str(dist.get_world_size()),
            "device": self.device.type,
            "parameter_dtype": ", ".join(sorted({dtype_name(each.dtype) for each in model.parameters()})),
            "optimizer": type(self._optimizer).__name__,
            "compiled": "yes" if software.compiled_graphs() else "no",
            **finetuning.observed(model),
            **float8.observed(model),
            **self.workload.settings,
        }

    def _check(self, settings: Mapping[str, str]) -> None:
        """Raise `MismatchError` if an observed setting differs from the case."""
        dtype = dtype_name(DTYPES[self.case.precision])
        compiled = "yes" if self.case.compile else None
        expected = {"parameter_dtype": dtype, "compiled": compiled, **self.framework.expected(self.case)}
        for key, asked in expected.items():
            if asked is not None and key in settings and settings[key] != asked:
                raise MismatchError(f"{key}: the case asks for {asked!r}, but {settings[key]!r} was built")
