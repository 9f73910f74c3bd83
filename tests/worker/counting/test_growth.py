import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from perfsuite.frameworks.common.own_list import OwnList
from perfsuite.results.counts import KeptObjects
from perfsuite.worker.counting.growth import (
    ANY_TYPE,
    DISABLED,
    FROZEN,
    FROZEN_MEANWHILE,
    NO_GRAPHS,
    NO_HOLDERS,
    UNKNOWN,
    Growth,
)
from perfsuite.worker.observation import frozen
from perfsuite.worker.observation.optimizers import living
from tests.samples import known
from tests.worker.loops import in_a_copy

LEAK: dict[int, object] = {}
HELD: list[object] = []


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    frozen.watch()
    yield
    LEAK.clear()
    HELD.clear()


def counted(step: Callable[[int], object], *, first: int = 5, last: int = 25) -> Growth:
    """Return the growth after the steps of a launch. Objects are counted after three of these steps."""
    counting = Growth(first, last)
    for number in range(1, last + 1):
        step(number)
        if counting.is_due(number):
            counting.count()
    return counting


def kept(step: Callable[[int], object]) -> KeptObjects:
    return known(counted(step).result())


def keeps_nothing(kept_objects: KeptObjects) -> bool:
    return (kept_objects.by_type, kept_objects.graphs, kept_objects.graphs_left) == ({}, 0, 0)


class Spec:
    """An object that a cache holds by mistake."""


def leak(number: int) -> None:
    LEAK[number] = (Spec(), (Spec(), []))


def test_exact_leak_names_its_type_and_holder() -> None:
    kept_objects = kept(leak)
    assert kept_objects.by_type == {"Spec": 2, "list": 1, "tuple": 2}
    assert kept_objects.total == 5
    assert kept_objects.holders == ("`tests.worker.counting.test_growth.LEAK`",)


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_notices_a_kept_autograd_graph(keeps_graph: bool) -> None:
    """The nodes of the graph belong to C++, so Python's garbage collector does not track them."""
    weight = torch.ones(3, requires_grad=True)

    def step(number: int) -> None:
        loss = (2 * weight).sum()
        LEAK[number] = loss if keeps_graph else loss.detach()

    kept_objects = kept(step)
    assert (kept_objects.total, kept_objects.graphs) == (1, int(keeps_graph))


def flushed(every: int) -> Callable[[int], object]:
    """Return steps that keep their losses until they are logged in every n-th step."""
    weight = torch.ones(3, requires_grad=True)

    def step(number: int) -> None:
        LEAK[number] = (2 * weight).sum()
        if number % every == 0:
            LEAK.clear()

    return step


def test_losses_that_are_kept_until_a_log_are_left() -> None:
    """Such a buffer grows in no half of the steps, because it is emptied in each of them."""
    kept_objects = kept(flushed(every=8))
    assert (kept_objects.graphs, kept_objects.graphs_left) == (0, 1)


def test_graphs_that_each_step_keeps_are_not_counted_twice() -> None:
    weight = torch.ones(3, requires_grad=True)

    def step(number: int) -> None:
        LEAK[number] = (2 * weight).sum()

    kept_objects = kept(step)
    assert (kept_objects.graphs, kept_objects.graphs_left) == (1, None)


def test_a_local_list_of_lists_is_a_holder() -> None:
    """The list has the type of the objects that it holds."""
    history: list[object] = []
    kept_objects = kept(lambda number: history.append([Spec(), {"step": number}]))
    assert kept_objects.by_type["list"] == 1
    (holder,) = kept_objects.holders
    assert holder.endswith(".history`")


def test_many_graphs_that_are_left_have_holders() -> None:
    counting = counted(flushed(every=9), first=7, last=25)
    assert known(counting.result()).graphs_left == 7
    assert known(counting.result()).graph_holders == ("`tests.worker.counting.test_growth.LEAK`",)


def test_a_graph_kept_by_few_of_many_tensors_shows() -> None:
    """Libraries keep many tensors per step, and only the loss among them has a graph."""
    weight = torch.ones(3, requires_grad=True)

    def step(number: int) -> None:
        LEAK[number] = [torch.ones(1) for _ in range(60)], (2 * weight).sum()

    assert kept(step).graphs == 1


def test_a_graph_has_holders_of_its_own() -> None:
    weight = torch.ones(3, requires_grad=True)

    def step(number: int) -> None:
        leak(number)
        HELD.append((2 * weight).sum())

    kept_objects = kept(step)
    assert kept_objects.graph_holders == ("`tests.worker.counting.test_growth.HELD`",)
    assert kept_objects.holders == ("`tests.worker.counting.test_growth.LEAK`",)


