"""Run an unmodified script dry, as one rank of its world, until its steps are counted. Imports torch."""

import contextlib
import copy
import dataclasses
import functools
import os
import signal
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from perfsuite.analysis import agreement
from perfsuite.dry import compilation, cuda, files, generation, imports, program, values
from perfsuite.dry.rank import DryRank, Enough
from perfsuite.errors import DryRunError, MismatchError, PerfsuiteError, ScriptError, error_text
from perfsuite.frameworks.common import pretend as wrappers
from perfsuite.frameworks.common import private
from perfsuite.frameworks.common.patches import attribute, module, replace, replace_everywhere, wrap
from perfsuite.frameworks.common.private import (
    SingleProcessDataLoaderIter,
    current_dispatch_mode_stack,
    disable_current_modes,
    fake_tensor,
)
from perfsuite.node.ranks import moved_command, moved_directory
from perfsuite.results.counts import FIRST_COUNTED, Counts
from perfsuite.results.rank_report import Observed, RankEvidence
from perfsuite.results.run_dir import FILES, LAUNCH_DIR, RunDir
from perfsuite.worker.hooks import calls
from perfsuite.worker.hooks.imports import AfterImport
from perfsuite.worker.hooks.named import Search
from perfsuite.worker.observation import engines, software
from perfsuite.worker.observation.observe import Observer, owner
from perfsuite.worker.observation.optimizers import Optimizers
from perfsuite.worker.observation.second_step import NO_LINEAR
from perfsuite.worker.rank import failure_of, write_failure
from perfsuite.worker.script.losses import Passes, loss_of
from perfsuite.worker.script.script_rank import TOLD_AFTER, named_functions, without_launcher
from perfsuite.worker.spans import phases
from perfsuite.worker.spans.recording import Spans

INSTEAD = "Launch the case, or choose options of the script that avoid this"
NEEDS_A_VALUE = (fake_tensor.DynamicOutputShapeException, fake_tensor.DataDependentOutputException)
INVENTED_BOOL = (
    "the script reads a bool that has no value in a dry run, and gets True ({}). If the value decides how "
    "much work a step does, the counts can be wrong"
)
COPIES = (
    "the optimizer {} updates tensors that belong to no module. They are assumed to be copies of the model's "
    "parameters. This was not checked"
)


