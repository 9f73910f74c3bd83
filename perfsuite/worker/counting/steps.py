"""Decide which steps of a launch are counted, and keep the counts. Imports torch."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.nn.parameter import is_lazy

from perfsuite.errors import error_text
from perfsuite.frameworks.common import private
from perfsuite.frameworks.common.private import (
    active_fake_mode,
    current_dispatch_mode,
    current_dispatch_mode_stack,
    len_dispatch_stack,
    pop_mode,
    push_mode,
)
from perfsuite.results.counts import (
    COUNTED_STEP,
    FIRST_COUNTED,
    Counts,
    StepMemory,
    StepsToCount,
)
from perfsuite.results.quantities import FLOOR as MEMORY_FLOOR
from perfsuite.results.quantities import python_unless_alike
from perfsuite.worker.counting import gradients
from perfsuite.worker.counting.counter import Listener, StepCounter
from perfsuite.worker.counting.gradients import NormBeforeClipping
from perfsuite.worker.counting.hidden import Watch
from perfsuite.worker.counting.live_memory import Batches
from perfsuite.worker.observation import engines, software
from perfsuite.worker.observation.optimizers import parameters_of
from perfsuite.worker.observation.replicas import squares
from perfsuite.worker.observation.second_step import in_backward, knows_backward

ONE_STEP = StepsToCount(until=COUNTED_STEP, late=None)
IN_BACKWARD = "the optimizer steps in backward"
COMPILED = "the optimizer's step is a part of a function that torch.compile has compiled"
REMOVED = "perfsuite's TorchDispatchMode was removed during the step"


def _to_a_note(method: Callable[..., None]) -> Callable[..., None]:
    """Turn an error in `method` into a note. The error ends the counting, but not the training."""

    @functools.wraps(method)
    def guarded(self: Counting, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self._give_up(error_text(error))

    return guarded


class Counting:
    """Keeps a `StepCounter` active in some steps, but not between steps.

    The rank calls `before_optimizer_step` before each optimizer step. When a step has ended, the rank
    calls `end_step` before anything else. Just before the next step begins, the rank calls `begin_step`.
    `model` is called between steps, and returns the trained model. `listener` is notified of the calls in
    counted steps.

    Errors become notes, and never reach the training. There is one exception: the constructor raises
    `PrivateNameError` if torch does not distinguish forward from backward.
    """

    def __init__(
        self, model: Callable[[], Any], steps: StepsToCount = ONE_STEP, listener: Listener | None = None
    ) -> None:
        if not knows_backward():
            raise private.NAMES["current_graph_task"].missing()
        # The counts of step `COUNTED_STEP` and of later steps. None if step `COUNTED_STEP` was not counted.
        self.counts: Counts | None = None
        self.notes: list[str] = []  # reasons why a step was not counted, or why a norm was not read
        self.steps = steps
        self.has_counted_late = False  # whether the late step was counted. Counting makes this step slower
        # The squared norm of this rank's gradients, as in `RankReport`.
        self.gradient_squares: float | None = None
        self.unclipped_squares: float | None = None  # the squared norm of these gradients before clipping
        # The highest number of other Python threads that computed in a counted step.
        self.other_threads = 0
        self.hidden: tuple[str, ...] = ()  # reasons why the step did more work than was counted
        self._model = model
        self._listener = listener
        self._watch: Watch | None = None
        # The optimizers that have stepped. A step of the first one is a step of the training. The first one
        # can itself step the others.
        self._optimizers: list[Any] = []
        # The optimizers whose steps do not end training steps (`before_other_step`).
        self._others: list[weakref.ref[Any]] = []
        self._counter: StepCounter | None = None
        self._norm: NormBeforeClipping | None = None  # reads the norm in the reported step
        self._runs_closure = False  # whether the optimizer runs forward and backward itself
        self._batches: Batches | None = None  # the batches that were loaded before the first counted step
        self._ended = 0
        self._modes = len_dispatch_stack()
        self._collector = Collector()

    @_to_a_note
    def before_optimizer_step(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        """Record that an optimizer is about to step.

        The optimizer phase of a training step begins when the first optimizer steps, and not when another
        optimizer steps. `args` and `kwargs` are the arguments of the optimizer's `step`, as torch passes them
        to hooks. The first of `args` is the optimizer itself.
        """
        if not any(optimizer is seen for seen in self._optimizers):
            self._optimizers.append(optimizer)
        if self._watch is not None:
            self._watch.stepped.append(optimizer)
        if self._counter is not None and optimizer is self._optimizers[0]:
            runs_closure = any(map(callable, (*args[1:], *(kwargs or {}).values())))
            self._counter.before_optimizer(runs_closure=runs_closure)
            self._runs_closure = runs_closure
            if self._norm is not None and not runs_closure:
                self._read_norms(self._norm, optimizer)

    @_to_a_note
    def before_other_step(self, optimizer: Any) -> None:
        """Record the start of an optimizer's step that does not end a training step.

        The work of this step belongs to the optimizer phase. The optimizer is not kept alive.
        """
        self._others = [other for other in self._others if other() is not None]
        if not any(other() is optimizer for other in self._others):
            self._others.append(weakref.ref(optimizer))
        if self._counter is not None:
            self._counter.before_other_optimizer(optimizer)

    @_to_a_note
    def after_other_step(self) -> None:
        """Record the end of such a step."""
        if self._counter is not None:
            self._counter.after_other_optimizer()

    def _parameters_of_others(self) -> list[Any]:
        living = (other() for other in self._others)
        return parameters_of(*(optimizer for optimizer in living if optimizer is not None))

    def _read_norms(self, norm: NormBeforeClipping, optimizer: Any) -> None:
        self.gradient_squares = squares(each.grad for each in parameters_of(optimizer))
        if in_backward():  # some gradients do not exist yet, and this step will not be counted
            return
        at_step = None
        try:
            at_step = norm.read()
        except Exception as error:  # for example, a loss scaler cannot be read: only the norm is unknown
            norm.failed(error)
        self.unclipped_squares = norm.result(at_step)
        if norm.note is not None:
            self.notes.append(norm.note)

    def rebuilt(self, optimizer: Any) -> None:
        """Record that `optimizer` replaces the first optimizer, which is no longer kept alive.

        Stop counting if this happens in the first steps, because the new optimizer's state is not recognised.
        """
        if self._ended < self.steps.until and not self.notes:
            self._give_up("the script built a new optimizer in the first steps")
        self._optimizers[:1] = [optimizer]

    @_to_a_note
    def end_step(self) -> None:
        """End a step, and keep its counts if it was counted."""
        self._ended += 1
        if self._counter is None:
            return
        self._end(self._counter)
        self._collector.go_on()

    def _end(self, counter: StepCounter) -> None:
        """End a counted step."""
        if not self._leave(counter):
            return
        if in_backward():  # autograd will restore the dispatch modes that were active when backward began
            self._give_up(IN_BACKWARD)
            return
        counts = counter.end_step(self._ended)
        error = counter.error or counter.memory.error or self._collector.error
        if error is not None:
            raise error
        if self._ended == COUNTED_STEP:
            self._report(_with_cycles(counts, counter), counter)
        elif self.counts is not None:
            self._add(self.counts, counts, counter)
        if self._ended in (self.steps.until, self.steps.late):
            self.abandon()

    def _report(self, counts: Counts, counter: StepCounter) -> None:
        """Keep the counts of step `COUNTED_STEP`, the reported step."""
        self._read_late()
        self._norm = None
        if self._watch is not None:
            self.other_threads = self._watch.other_threads()
            self.hidden = self._watch.reasons(counter, counts, self._model())
        self.counts = counts

    def _add(self, reported: Counts, counts: Counts, counter: StepCounter) -> None:
        """Keep the counts of a later step, if all of its work was seen."""
        hidden: tuple[str, ...] = ()
        if self._watch is not None:
            self.other_threads = max(self.other_threads, self._watch.other_threads())
            hidden = self._watch.reasons(counter, counts, self._model())
        counts = counts.replace(
            python=python_unless_alike(counts.python, reported.python),
            memory=_memory_unless_alike(counts.memory, reported.memory),
        )
        if hidden:
            self.notes.append(f"step {counts.step} was not counted: {'; '.join(hidden)}")
        elif self._ended == self.steps.late:  # older storages are not known, so leave the memory out
            self.counts = reported.with_step(counts.replace(memory=None))
        else:
            self.counts = reported.with_step(counts)

    def _read_late(self) -> None:
        """Read the norms that were not available before the optimizer's step."""
        if self._norm is not None and self._runs_closure:  # the closure has computed the gradients by now
            self._read_norms(self._norm, self._optimizers[0])
        # Even if an engine has freed the gradients, it can know their norm before clipping. This norm does
        # not include fp16's loss scale.
        norm = engines.gradient_norm(self._optimizers[0])
        if norm is not None:
            self.gradient_squares = self.unclipped_squares = norm**2
            unread = self._norm.note if self._norm is not None else None
            self.notes = [note for note in self.notes if note != unread]

    @_to_a_note
    def skip_step(self) -> None:
        """Begin the running step again, because a loss scaler has skipped the optimizer's step.

        The work so far is not part of the step's counts. For step `FIRST_COUNTED`, only the reference cycles
        are reported. So only the record of these cycles begins again, and the counter stays active.
        """
        if self._counter is None:
            return
        if self._ended == FIRST_COUNTED - 1:
            self._counter.memory.begin_cycles_again()
            return
        if not self._leave(self._counter):
            return
        self._counter.skip_step()
        self._enter(self._counter)

    def _leave(self, counter: StepCounter) -> bool:
        """End counting for now. Return False, and stop counting for good, if the counter was removed."""
        if self._norm is not None:
            self._norm.leave()
        if not leave(counter):
            self._give_up(REMOVED)
            return False
        return True

    @_to_a_note
    def lack(self, why: str) -> None:
        """If the running step is counted, stop counting, because some of its work is missing."""
        if self._counter is not None:
            self._give_up(why)

    @_to_a_note
    def begin_step(self) -> None:
        """Begin the next step, and activate the counter if the step is counted."""
        if self._ended < FIRST_COUNTED - 1 and self._batches is None:
            self._batches = Batches()
        is_late = self._ended + 1 == self.steps.late and self.counts is not None
        if is_late or self._ended == FIRST_COUNTED - 1:
            parameters = tuple(each for each in self._model().parameters() if not is_lazy(each))
            self._counter = StepCounter(self._optimizers, parameters, self._listener)
            self.has_counted_late = is_late
            if not is_late:
                gc.collect()  # older garbage would otherwise be freed at some time in the counted steps
                self._counter.memory.watch_collector()
            for storage in self._end_batches():
                self._counter.memory.received(storage)
        if self._counter is not None:
            self._enter(self._counter)

    def _enter(self, counter: StepCounter) -> None:
        """Activate the counter."""
        if in_backward():  # autograd would remove a mode that is entered now
            self._give_up(IN_BACKWARD)
        elif software.is_in_compiled_code():  # torch allows no mode to be entered there
            self._give_up(COMPILED)
        elif len_dispatch_stack() != self._modes:
            self._give_up("the training has its own TorchDispatchMode around its optimizer's step")
        else:
            is_real = active_fake_mode() is None
            self._watch = Watch() if is_real else None
            if is_real and self._ended == COUNTED_STEP - 1:
                others = self._parameters_of_others
                self._norm = NormBeforeClipping(self._optimizers[0], counter.python.unseen, others)
                self._norm.enter()
            self._collector.pause()
            counter.__enter__()

    def result(self) -> Counts | None:
        """Return the counts. Call this after the last step.

        For a compiled model, memory is left out, because the counter does not see it.
        """
        self.abandon()  # in case fewer steps were taken than planned
        try:  # a private name of torch might be missing
            compiled = software.compiled_counts()
        except Exception as error:
            self.notes.append(
                "the work of a step was not counted: the graphs of torch.compile are unknown "
                f"({error_text(error)})"
            )
            self.counts = None
            return None
        if self.counts is None or compiled is None:
            return self.counts
        return _without_memory(self.counts).replace(compiled=compiled)

    def _end_batches(self) -> list[Any]:
        batches = self._batches
        self._batches = None
        return [] if batches is None else batches.end()

    def _give_up(self, why: str) -> None:
        """Stop counting. Keep the counts of earlier steps, but not those of the running step."""
        if self.counts is None:
            self.notes.append(f"the work of a step was not counted: {why}")
        else:
            later = max(self.counts.step, *self.counts.also_counted, 0) + 1
            self.notes.append(f"steps were not counted from step {later} on: {why}")
        self.steps = ONE_STEP
        self.abandon()

    def abandon(self) -> None:
        """Stop counting, and remove all hooks."""
        self._end_batches()
        counter = self._counter
        self._counter = None
        self._watch = None
        self._collector.go_on()
        if self._norm is not None:
            self._norm.leave()
            self._norm = None
        if counter is not None:
            leave(counter)
            counter.memory.forget()


