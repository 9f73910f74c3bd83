from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest

from perfsuite.worker.optimizers import Optimizers, living


class Adam:
    param_groups: Sequence[dict[str, list[object]]] = ()


class RMSprop(Adam):
    pass


def stepping(optimizers: Optimizers, order: Sequence[object]) -> list[object]:
    """Steps of these; which of them were the clock's."""
    clocks: list[object] = []
    for optimizer in order:
        if optimizers.is_clock(optimizer):
            if not clocks:
                optimizers.begin()
            clocks.append(optimizer)
        optimizers.count(optimizer)
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
        "RMSprop made 20 steps in 5 of the clock, Adam: name another optimizer with Script(clock=...)",
    )
    slow = Optimizers()
    stepping(slow, [*[*[generator] * 4, critic] * 5, generator])
    assert "RMSprop made 5 steps in 21 of the clock, Adam" in slow.notes()[0]


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
    kept += [Adam() for _ in range(6)]
    stepping(optimizers, kept[2:])
    assert optimizers.summary().endswith(", Adam:6 (1 steps) and 2 more")


def test_an_optimizer_that_is_gone_is_not_taken_for_a_new_one() -> None:
    """A new object may have the address of an old one."""
    optimizers = Optimizers()
    for _ in range(50):
        optimizers.count(Adam())
        gc.collect(1)
    assert len(optimizers.seen) == 50


def test_living_objects_are_found_by_their_class_and_stay_frozen() -> None:
    class Thing:
        pass

    class Special(Thing):
        pass

    frozen = Thing(), Special()
    gc.freeze()  # and never back: all later collections would look at what is imported
    new = Thing(), Special()
    assert set(living(Thing)) == {*frozen, *new}
    assert gc.get_freeze_count() > 0
