"""A script dry: unmodified, as one rank of its world, up to the step that is counted. Imports torch."""

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.data import dataloader

from perfsuite.dry import cuda, program, values
from perfsuite.dry.rank import DryRank, Enough
from perfsuite.errors import DryRunError, MismatchError, PerfsuiteError, ScriptError
from perfsuite.frameworks.common import pretend as wrappers
from perfsuite.frameworks.common.patches import found, module, nothing, replace, wrap
from perfsuite.frameworks.common.sharding import DEEPSPEED_NOT_DRY
from perfsuite.node.ranks import moved
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.results.run_dir import FILES, LAUNCH_DIR, RunDir
from perfsuite.worker import software
from perfsuite.worker.observe import owner
from perfsuite.worker.optimizers import Optimizers, living
from perfsuite.worker.rank import failure_of, write_failure

NEEDS_A_VALUE = (fake_tensor.DynamicOutputShapeException, fake_tensor.DataDependentOutputException)
NOT_COMPILED = "the script compiles its model, and a dry run counts the step that is not compiled"


class DryScript(DryRank):
    """A rank that a script builds and trains: the clock attaches to it from outside, as in a launch."""

    answers = values.WholeNumbersAreReal
    _asked_to_compile = False

    def _pretend(self) -> None:
        if self.device.type == "cuda":
            cuda.pretend(self._machine)
        values.pretend_tensors()
        values.pretend_answers()
        values.pretend_ranks(self.report.rank, self.report.world_size)
        if importlib.util.find_spec("accelerate") is not None:
            wrap(module("accelerate.utils.random"), "synchronize_rng_state", _keep_own_state)
        wrappers.ddp()
        wrappers.fsdp1()
        _load_data_here()
        _save_nothing()
        replace(torch, "compile", self._not_compiled)
        replace(torch.nn.Module, "compile", self._not_compiled)

    def _train(self) -> None:
        self.workload = self.framework.build(self.case, self.ranks, self.recorder)
        self._optimizers = Optimizers(getattr(self.framework, "clock", None))
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self.recorder.between_steps = self._end_when_counted
        command, counting = self.framework.plan(self.case).command, self.recorder.counting
        assert command is not None
        assert counting is not None
        files = RunDir(self.ranks.directory).files
        files.mkdir(exist_ok=True)
        os.environ[FILES] = str(files.resolve())
        words = [moved(word).replace(LAUNCH_DIR, str(files.resolve())) for word in command.words]
        os.chdir(moved(command.directory))
        signal.signal(signal.SIGALRM, self._late)
        signal.setitimer(signal.ITIMER_REAL, self.case.timeout_s)
        try:
            program.run(words, rank=self.ranks.rank, world_size=self.ranks.world_size)
        except Enough:
            if self._asked_to_compile:
                counting.notes.append(NOT_COMPILED)
            return
        except SystemExit as error:
            if error.code not in (None, 0):
                raise ScriptError(f"the script ended with exit code {error.code}") from error
        except Exception as error:
            raise _explained(error) from error
        if counting.counts is None:
            raise _explained(ScriptError(f"the script ended after {self._made()}"))

    def _made(self) -> str:
        made = f"{self.recorder.steps} of {COUNTED_STEP} optimizer steps"
        return f"{made}. {self._optimizers.summary()}"

    def _late(self, number: int, frame: FrameType | None) -> None:
        """End this process: an error that left C++ code here would end it without a report."""
        where = program.place(reversed([*traceback.walk_stack(frame)]))
        at = f" ({where})" if where else ""
        why = f"the script was ended after {self.case.timeout_s} s (timeout_s) and {self._made()}{at}"
        failure = failure_of(ScriptError(why), self.report.rank)
        write_failure(RunDir(self.ranks.directory), self.report, failure)
        os._exit(1)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._optimizers.takes_turn(optimizer):
            if self._optimizer is None:  # what trains ends with the script
                self.workload = dataclasses.replace(self.workload, model=owner(optimizer))
                self.environment |= software.program()
                self.recorder.start()
            self._before_optimizer_step(self._optimizer or optimizer, args, kwargs)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._optimizers.count(optimizer):
            self.recorder.boundary()

    def _not_compiled(self, model: Any = None, *args: Any, **options: Any) -> Any:
        """Return what is to be compiled as it is. Libraries compile functions that nobody calls."""
        if model is None:
            return self._not_compiled
        if isinstance(model, torch.nn.Module):
            self._asked_to_compile = True
            return model

        @functools.wraps(model)
        def called(*args: Any, **kwargs: Any) -> Any:
            self._asked_to_compile = True
            return model(*args, **kwargs)

        return called

    def _settings(self) -> dict[str, str]:
        if not dist.is_initialized():
            if (asked := self.report.world_size) > 1:
                raise MismatchError(
                    f"world_size: the case asks for {asked}, and the script opened no process group"
                )
            with _disable_current_modes():
                dist.init_process_group()
        return super()._settings()

    def _check(self, settings: Any) -> None:
        if (found := settings["world_size"]) != str(self.case.topology.world_size):
            raise MismatchError(
                f"world_size: the case asks for {self.case.topology.world_size}, the script has {found}"
            )