class Collector:
    """Runs Python's garbage collector at fixed places of a counted step.

    These places are the end of each backward, and every `MOST_OPERATORS` operators. Usually, the collector
    runs after some number of allocations. Tensors in reference cycles would then be freed earlier or later
    than in another launch, although the training is the same. If the training has turned the collector off,
    it stays off.
    """

    paused: ClassVar[Collector | None] = None  # the collector that now decides when garbage is collected

    def __init__(self) -> None:
        self.error: Exception | None = None  # the first error in collecting
        self._thresholds = gc.get_threshold()

    def pause(self) -> None:
        """Collect only at the fixed places from now on."""
        self._thresholds = gc.get_threshold()
        if Collector.paused is not None or not gc.isenabled() or not self._thresholds[0]:
            return
        gradients.watch()
        gradients.after_backward = self.collect
        gc.set_threshold(0)
        Collector.paused = self

    def collect(self) -> None:
        """Collect the garbage among young objects."""
        try:
            _collect_young()
        except Exception as error:  # an error must not end the training
            self.error = error

    def go_on(self) -> None:
        """Let Python decide again when to collect."""
        if Collector.paused is self:
            gradients.after_backward = None
            if not gc.get_threshold()[0]:  # if it is not 0, the training has set it
                gc.set_threshold(*self._thresholds)
            Collector.paused = None


