from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest

from perfsuite.worker.optimizers import Optimizers, living


class Adam:
    pass


class RMSprop:
    pass


def stepping(optimizers: Optimizers, order: Sequence[object], there: Sequence[object] = ()) -> list[object]:
    """Steps of these; which of them were the clock's. `there`: those that were built before the first."""
    clocks, begun = [], False
    for optimizer in order:
        is_tick = optimizers.takes_turn(optimizer)
        if is_tick:
            clocks.append(optimizer)
            if not begun:
                optimizers.begin(there)
                begun = True
        optimizers.count(optimizer)
        assert optimizers.is_clock(optimizer) == is_tick, "after its step as before it"
    return clocks


@pytest.mark.parametrize(
    ("wanted", "clock"),
    [(None, 0), ("RMSprop", 0), ("Adam", 1), ("Adam:1", 1), ("Adam:2", 2), ("SGD", None), ("Adam:3", None)],
)
def test_the_clock_is_the_first_or_the_one_that_is_named(wanted: str | None, clock: int | None) -> None:
    made = [RMSprop(), Adam(), Adam()]
    ticks = stepping(Optimizers(wanted), [*made, *made])
    assert ticks == ([] if clock is None else [made[clock]] * 2)


def test_another_rate_is_a_note() -> None:
    critic, generator, also = RMSprop(), Adam(), Adam()
    optimizers = Optimizers("Adam")
    stepping(optimizers, [*[critic] * 3, *[generator, also, *[critic] * 5] * 4, generator])
    assert optimizers.notes() == (
        "RMSprop stepped 5 times for each step of the clock, Adam: "
        "name another optimizer with Script(clock=...)",
    )
    slow = Optimizers()
    stepping(slow, [*[*[generator] * 4, critic] * 5, generator])
    assert "RMSprop stepped 0.25 times for each step of the clock, Adam" in slow.notes()[0]


def test_the_same_rate_is_no_note_nor_is_what_stepped_before() -> None:
    inner, outer, earlier = RMSprop(), Adam(), RMSprop()
    optimizers = Optimizers("Adam")
    stepping(optimizers, [*[earlier] * 7, *[outer, inner] * 4, outer])
    assert optimizers.notes() == ()
    assert Optimizers("SGD").notes() == ()


def test_those_that_stepped_are_told() -> None:
    optimizers = Optimizers("Sgd")
    assert optimizers.summary() == "None of torch stepped"
    kept = [Adam(), Adam()]
    stepping(optimizers, [*kept, *kept, kept[0]])
    assert optimizers.summary() == "Those that stepped: Adam (3 steps), Adam:2 (2 steps)"


def test_the_rate_of_one_that_steps_rarely_is_exact() -> None:
    """Its steps in so few of the clock's would tell 0.143."""
    critic, generator = Adam(), RMSprop()
    optimizers = Optimizers("RMSprop")
    stepping(optimizers, [generator, *[*[generator] * 5, critic] * 2, *[generator] * 4])
    assert "Adam stepped 0.2 times for each step of the clock, RMSprop" in optimizers.notes()[0]
    once = Optimizers("RMSprop")
    stepping(once, [*[generator] * 6, critic, *[generator] * 5])
    assert "Adam stepped 0.1 times for each step of the clock, RMSprop" in once.notes()[0]


class Over(Adam):
    """An optimizer over some parameters."""

    def __init__(self, *parameters: object) -> None:
        self.param_groups = [{"params": list(parameters)}]


ONE, TWO = object(), object()


def test_an_optimizer_that_is_built_anew_goes_on_as_the_clock() -> None:
    """As by progressive unfreezing, or warm restarts."""
    optimizers, made = Optimizers(), [Over(ONE), Over(TWO, ONE), Over(TWO)]
    order = [made[0]] * 3 + [made[1]] * 3 + [made[2]]
    assert stepping(optimizers, order) == order
    assert optimizers.notes() == ()
    assert optimizers.name == "Over"
    each_step = [Over(ONE) for _ in range(9)]
    assert stepping(Optimizers(), each_step) == each_step


def test_one_over_other_parameters_or_of_another_class_does_not() -> None:
    first, other, kind = Over(ONE), Over(TWO), RMSprop()
    assert stepping(Optimizers(), [first, other, kind, first]) == [first, first]


def test_two_that_step_in_turn_are_no_successors() -> None:
    """They share a parameter, as of a generator and its discriminator."""
    first, other = Over(ONE), Over(ONE, TWO)
    ticks = stepping(Optimizers(), [*[first] * 3, other, *[first] * 3, other, first])
    assert ticks == [*[first] * 3, other, *[first] * 4], "the first step of the other alone"


def test_two_that_were_there_from_the_start_step_in_turn_from_the_first_step_on() -> None:
    """An optimizer over a part of the model, and one over more of it."""
    both = Over(ONE), Over(ONE, TWO)
    assert stepping(Optimizers(), [*both] * 4, there=both) == [both[0]] * 4


def test_a_second_stage_whose_optimizer_was_there_goes_on_from_its_second_step() -> None:
    first, other = Over(ONE), Over(ONE, TWO)
    order = [*[first] * 3, *[other] * 3, *[first] * 3, *[other] * 2]
    assert stepping(Optimizers(), order, there=[first, other]) == [*order[:3], *order[4:]]


def test_two_that_share_a_part_of_the_model_are_no_successors() -> None:
    """Each has a head of its own: the other's first step would be taken for the second step of training."""
    first, other = Over(ONE, TWO), Over(ONE, object())
    assert stepping(Optimizers(), [first, other] * 3) == [first] * 3


def test_stages_that_come_again_are_one_clock() -> None:
    first, other = Over(ONE), Over(ONE, TWO)
    order = [*[first] * 3, *[other] * 3, *[first] * 3, *[other] * 2]
    assert stepping(Optimizers(), order) == order


def test_many_optimizers_are_told_in_few_words() -> None:
    optimizers = Optimizers("none")
    kept = [Over(object()) for _ in range(8)]
    stepping(optimizers, kept)
    assert optimizers.summary().endswith("Over:6 (1 steps) and 2 more")


def test_an_optimizer_that_is_gone_is_not_taken_for_a_new_one() -> None:
    """A new object may have the address of an old one."""
    optimizers = Optimizers()
    for _ in range(50):
        optimizers.count(Adam())
        gc.collect(1)
    assert len(optimizers.seen) == 50


class Thing:
    pass


class Special(Thing):
    pass


def test_living_objects_are_found_by_their_class() -> None:
    things = [Thing(), Special()]
    assert set(living(Thing)) == set(things)
    assert living(Special) == things[1:]


def test_objects_that_are_frozen_are_found_and_stay_frozen() -> None:
    thing = Special()
    gc.freeze()
    try:
        assert living(Special) == [thing]
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