def _explained(error: Exception) -> Exception:
    where = program.place(traceback.walk_tb(error.__traceback__))
    at = f" ({where})" if where else ""
    if isinstance(error, NEEDS_A_VALUE):
        return DryRunError(
            f"not by a dry run: a shape or a choice depends on the values of a tensor{at}. "
            "Launch the case, or choose options of the script by which it does not"
        )
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    engine = sys.modules.get("deepspeed.runtime.engine")
    if engine is not None and (isinstance(error, ScriptError) or living(engine.DeepSpeedEngine)):
        return DryRunError(f"not by a dry run: {DEEPSPEED_NOT_DRY}. Launch the case. {said}{at}")
    if isinstance(error, PerfsuiteError):
        return type(error)(f"{error}{at}")
    return PerfsuiteError(said + at)


def _keep_own_state(synchronize: Any) -> Any:
    """Go on with the random state of this rank: what it is sent has no values."""

    def synchronized(*args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(RuntimeError):
            synchronize(*args, **kwargs)

    return synchronized


def _save_nothing() -> None:
    """Write no checkpoint: there are no values, and a file of the user's may stand there."""
    replace(torch, "save", nothing)
    checkpoint = module("torch.distributed.checkpoint")
    for name in ("save", "async_save", "save_state_dict"):
        replace(checkpoint, name, nothing)
    if importlib.util.find_spec("safetensors") is not None:
        replace(module("safetensors.torch"), "save_file", nothing)


def _load_data_here() -> None:
    """Load data in this process, with their values. What workers would do is no part of a step."""
    load = found(dataloader._SingleProcessDataLoaderIter, "_next_data")

    def with_values(self: Any) -> Any:
        values.WholeNumbersAreReal.loads_data = True
        try:
            return load(self)
        finally:
            values.WholeNumbersAreReal.loads_data = False

    class _FromWorkers(dataloader._SingleProcessDataLoaderIter):
        def __init__(self, loader: Any) -> None:
            here = copy.copy(loader)
            here.num_workers, here.timeout, here.prefetch_factor = 0, 0, None
            super().__init__(here)

        def _next_data(self) -> Any:
            kept = [mode for mode in _get_current_dispatch_mode_stack() if not hasattr(mode, "end_step")]
            with _disable_current_modes(), contextlib.ExitStack() as stack:
                for mode in kept:
                    stack.enter_context(mode)
                return super()._next_data()  # type: ignore[no-untyped-call]

    replace(dataloader._SingleProcessDataLoaderIter, "_next_data", with_values)
    replace(dataloader, "_MultiProcessingDataLoaderIter", _FromWorkers)