def _collect_young() -> None:
    """Collect the garbage among young objects. This is not counted as a call of `gc.collect`."""
    getattr(gc.collect, "__wrapped__", gc.collect)(1)


def _memory_unless_alike(memory: StepMemory | None, reported: StepMemory | None) -> StepMemory | None:
    """Return the memory of a step, or the memory of the reported step if the two hardly differ.

    For example, they hardly differ if a training run keeps its losses, which takes only a few more bytes in
    each step. In each launch, the replacement hides a difference of at most half the threshold for a verdict.
    So a comparison of two launches hides at most the threshold.
    """
    if memory is None or reported is None or memory.growth != reported.growth:
        return memory
    differences = (memory.peak - reported.peak, memory.saved_for_backward - reported.saved_for_backward)
    return memory if any(abs(each) > MEMORY_FLOOR / 2 for each in differences) else reported


def _with_cycles(counts: Counts, counter: StepCounter) -> Counts:
    """Return these counts with the bytes of tensors in reference cycles."""
    if counts.memory is None:
        return counts
    return counts.replace(memory=counts.memory.replace(in_cycles=counter.memory.in_cycles()))


def _without_memory(counts: Counts) -> Counts:
    spans = {name: span.replace(memory=None) for name, span in counts.spans.items()}
    return counts.replace(memory=None, spans=spans)


def warm_up() -> None:
    """Count a tiny step. This loads the code for counting before the host's memory is first read."""
    weight = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.AdamW([weight])
    counter = StepCounter([optimizer])
    with counter:
        (weight @ weight).square().sum().backward()
        optimizer.step()
    counter.end_step().model_dump_json()
    counter.memory.forget()


def leave(counter: StepCounter) -> bool:
    """Exit the counter's mode, even if it is below other modes. Return whether it was still active."""
    if not counter.is_entered:
        return False
    was_there = any(mode is counter for mode in current_dispatch_mode_stack())
    if not was_there:
        push_mode(counter)
    above = []
    while current_dispatch_mode() is not counter:
        above.append(pop_mode())
    counter.__exit__(None, None, None)
    for mode in reversed(above):
        push_mode(mode)
    # This is False if the mode was entered in a backward that has ended, because autograd removes such modes.
    return was_there