def test_counting_makes_no_nodes_of_graphs() -> None:
    """Reading `grad_fn` would create an object for the node. The object would live as long as the graph."""
    weight = torch.ones(3, requires_grad=True)

    def step(number: int) -> None:
        LEAK[number] = 2 * weight, 3 * weight

    assert kept(step).by_type == {"Tensor": 2, "tuple": 1}


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_a_views_base_shows_its_graph(keeps_graph: bool) -> None:
    weight = torch.ones(2, 3, requires_grad=True)

    def step(number: int) -> None:
        rows = 2 * weight
        LEAK[number] = (rows if keeps_graph else rows.detach())[0]

    assert kept(step).graphs == (2 if keeps_graph else 0), "a view keeps its base"


def test_counting_replaces_no_graph_of_a_view() -> None:
    """The steps do truncated backpropagation through time.

    If counting read `last.grad_fn`, a backward would fail.
    """
    weight = torch.ones(3, requires_grad=True)
    state = torch.zeros(2, 3)
    last = state[0]

    def step(number: int) -> None:
        state.detach_()
        loss = ((last + 0) * weight).sum()
        state.copy_(torch.tanh(weight * number).expand(2, 3))
        (loss + state.sum()).backward()

    kept_objects = known(counted(step, first=3, last=9).result())
    assert (kept_objects.total, kept_objects.graphs, kept_objects.graphs_left) == (0, 0, 2)


class Odd(torch.Tensor):
    """A tensor that does not allow any function of torch."""

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(func)


def test_no_code_of_tensor_classes_runs() -> None:
    HELD.append(torch.Tensor._make_subclass(Odd, torch.ones(2)))
    kept_objects = kept(leak)
    assert (kept_objects.total, kept_objects.graphs) == (5, 0)


def test_without_the_private_name_graphs_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "DisableTorchFunctionSubclass")
    counting = counted(leak)
    kept_objects = known(counting.result())
    assert (kept_objects.total, kept_objects.graphs) == (5, None)
    (note,) = counting.notes
    assert note.startswith(f"{NO_GRAPHS}PrivateNameError: torch ")
    assert "DisableTorchFunctionSubclass" in note


def test_the_last_steps_graph_is_not_kept() -> None:
    weight = torch.ones(3, requires_grad=True)

    def step(number: int) -> None:
        HELD[:] = [(2 * weight).sum()]
        LEAK[number] = torch.ones(1)

    assert kept(step).graphs == 0


def test_names_a_holder_that_the_training_frees_later() -> None:
    counting = counted(leak)
    LEAK.clear()
    assert known(counting.result()).holders == ("`tests.worker.counting.test_growth.LEAK`",)


def test_last_steps_objects_are_not_the_leak() -> None:
    def leak_and_hold(number: int) -> None:
        leak(number)
        HELD[:] = [(Spec(), []) for _ in range(100)]

    assert kept(leak_and_hold).holders == ("`tests.worker.counting.test_growth.LEAK`",)


def test_finds_a_leak_where_many_old_objects_die() -> None:
    HELD[:] = [Spec() for _ in range(1000)]

    def leak_and_forget(number: int) -> None:
        if number == 4:
            HELD[:] = [(Spec(), []) for _ in range(100)]
        leak(number)
        if number == 3:
            HELD.clear()
            gc.collect(1)  # moves the leaked objects to the old generation

    kept_objects = known(counted(leak_and_forget, first=1, last=4).result())
    assert kept_objects.holders == ("`tests.worker.counting.test_growth.LEAK`",)


def test_objects_of_a_single_step_name_no_holder() -> None:
    """They might all be in use. Here, the last step holds newer objects of the same types."""

    def leak_and_hold(number: int) -> None:
        HELD[:] = [Spec()]
        leak(number)

    kept_objects = known(counted(leak_and_hold, first=12, last=14).result())
    assert kept_objects.by_type == {"Spec": 2, "list": 1, "tuple": 2}
    assert kept_objects.holders == ()
    assert known(counted(leak, first=11, last=14).result()).holders != ()


def test_full_collection_midway_names_no_holder() -> None:
    """A full collection changes the order of objects. Only that order shows which objects are old."""

    def leak_and_collect(number: int) -> None:
        leak(number)
        gc.collect()

    kept_objects = kept(leak_and_collect)
    assert kept_objects.by_type == {"Spec": 2, "list": 1, "tuple": 2}
    assert kept_objects.holders == ()


def test_clean_training_has_no_holder() -> None:
    assert keeps_nothing(kept(lambda number: [Spec()]))


@pytest.mark.parametrize("at", [10, 20])
def test_a_cache_that_is_filled_once_is_no_growth(at: int) -> None:
    """The cache is filled in the first or in the second half, with more objects than there are steps."""

    def fill(number: int) -> None:
        if number == at:
            LEAK.update({key: Spec() for key in range(1000)})

    assert keeps_nothing(kept(fill))


def test_records_of_received_storages_are_no_growth() -> None:
    """torch removes the records of freed storages, but only each time that it has 128 records."""

    def receive(number: int) -> None:
        storage = torch.ones(1).untyped_storage()
        reductions.shared_cache["test", number] = reductions.StorageWeakRef(storage)

    assert keeps_nothing(kept(receive))