class DryScript(DryRank):
    """A rank whose script builds and trains the model. The clock is attached from outside, as in a launch."""

    answers = values.WholeNumbersAreReal
    builds_as_launched = True
    _observer: Observer  # set by the first step
    _search: Search  # set before the script begins
    _spans: Spans  # set before the script begins
    # The error that ended the script. It is kept here, because the script might catch an error from a hook.
    _refused: Exception | None = None

    def _pretend(self) -> None:
        if self.device.type == "cuda":
            cuda.pretend(self._machine, self.log)
        else:
            cuda.hide()
        values.pretend_tensors()
        values.pretend_answers()
        values.pretend_ranks()
        _save_nothing()
        imports.when_imported("accelerate.utils.random", _keep_own_states)
        wrappers.ddp()
        wrappers.fsdp1()
        _load_data_here()
        wrap(torch, "load", _onto_cpu)
        values.on_invented_bool = self._reads_invented_bool
        AfterImport({generation.CRITERIA: generation.pretend}, self._makes_one_token).begin()
        self.compilation.pretend()

    def _reads_invented_bool(self) -> None:
        """Note the line of the script that reads a bool without a value, in a counted step.

        Reads by libraries are not noted: there are many, and most of them only check the arguments of a call.
        """
        if not FIRST_COUNTED <= self.recorder.steps + 1 <= self.steps.until:
            return
        where = program.place(reversed([*traceback.walk_stack(None)]), in_libraries=False)
        note = INVENTED_BOOL.format(where)
        if where is not None and note not in self.notes:
            self.notes.append(note)

    def _makes_one_token(self, error: Exception) -> None:
        self.notes.append(f"generate of transformers makes only one token in each call: {error_text(error)}")

    def _train(self) -> None:
        self.workload = self.framework.build(self.case, self.ranks, self.recorder)
        self._optimizers = Optimizers(getattr(self.framework, "clock", None))
        self._passes = Passes() if self.framework.promises.loss is not None else None
        engines.watch()
        calls.before(torch.autograd, "backward", self._before_backward)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self.recorder.between_steps = self._end_when_counted
        self._search = Search(named_functions(self.framework))
        self._spans = phases.spans = Spans()
        command = self.framework.plan(self.case).command
        counting = self.recorder.counting
        assert command is not None
        assert counting is not None
        own = RunDir(self.ranks.directory).files
        own.mkdir(exist_ok=True)
        os.environ[FILES] = str(own.resolve())
        words = [word.replace(LAUNCH_DIR, str(own.resolve())) for word in moved_command(command.words)]
        os.chdir(moved_directory(command.directory))
        signal.signal(signal.SIGALRM, self._late)
        signal.setitimer(signal.ITIMER_REAL, self.case.timeout_s)
        try:
            with self._later_steps_may_fail(), self._files_kept():
                self._search.begin()
                program.run(words, rank=self.ranks.rank, world_size=self.ranks.world_size)
        except Enough:
            if self._refused is not None:
                raise self._refused from None
            return
        except SystemExit as error:
            if error.code not in (None, 0):
                raise ScriptError(f"the script ended with exit code {error.code}") from error
        except Exception as error:
            raise _explained(error) from error
        if counting.counts is None:
            raise _explained(ScriptError(f"the script ended after {self._made()}"))

    @contextlib.contextmanager
    def _files_kept(self) -> Iterator[None]:
        """Let the script change no file that existed before, except in the directory of the run."""
        with tempfile.TemporaryDirectory() as scratch:
            kept = files.Kept(Path(scratch), free=(self.ranks.directory,))
            try:
                with kept.replaced():
                    yield
            finally:
                if _skipped_savers:
                    kept.remove_empty()
                self.notes += kept.notes()

    def _made(self) -> str:
        made = f"{self.recorder.steps} of {self.steps.until} optimizer steps"
        return f"{made}. {self._optimizers.summary()}"

    def _late(self, number: int, frame: FrameType | None) -> None:
        """Report the timeout in the signal handler, and exit.

        An exception raised through C++ code would kill the process before the process could report it.
        """
        where = program.place(reversed([*traceback.walk_stack(frame)]))
        at = f" ({where})" if where else ""
        was_counted = self.recorder.steps >= self.steps.until
        than = " for the steps that follow the counted steps," if was_counted else ""
        why = (
            f"the script exceeded its time limit of {self.case.timeout_s} s (timeout_s){than} "
            f"after {self._made()}{at}"
        )
        failure = failure_of(ScriptError(why), self.report.rank)
        write_failure(RunDir(self.ranks.directory), self.report, failure)
        os._exit(1)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._optimizers.takes_turn(optimizer):
            if self._optimizer is not None and self.recorder.counting is not None:
                self.recorder.counting.before_other_step(optimizer)
            return
        clock = self._optimizer or optimizer
        try:
            # Find the model now, because it can only be reached while the script runs.
            if self._optimizer is None:
                self._search.end()
                self._spans.train(lambda: self.recorder.steps)
                self.workload = dataclasses.replace(self.workload, model=owner(optimizer))
                self._observer = Observer(self.case, self.workload, has_values=False)
                self.environment |= software.program()
                self._start()
            self._observer.before_optimizer_step(clock, args, kwargs)
            if self.recorder.steps == 1:
                self._observer.check_second_step()
        except Exception as error:
            self._refused = error
            raise Enough from error
        self._before_optimizer_step(clock, args, kwargs)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._optimizers.count(optimizer):
            if self._passes is not None:
                # Without dispatch modes, this work of perfsuite is not counted.
                with disable_current_modes():
                    self._passes.end_step(optimizer)
            self.recorder.boundary()
            self._check_names()
            # The steps after the counted ones get their own time limit.
            if self.recorder.steps == self.steps.until:
                signal.setitimer(signal.ITIMER_REAL, self.case.timeout_s)
        elif self.recorder.counting is not None:
            self.recorder.counting.after_other_step()

    def _before_backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        loss = loss_of(tensors)
        if self._passes is not None and loss is not None and loss.numel() == 1:
            with disable_current_modes():
                self._passes.see(loss)

    def _settings(self) -> dict[str, str]:
        settings = dict(self._observer.settings)
        # A launch reports the attention kernel in its environment.
        self.environment["attention_kernel"] = settings.pop("attention_kernel")
        del settings["backend"]  # the backend is only simulated
        return settings

    def _check(self, settings: Mapping[str, str]) -> None:
        """Raise the same `MismatchError` as a launch if passes, tokens or gradients do not match the case."""
        if self._passes is not None:
            self._passes.check(self.case.gradient_accumulation)
        evidence = self._observer.evidence()
        counting = self.recorder.counting
        counts = None if counting is None else counting.counts
        # Replicas that are allowed to differ might only communicate after the counted steps.
        if counts is not None and not self.framework.promises.replicas_differ:
            sent = sum(each.count for each in counts.collectives if each.ranks > 1)
            evidence = evidence.replace(collectives=sent)
        report = self.report.replace(
            evidence=evidence,
            observed=Observed(settings=settings, environment=software.imported()),
            tokens_per_step=self.workload.tokens_per_step(self.case),
        )
        ranks = [report] * report.world_size  # any other rank would do the same
        wrong = agreement.tokens_differ(ranks, self.case) or agreement.trained_apart(ranks, self.case)
        if wrong is not None:
            raise MismatchError(wrong)
        self._check_phases()
        self.notes += agreement.token_notes(ranks, self.case)
        if self._observer.steps_copies:
            self.notes.append(COPIES.format(type(self._optimizer).__name__))
        unchecked = [*self._unchecked(settings, evidence, counts)]
        if unchecked:
            self.notes.append(f"claimed, not checked: {'; '.join(unchecked)}")

    def _check_names(self) -> None:
        """Check the loader and the phases that the case names, after step `TOLD_AFTER`, as a launch does.

        Ends the script if a name is wrong.
        """
        if self.recorder.steps == TOLD_AFTER:
            try:
                for named in self._search.named:
                    named.check()
            except MismatchError as error:
                self._refused = error
                raise Enough from error
        self._search.look_late()

    def _check_phases(self) -> None:
        """Raise the same `MismatchError` as a launch if a phase never ran.

        If it might still run in a later step or on another rank, add a note instead.
        """
        ranks = [self.report.replace(spans=self._spans.times())]
        steps = self.recorder.steps
        is_alone = self.report.world_size == 1
        if is_alone and steps == self.case.total_steps:
            wrong = agreement.phase_never_ran(ranks, self.case)
            if wrong is not None:
                raise MismatchError(wrong)
        of_rank = "" if is_alone else f" of rank {self.report.rank}"
        self.notes += [
            f"not checked: phase {phase!r} did not run in the {steps} steps of the dry run{of_rank}"
            for phase in agreement.phases_never_run(ranks, self.case)
        ]

    def _unchecked(
        self, settings: Mapping[str, str], evidence: RankEvidence, counts: Counts | None
    ) -> Iterator[str]:
        """Yield each claim of the case that this dry run could not check, with the reason."""
        case = self.case
        if settings["compute_dtype"] == NO_LINEAR:
            yield f"precision={case.precision!r} (no linear layer ran)"
        if self._passes is None:
            yield f"gradient_accumulation={case.gradient_accumulation} (loss=None)"
        has_tokens = evidence.tokens is not None
        recomputes = counts is not None and "recompute" in counts.flops
        yield from agreement.not_checked(case, settings, has_tokens=has_tokens, recomputes=recomputes)


