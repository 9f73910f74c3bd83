import gc
import weakref
from typing import Any, ClassVar

import pytest

from perfsuite.frameworks.common.own_list import OwnList
from perfsuite.worker.counting.holders import OUTSIDE, Garbage, holders_of

HELD: list[object] = []


class Leaf:
    """An object. The tests search for its holder."""


class Cache:
    shared: ClassVar[dict[str, object]] = {}

    def __init__(self) -> None:
        self.entries: dict[int, object] = {}


class Shared:
    """A class whose instances share their attributes."""

    attributes: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.__dict__ = self.attributes


class Slotted:
    __slots__ = ("entry",)
    entry: object


def holders(leaves: list[Any]) -> tuple[str, ...]:
    return holders_of(leaves, {"Leaf"})


@pytest.fixture(autouse=True)
def _nothing_is_held() -> None:
    HELD.clear()
    Cache.shared.clear()


def held(thing: object) -> tuple[str, ...]:
    """Have a global list hold an object that contains a leaf, and search from the leaf."""
    HELD.append(thing)
    inner = thing
    while not isinstance(inner, Leaf):
        inner = inner[0]  # type: ignore[index]
    leaf = inner
    del thing, inner
    return holders([leaf])


def test_nothing_is_kept_alive_after_the_search() -> None:
    """A frame that refers to itself would keep the objects until the next garbage collection."""
    leaves: list[Any] = [Leaf()]
    HELD.extend(leaves)
    gc.disable()
    try:
        holders(leaves)
        HELD.clear()
        leaf = weakref.ref(leaves.pop())
        assert leaf() is None
    finally:
        gc.enable()


class Records:
    """Records of perfsuite."""

    def __init__(self) -> None:
        self.losses = OwnList[object]()


def test_records_of_perfsuite_are_no_holders() -> None:
    leaf = Leaf()
    records = Records()
    records.losses.append(leaf)
    HELD.append(leaf)
    assert holders([leaf]) == ("`tests.worker.counting.test_holders.HELD`",)


def test_a_global_is_named_through_containers() -> None:
    assert held(((Leaf(),),)) == ("`tests.worker.counting.test_holders.HELD`",)


def test_a_class_attribute_is_named() -> None:
    Cache.shared["x"] = Leaf()
    assert holders([Cache.shared["x"]]) == ("`Cache.shared`",)


def test_an_attribute_of_an_instance_is_named() -> None:
    cache = Cache()
    cache.entries[0] = [Leaf()]
    assert holders([cache.entries[0][0]]) == ("`Cache.entries`",)  # type: ignore[index]


def test_a_slot_is_named() -> None:
    slotted = Slotted()
    slotted.entry = Leaf()
    assert holders([slotted.entry]) == ("`Slotted.entry`",)


def test_an_attribute_of_what_grows_is_followed() -> None:
    outer = Leaf()
    outer.inner = Leaf()  # type: ignore[attr-defined]
    HELD.append(outer)
    assert holders([outer.inner]) == ("`tests.worker.counting.test_holders.HELD`",)  # type: ignore[attr-defined]


def test_names_a_variable_of_a_running_function() -> None:
    kept = [Leaf()]
    name = f"{__name__}.test_names_a_variable_of_a_running_function.kept"
    assert holders([kept[0]]) == (f"`{name}`",)


def test_objects_that_python_does_not_hold_are_outside() -> None:
    assert holders([Leaf()]) == (OUTSIDE,)
    assert holders([]) == ()


def test_names_an_attribute_that_instances_share() -> None:
    shared = Shared()
    shared.attributes["entries"] = [Leaf() for _ in range(5)]
    leaves = list(shared.attributes["entries"])
    HELD.append([(leaves[0],) for _ in range(20)])
    assert holders(leaves)[0] == "`Shared.entries`"


def test_the_holder_of_a_weak_reference_is_no_holder() -> None:
    leaf = Leaf()
    HELD.append((leaf,))
    weak = weakref.WeakValueDictionary({0: leaf})
    references = list(weak.valuerefs())
    assert holders([leaf, *references]) == (f"`{__name__}.HELD`",)
    assert holders(references) == ()


def test_a_holder_of_few_is_not_named() -> None:
    leaves = [Leaf() for _ in range(10)]
    HELD.append(leaves[0])
    assert holders(leaves) == (OUTSIDE,)


def test_names_the_holder_and_no_path_to_it() -> None:
    """A global holds only the newest object. From this object, shared attributes lead to all others."""
    leaves = [Leaf() for _ in range(10)]
    Shared.attributes["entries"] = [*leaves]
    for leaf in leaves:
        leaf.shared = Shared()  # type: ignore[attr-defined]
    HELD.append(leaves[-1])
    assert holders_of(leaves, {"Leaf", "Shared"}) == ("`Shared.attributes`",)


def test_dictionary_holds_a_function_used_as_key() -> None:
    """The keys are functions with a closure. Each step makes them again."""

    def made() -> Any:
        leaf = Leaf()
        return lambda: leaf

    HELD.append({made(): None for _ in range(5)})
    leaves = [function() for function in HELD[0]]  # type: ignore[attr-defined]
    assert holders_of(leaves, {"Leaf", "function", "cell", "tuple"})[0] == f"`{__name__}.HELD`"


def test_a_frame_of_a_caught_error_is_named() -> None:
    def attempt() -> object:
        leaf = Leaf()
        try:
            raise ValueError(leaf)
        except ValueError as error:
            kept = error  # refers to its traceback, which refers to this frame
        return leaf if kept is None else None

    attempt()
    left = [thing for thing in gc.get_objects() if type(thing) is Leaf]
    garbage = Garbage(left)
    del left
    gc.collect()
    function = f"{__name__}.test_a_frame_of_a_caught_error_is_named.<locals>.attempt"
    assert garbage.holders() == (f"`{function}`",)


def test_garbage_search_keeps_no_variable_alive() -> None:
    """In Python 3.11, reading the variables of a frame from outside keeps their values alive."""
    leaf = Leaf()
    alive = weakref.ref(leaf)
    Garbage([Leaf()])
    del leaf
    assert alive() is None


def test_objects_that_stay_alive_have_no_cycle() -> None:
    leaf = Leaf()
    HELD.append(leaf)
    garbage = Garbage([leaf])
    gc.collect()
    assert garbage.holders() == ()