def test_less_than_one_object_per_step_is_none() -> None:
    def now_and_then(number: int) -> None:
        if number % 2:
            LEAK[number] = Spec()

    assert keeps_nothing(kept(now_and_then))


def test_cycles_that_are_garbage_are_not_kept() -> None:
    def cycle(number: int) -> None:
        one: list[object] = [Spec()]
        one.append(one)

    assert keeps_nothing(kept(cycle))


def test_omits_what_perfsuite_keeps_of_each_step() -> None:
    own = OwnList[Spec]()
    assert keeps_nothing(kept(lambda number: own.append(Spec())))
    assert len(own) == 25


def test_type_remade_in_each_step_is_one_type() -> None:
    def leak_type(number: int) -> None:
        LEAK[number] = type("Made", (), {})()

    assert kept(leak_type).by_type["Made"] == 1


def test_a_launch_that_ends_early_is_unknown() -> None:
    counting = Growth(5, 25)
    for number in (5, 15):
        assert counting.is_due(number)
        counting.count()
    assert counting.result() is None
    assert counting.notes == [f"{UNKNOWN}the training ended before step 25"]


class Proxy:
    """An object whose attributes cannot be read. It holds another object."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __getattribute__(self, name: str) -> Any:
        raise LookupError("a proxy")


def test_search_error_keeps_what_was_counted() -> None:
    HELD.append(Proxy([]))

    def step(number: int) -> None:
        object.__getattribute__(HELD[0], "held").append((Spec(), (Spec(), [])))

    counting = counted(step)
    assert known(counting.result()).total == 5
    assert counting.notes == [f"{NO_HOLDERS}LookupError: a proxy"]


class Nameless(type):
    """A class of types whose names cannot be read."""

    def __getattribute__(cls, name: str) -> Any:
        if name == "__name__":
            raise LookupError("a type")
        return super().__getattribute__(name)


class Unnamed(metaclass=Nameless):
    """A type without a name."""


def test_an_error_of_the_count_is_a_note() -> None:
    HELD.append(Unnamed())
    counting = counted(leak)
    assert counting.result() is None
    assert counting.notes == [f"{UNKNOWN}LookupError: a type"]


def test_keeps_the_trainings_collector_settings() -> None:
    gc.disable()
    try:
        counting = counted(leak)
        assert known(counting.result()).total == 5
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert counting.notes == [DISABLED]


def test_own_refreezing_is_not_the_trainings() -> None:
    gc.freeze()
    frozen.watch()
    living(Spec)
    counting = counted(leak)
    assert counting.notes == []


def test_notes_frozen_objects_counts_the_rest() -> None:
    LEAK.update({key: Spec() for key in range(1000)})
    gc.freeze()
    LEAK.clear()  # frozen objects can still be freed
    counting = counted(leak)
    assert known(counting.result()).by_type == {"Spec": 2, "list": 1, "tuple": 2}
    assert counting.notes == [FROZEN]
    assert gc.get_freeze_count() > 0


def counted_alone(step: Callable[[int], object]) -> tuple[KeptObjects | None, list[str]]:
    """Return the result and the notes of `counted` in a copy of this process that has no other threads.

    A thread of pytest-xdist frees frozen objects at any time, and their number is part of the result.
    """

    def count() -> tuple[KeptObjects | None, list[str]]:
        counting = counted(step)
        return counting.result(), counting.notes

    result: tuple[KeptObjects | None, list[str]] = in_a_copy(count)
    return result


@pytest.mark.parametrize("is_due", [(7).__eq__, (20).__eq__, bool], ids=["once", "once late", "each step"])
def test_objects_frozen_in_between_still_count(is_due: Callable[[int], bool]) -> None:
    """The types of objects that were frozen in between are unknown, and frozen garbage is never freed."""

    def freeze(number: int) -> None:
        leak(number)
        if is_due(number):
            gc.freeze()

    assert counted_alone(freeze) == (KeptObjects(by_type={ANY_TYPE: 5}), [FROZEN_MEANWHILE])


def test_freezing_alone_keeps_nothing() -> None:
    kept, _ = counted_alone(lambda number: gc.freeze())
    assert keeps_nothing(known(kept))


def test_first_uses_in_each_half_are_no_growth() -> None:
    """Saving a checkpoint imports modules, and reading memory builds a schema. Each happens only once."""

    def use(number: int) -> None:
        if number in (10, 20):
            LEAK[number] = [[] for _ in range(6)]

    assert known(counted(use).result()).by_type == {}


def test_keeps_no_object_of_the_training_alive() -> None:
    died = list[int]()

    class Mortal:
        def __del__(self) -> None:
            died.append(1)

    def replace(number: int) -> None:
        LEAK[0] = Mortal()

    counted(replace)
    assert len(died) == 24
    LEAK.clear()
    assert len(died) == 25