def _explained(error: Exception) -> Exception:
    where = program.place(traceback.walk_tb(error.__traceback__))
    at = f" ({where})" if where else ""
    if isinstance(error, NEEDS_A_VALUE):
        return DryRunError(
            f"a dry run cannot do this: a shape or a branch depends on the values of a tensor{at}. {INSTEAD}"
        )
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    why = engines.not_dry()
    if why is not None:
        return DryRunError(f"a dry run cannot do this: {why}. Launch the case. {said}{at}")
    of_compile = compilation.explained(error)
    if of_compile is not None:
        error = of_compile
    if isinstance(error, PerfsuiteError):
        return type(error)(f"{error}{at}")
    if isinstance(error, EOFError | FileNotFoundError) and _skipped_savers:
        return DryRunError(
            "a dry run cannot load a checkpoint that the script saved before, because a dry run writes no "
            f"checkpoints: {said}{at}. {INSTEAD}"
        )
    return PerfsuiteError(f"{said}{at}{without_launcher(error)}")


def _keep_own_states(package: ModuleType) -> None:
    wrap(package, "synchronize_rng_state", _keep_own_state)


def _keep_own_state(synchronize: Any) -> Any:
    """Keep the random state of this rank, because the state that it receives has no values."""

    def synchronized(*args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(RuntimeError):
            synchronize(*args, **kwargs)

    return synchronized


_skipped_savers: set[str] = set()  # names of the saving functions that the script has called


def _save_nothing() -> None:
    """Replace the functions that save checkpoints.

    A checkpoint would have no values, and might overwrite one of the user's files.
    """
    savers = [(torch, "save")]
    checkpoint = module("torch.distributed.checkpoint")
    savers += [(checkpoint, name) for name in ("save", "async_save", "save_state_dict")]
    for package, name in savers:
        skip = _skip_async if name == "async_save" else _skip
        replace_everywhere(package, name, functools.partial(skip, name))
    imports.when_imported("safetensors.torch", _save_no_safetensors)


def _save_no_safetensors(package: ModuleType) -> None:
    replace_everywhere(package, "save_file", functools.partial(_skip, "save_file"))


class _Saved(Future[None]):
    """The result of an asynchronous saver: a completed future. Its two properties return this future."""

    @property
    def staging_completion(self) -> Future[None]:
        return self

    @property
    def upload_completion(self) -> Future[None]:
        return self


def _skip(name: str, *args: Any, **kwargs: Any) -> None:
    _skipped_savers.add(name)


def _skip_async(name: str, *args: Any, **kwargs: Any) -> _Saved:
    _skip(name)
    saved = _Saved()
    saved.set_result(None)
    return saved


def _onto_cpu(load: Any) -> Any:
    """Wrap `torch.load`: if `map_location` is a function, load onto the CPU instead of calling the function.

    Fake tensors support no such function, and most of these functions choose the CPU.
    """

    def loaded(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(f, "cpu" if callable(map_location) else map_location, *args, **kwargs)

    return loaded


def _load_data_here() -> None:
    """Load data in this process, with real values.

    The work of a loader's worker processes is not part of a step. In a dry run, this process does that work,
    but does not count it.
    """
    owner, next_data = private.place("next_data")
    load = attribute(owner, next_data)

    def with_values(self: Any) -> Any:
        values.WholeNumbersAreReal.loads_data = True
        try:
            return load(self)
        finally:
            values.WholeNumbersAreReal.loads_data = False

    class _FromWorkers(SingleProcessDataLoaderIter):
        def __init__(self, loader: Any) -> None:
            here = copy.copy(loader)
            here.num_workers = 0
            here.timeout = 0
            here.prefetch_factor = None
            super().__init__(here)

        def again(self, loader: Any, first_iter: bool = False) -> None:
            """Begin another epoch. Persistent workers then iterate over their data set anew."""
            _FromWorkers.__init__(self, loader)

    def without_counting(self: Any) -> Any:
        kept = [mode for mode in current_dispatch_mode_stack() if not hasattr(mode, "end_step")]
        with disable_current_modes(), contextlib.ExitStack() as stack:
            for mode in kept:
                stack.enter_context(mode)
            return with_values(self)

    _, reset = private.place("reset_loader")
    replace(_FromWorkers, reset, _FromWorkers.again)
    replace(_FromWorkers, next_data, without_counting)
    replace(owner, next_data, with_values)
    replace(*private.place("MultiProcessingDataLoaderIter"), _FromWorkers)
