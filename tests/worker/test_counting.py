from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode

from perfsuite.results.counts import COUNTED_STEP, FIRST_COUNTED, Compiled
from perfsuite.worker import software
from perfsuite.worker.counter import StepCounter
from perfsuite.worker.counting import Counting, warm_up
from perfsuite.worker.live_memory import LiveMemory


class Idle(TorchDispatchMode):
    """A mode of the training's own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Loop:
    """Training with a `Counting`, as a rank drives it."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4, bias=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.counting = Counting(lambda: self.model)
        self.counted_at: list[int] = []
        """The steps, from 1 on, in which a counter was active."""

    def step(self, number: int, inside: Any = lambda number: None) -> None:
        inside(number)
        if isinstance(_get_current_dispatch_mode(), StepCounter):
            self.counted_at.append(number)
        self.model(torch.ones(2, 4)).sum().backward()
        self.counting.before_optimizer_step(self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, steps: int = 6, inside: Any = lambda number: None) -> Counting:
        for number in range(1, steps + 1):
            self.step(number, inside)
            self.counting.end_step()
            assert not isinstance(_get_current_dispatch_mode(), StepCounter)
            torch.ones(100).sum()  # between steps: not counted
            self.counting.begin_step()
        return self.counting


def test_two_steps_are_counted_and_the_second_is_reported() -> None:
    loop = Loop()
    counting = loop.run()
    assert loop.counted_at == [FIRST_COUNTED, COUNTED_STEP]
    counts = counting.result()
    assert counts is not None
    assert counts.step == COUNTED_STEP
    assert counts.flops["forward"] == 2 * 2 * 4 * 4
    assert counts.ops["aten.ones"] == 1  # the batch: not what is made between steps
    assert counting.notes == []
    assert counting.log is not None
    assert len(counting.log.steps) == 2


def test_a_launch_that_ends_too_early_has_no_counts() -> None:
    counting = Loop().run(steps=FIRST_COUNTED)
    assert counting.result() is None


def test_the_first_optimizer_that_steps_is_the_one_that_counts() -> None:
    loop = Loop()
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])

    def step_other(number: int) -> None:
        if number > 1:
            loop.counting.before_optimizer_step(other)

    counts, without = loop.run(inside=step_other).result(), Loop().run().result()
    assert counts is not None
    assert without is not None
    assert counts.kernels == without.kernels  # it began no phase


def test_a_mode_around_the_training_s_step_is_told_and_nothing_is_counted() -> None:
    loop, mode = Loop(), Idle()

    def enter(number: int) -> None:
        if number == FIRST_COUNTED:
            mode.__enter__()  # type: ignore[no-untyped-call]

    counting = loop.run(inside=enter)
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    assert counting.result() is None
    (note,) = counting.notes
    assert "TorchDispatchMode of its own" in note
    assert _get_current_dispatch_mode() is None


def test_what_cannot_be_counted_is_a_note() -> None:
    loop = Loop()
    loop.counting = Counting(lambda: None)
    assert loop.run().result() is None
    (note,) = loop.counting.notes
    assert note.startswith("what a step does was not counted: AttributeError")


def test_a_torch_that_does_not_tell_what_it_compiled_costs_the_counts_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting = Loop().run()
    monkeypatch.setattr(software, "compiled_graphs", lambda: 1)
    monkeypatch.delattr(torch._dynamo.utils, "get_compilation_metrics")
    assert counting.result() is None
    (note,) = counting.notes
    assert "what torch.compile made is not known (AttributeError" in note


def test_of_a_compiled_model_the_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Loop().run()
    compiled = Compiled(graphs=1, recompilations=0, kernels=3, extern_calls=2)
    monkeypatch.setattr(software, "compiled_counts", lambda: compiled)
    counts = counting.result()
    assert counts is not None
    assert counts.memory is None
    assert counts.compiled == compiled


def test_warming_up_leaves_nothing_behind() -> None:
    warm_up()
    assert _get_current_dispatch_mode() is None
    assert "resize_" not in vars(torch.UntypedStorage)


class SteppingInBackward:
    """Training whose optimizer steps in backward, as soon as a gradient is there."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(4))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.counting = Counting(lambda: nn.ParameterList([self.weight]))
        self.weight.register_post_accumulate_grad_hook(self.step)

    def step(self, weight: torch.Tensor) -> None:
        self.counting.before_optimizer_step(self.optimizer)
        self.optimizer.step()
        self.counting.end_step()
        self.counting.begin_step()


def test_an_optimizer_that_steps_in_backward_is_not_counted() -> None:
    """Autograd takes away a mode that is entered in its backward, and puts one back that is left there."""
    training = SteppingInBackward()
    for _ in range(6):
        training.weight.sum().backward()
    assert training.counting.result() is None
    assert training.counting.notes == ["what a step does was not counted: the optimizer steps in backward"]
    assert _get_current_dispatch_mode() is None


@pytest.mark.parametrize("outside", [FIRST_COUNTED - 1, COUNTED_STEP - 1])
def test_one_that_steps_in_backward_later_is_not_counted(outside: int) -> None:
    training = SteppingInBackward()
    training.weight.grad = torch.ones(4)
    for _ in range(outside):
        training.step(training.weight)
    for _ in range(6):
        training.weight.sum().backward()
    left = _get_current_dispatch_mode()
    if left is not None:
        _pop_mode()
        assert isinstance(left, StepCounter)
        assert not left.is_entered
    assert training.counting.result() is None
    assert len(training.counting.notes) == 1


def test_a_mode_that_was_taken_away_is_told() -> None:
    def take(number: int) -> None:
        if number == FIRST_COUNTED:
            _pop_mode()

    counting = Loop().run(inside=take)
    assert counting.result() is None
    assert counting.notes == [
        "what a step does was not counted: RuntimeError: its TorchDispatchMode was taken away during the step"
    ]
    assert "resize_" not in vars(torch.UntypedStorage)


@pytest.mark.parametrize("method", ["end_step", "before_optimizer", "__init__", "_count"])
def test_a_fault_in_the_counter_is_a_note_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(self: StepCounter, *args: Any, **kwargs: Any) -> None:
        raise ValueError("odd")

    monkeypatch.setattr(StepCounter, method, fail)
    counting = Loop().run()
    assert counting.result() is None
    assert counting.notes == ["what a step does was not counted: ValueError: odd"]
    assert _get_current_dispatch_mode() is None


def test_an_error_when_a_storage_is_gone_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LiveMemory, number: int, size: int) -> None:
        if size == 0:
            raise ValueError("odd")

    monkeypatch.setattr(LiveMemory, "_change", fail)
    assert Loop().run().notes == ["what a step does was not counted: ValueError: odd"]
