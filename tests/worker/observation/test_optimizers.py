import gc
from collections.abc import Sequence

import pytest

from perfsuite.worker.observation.optimizers import Optimizers, living


class Adam:
    param_groups: Sequence[dict[str, list[object]]] = ()


class RMSprop(Adam):
    pass


def stepping(optimizers: Optimizers, order: Sequence[object], there: Sequence[object] = ()) -> list[object]:
    """Step these optimizers in this order. Return the optimizer of each step that was a tick of the clock.

    `there` has the optimizers that existed before the first step.
    """
    clocks = []
    begun = False
    for optimizer in order:
        is_tick = optimizers.takes_turn(optimizer)
        if is_tick:
            clocks.append(optimizer)
            if not begun:
                optimizers.begin(there)
                begun = True
        assert optimizers.count(optimizer) == is_tick, "the answers before and after a step agree"
    return clocks


@pytest.mark.parametrize(
    ("wanted", "clock"),
    [(None, 0), ("RMSprop", 0), ("Adam", 1), ("Adam:1", 1), ("Adam:2", 2), ("SGD", None), ("Adam:3", None)],
)
def test_clock_is_the_first_or_the_named_one(wanted: str | None, clock: int | None) -> None:
    made = [RMSprop(), Adam(), Adam()]
    ticks = stepping(Optimizers(wanted), [*made, *made])
    assert ticks == ([] if clock is None else [made[clock]] * 2)


def test_notes_another_rate_after_the_first_step() -> None:
    critic = RMSprop()
    generator = Adam()
    also = Adam()
    optimizers = Optimizers("Adam")
    stepping(optimizers, [*[critic] * 3, *[generator, also, *[critic] * 5] * 4, generator])
    assert optimizers.notes() == (
        "RMSprop took 20 steps in 5 training steps. Each step of Adam ends a training step. If another "
        "optimizer should end it, give Script(clock=...)",
    )
    slow = Optimizers()
    same = Optimizers("Adam")
    stepping(slow, [*[*[generator] * 4, critic] * 5, generator])
    assert (
        "RMSprop took 5 steps in 21 training steps. Each step of Adam ends a training step" in slow.notes()[0]
    )
    stepping(same, [*[RMSprop()] * 7, *[generator, critic] * 4, generator])
    assert same.notes() == Optimizers("SGD").notes() == ()


def test_notes_optimizers_that_are_not_observed() -> None:
    optimizers = Optimizers()
    stepping(optimizers, [A, OTHER] * 3)
    assert optimizers.notes() == ("dtypes and gradients are checked for Over, but not for Over:2",)


def test_an_optimizer_of_the_same_parameters_is_observed() -> None:
    optimizers = Optimizers()
    stepping(optimizers, [A, Sgd(ONE)] * 3)
    assert optimizers.notes() == ()


def test_names_the_optimizers_that_stepped() -> None:
    optimizers = Optimizers("Sgd")
    assert optimizers.summary() == "No torch optimizer stepped"
    kept = [Adam(), Adam()]
    stepping(optimizers, [*kept, *kept, kept[0]])
    assert optimizers.summary() == "Optimizers that stepped: Adam (3 steps), Adam:2 (2 steps)"
    kept += [Adam() for _ in range(6)]
    stepping(optimizers, kept[2:])
    assert optimizers.summary().endswith(", Adam:6 (1 steps) and 2 more")


class Over(Adam):
    """An optimizer for the given parameters."""

    def __init__(self, *parameters: object) -> None:
        self.param_groups = [{"params": list(parameters)}]


class Sgd(Over):
    """An optimizer of another class."""


ONE = object()
TWO = object()


def test_rebuilt_optimizer_continues_as_the_clock() -> None:
    """Progressive unfreezing and warm restarts are examples."""
    optimizers = Optimizers()
    made = [Over(ONE), Over(TWO, ONE), Over(TWO)]
    order = [made[0]] * 3 + [made[1]] * 3 + [made[2]]
    assert stepping(optimizers, order) == order
    assert optimizers.notes() == ()
    stepping(optimizers, [KIND] * 4)
    assert "RMSprop took 4 steps in 7 training steps. Each step of Over ends a" in optimizers.notes()[0]
    each_step = [Over(ONE) for _ in range(9)]
    assert stepping(Optimizers(), each_step) == each_step


A = Over(ONE)
B = Over(ONE, TWO)
OTHER = Over(TWO)
KIND = RMSprop()
HEAD = Over(ONE, TWO)
NECK = Over(ONE, object())
STAGES = [*[A] * 3, *[B] * 3, *[A] * 3, *[B] * 2]


@pytest.mark.parametrize(
    ("order", "there", "ticks"),
    [
        ([A, OTHER, KIND, A], (), [A, A]),
        # Of the other optimizer's steps, only the first one is a tick.
        ([*[A] * 3, B, *[A] * 3, B, A], (), [*[A] * 3, B, *[A] * 4]),
        ([A, B] * 4, (A, B), [A] * 4),
        (STAGES, (A, B), [*STAGES[:3], *STAGES[4:]]),
        # Otherwise the other optimizer's first step would be taken for the second step of training.
        ([HEAD, NECK] * 3, (), [HEAD] * 3),
        (STAGES, (), STAGES),
    ],
    ids=[
        "over other parameters or of another class",
        "in turn, sharing a parameter, as a generator and its discriminator",
        "in turn, both there from the start",
        "a second stage, both there from the start: from its second step",
        "each with a head of its own",
        "stages that come again",
    ],
)
def test_which_of_two_is_the_clock(order: list[object], there: Sequence[object], ticks: list[object]) -> None:
    assert stepping(Optimizers(), order, there) == ticks


def test_deleted_optimizer_is_not_a_new_one() -> None:
    """A new object can have the address of an old one."""
    optimizers = Optimizers()
    for _ in range(50):
        optimizers.count(Adam())
        gc.collect(1)
    assert optimizers.seen[0].steps == 1


def test_optimizers_of_every_step_share_an_entry() -> None:
    optimizers = Optimizers("Over")
    outer = Over(ONE)
    for _ in range(9):
        stepping(optimizers, [Adam(), outer])
        gc.collect(1)
    assert optimizers.summary() == "Optimizers that stepped: Adam (9 steps), Over (9 steps)"


def test_finds_live_objects_by_class_still_frozen() -> None:
    frozen = Adam(), Over(ONE)
    gc.freeze()  # not unfrozen again, because all later collections would then look at the imported objects
    new = Adam(), Over(ONE)
    optimizers = living(Adam)
    assert {*frozen, *new, A, B} <= set(optimizers)
    assert all(isinstance(optimizer, Adam) for optimizer in optimizers)
    assert gc.get_freeze_count() > 0


def test_a_wrapper_of_the_clock_is_the_clock() -> None:
    """A loss scaler can skip the step of a wrapper, which has never stepped."""
    clock = Adam()
    other = RMSprop()
    for optimizer in (clock, other):
        optimizer.param_groups = [{"params": [object()]}]
    optimizers = Optimizers()
    stepping(optimizers, [clock, other])
    wrappers = [Adam(), Adam()]
    for wrapper, wrapped in zip(wrappers, (clock, other), strict=True):
        wrapper.param_groups = wrapped.param_groups
    assert [optimizers.is_clock(optimizer) for optimizer in (clock, other, *wrappers)] == [
        True,
        False,
        True,
        False,
    ]


def test_there_is_no_clock_before_the_first_step() -> None:
    assert not Optimizers().is_clock(Adam())
