"""Count the objects that a training run keeps from step to step. Imports no torch.

Only objects that Python's garbage collector tracks are counted. Their number is exact after a full
collection.
"""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from perfsuite.frameworks.common import own_list, private
from perfsuite.results.counts import KeptObjects
from perfsuite.results.quantities import GRAPHS_FLOOR
from perfsuite.worker.counting.holders import holders_of
from perfsuite.worker.observation.frozen import has_training_frozen

MISSING = 0.25
MOST_MISSING = 1
"""The growth per step is rounded down to a whole number of objects. It is rounded up instead if a few more
objects would give the next whole number: at most `MISSING` for each step, and at most `MOST_MISSING` in
total. So a leak is still found if one object (for example a thread) disappears. The limits are low because
modules can create a few objects when they are used for the first time. Even if this happens in each half of
the steps, it must not look like a leak."""
ANY_TYPE = "object"
"""The type that is used for all kept objects if the training calls gc.freeze between the boundaries. Objects
that the training froze are counted, but their types are not known."""
SEARCHED = 20  # maximum number of objects per type whose holders are searched
MOST_NEW = 100_000  # maximum number of new objects per type from which the `SEARCHED` objects are chosen

UNKNOWN = "the number of objects that each step keeps is unknown: "
FROZEN_MEANWHILE = (
    "the training calls gc.freeze between steps: the types of the objects that steps keep are unknown"
)
FROZEN = "the training has called gc.freeze: the objects that it froze do not count as kept by steps"
DISABLED = "the training has turned Python's garbage collector off (gc.disable)"
NO_GRAPHS = "the number of tensors with an autograd graph that each step keeps is unknown: "
NO_HOLDERS = "the holders of the objects that steps keep are unknown: "


class Growth:
    """Counts objects by type at three step boundaries: after `first`, after `last`, and in the middle.

    The growth per step is calculated separately for the first half and the second half of the steps. The
    result is the smaller of the two numbers, rounded down (see `MISSING`). The result is therefore zero for
    growth that happens only once, such as filling a cache, and n for code that keeps n objects in each step.

    Between the boundaries, this object refers to no object of the training, not even by id.
    """

    def __init__(self, first: int, last: int) -> None:
        self.notes: list[str] = []  # reasons why growth is unknown, and how the training uses the collector
        self.boundaries = (first, (first + last) // 2, last)
        self._counts: list[dict[str, int]] = []  # the collector does not track dicts of names and numbers
        # Number of tensors with an autograd graph at each boundary. None: unknown.
        self._graphs: list[int | None] = []
        self._frozen: list[int] = []  # number of frozen objects at each boundary
        # An object whose place in the collector's list shows where the objects of the previous boundary end.
        self._mark: list[None] = []
        self._full_collections = 0  # number of full collections until the previous boundary
        self._kept: KeptObjects | None = None
        self.is_over = False  # whether no more objects will be counted

    def is_due(self, steps: int) -> bool:
        """Return whether objects are to be counted after this number of steps."""
        return steps in self.boundaries and not self.is_over

    def count(self) -> None:
        """Count objects at a boundary that is due. An error ends the counting, but not the training."""
        try:
            self._count()
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {error}")

    def _count(self) -> None:
        is_last = len(self._counts) == len(self.boundaries) - 1
        new = self._find_new() if is_last else {}
        if not self._counts:
            _count_types(gc.get_objects(0))  # fills caches that counting itself uses
        _forget_received_storages()
        _collect()
        objects = gc.get_objects()
        self._counts.append(_count_types(objects))
        self._graphs.append(self._count_graphs(objects))
        del objects
        self._frozen.append(gc.get_freeze_count())
        if not is_last:
            self._mark = []
            gc.collect(1)  # moves the mark to the end of the oldest generation
        self._full_collections = _full_collections()
        if is_last:
            self._end(new)

    def _end(self, new: Mapping[str, Sequence[int]]) -> None:
        """Calculate the growth. Search for holders now, because later the training might free the objects."""
        self.is_over = True
        if self._is_frozen_meanwhile:
            totals = zip(self._counts, self._frozen, strict=True)
            self._counts = [{ANY_TYPE: sum(census.values()) + frozen} for census, frozen in totals]
            self.notes.append(FROZEN_MEANWHILE)
        names = sorted(self._counts[-1])
        kept = {name: self._kept_per_step([census.get(name, 0) for census in self._counts]) for name in names}
        by_type = {name: number for name, number in kept.items() if number > 0}
        self._kept = KeptObjects(by_type=by_type)
        graphs = self._known_graphs()
        if graphs is not None:
            kept_graphs = max(self._kept_per_step(graphs), 0)
            left = None if kept_graphs else min(graphs)
            self._kept = self._kept.replace(
                graphs=kept_graphs, graphs_left=left, graphs_after=self.boundaries
            )
        if by_type and not self._is_frozen_meanwhile:
            self._kept = self._with_holders(self._kept, new)
        if self._kept.graphs == 0 and (self._kept.graphs_left or 0) > GRAPHS_FLOOR:
            self._kept = self._with_graph_holders(self._kept)
        if has_training_frozen() and not self._is_frozen_meanwhile:
            self.notes.append(FROZEN)
        if not gc.isenabled():
            self.notes.append(DISABLED)

    def _count_graphs(self, objects: Collection[Any]) -> int | None:
        if None in self._graphs:
            return None  # it has failed before
        try:
            return len(_with_graph(objects))
        except Exception as error:  # a private name of torch might be missing
            self.notes.append(f"{NO_GRAPHS}{type(error).__name__}: {error}")
            return None

    def _known_graphs(self) -> list[int] | None:
        """Return the number of tensors with an autograd graph at each boundary; None if any is unknown."""
        graphs = [number for number in self._graphs if number is not None]
        if len(graphs) < len(self.boundaries) or self._is_frozen_meanwhile:
            return None
        return graphs

    def _kept_per_step(self, numbers: Sequence[int]) -> int:
        """Return how many objects each step keeps, from their numbers at the three boundaries."""
        first, middle, last = self.boundaries
        before, between, after = numbers
        return min(_per_step(between - before, middle - first), _per_step(after - between, last - middle))

    @property
    def _is_frozen_meanwhile(self) -> bool:
        return any(later > earlier for earlier, later in pairwise(self._frozen))

    def _find_new(self) -> dict[str, tuple[int, ...]]:
        """Return, for each type, the ids of objects created since the previous boundary, the oldest first.

        Only types that have grown are included. At the previous boundary, all objects were in the oldest
        generation. Newer objects have been appended to this generation since. A mark in this generation shows
        where the newer objects begin. (The generation's length at the previous boundary does not show this,
        because older objects might have been freed.) If a full collection has run since that boundary, the
        order might have changed, so nothing is returned. If only one step has run since the previous
        boundary, nothing is returned either, because all new objects might belong only to this step.
        """
        _, middle, last = self.boundaries
        if last - middle == 1:
            return {}
        before, between = self._counts
        grown = {name: number - before.get(name, 0) for name, number in between.items()}
        if not any(number > 0 for number in grown.values()):
            return {}  # without growth in the first half, nothing counts as kept
        if _full_collections() != self._full_collections:
            return {}
        new = defaultdict[str, list[int]](list)
        oldest = gc.get_objects(2)
        begin = next((at for at, instance in enumerate(oldest, 1) if instance is self._mark), len(oldest))
        for generation in (oldest[begin:], gc.get_objects(1), gc.get_objects(0)):
            for instance in generation:
                name = type(instance).__name__
                if grown.get(name, 0) > 0 and len(new[name]) < MOST_NEW:
                    new[name].append(id(instance))
        # Return tuples of numbers, because the collector does not track them. Lists would be counted.
        return {name: tuple(identities) for name, identities in new.items()}

    def _with_holders(self, kept: KeptObjects, new: Mapping[str, Sequence[int]]) -> KeptObjects:
        """Return the kept objects with their holders. The search can take a few seconds.

        `new` has the ids of the new objects by type.
        """
        try:
            oldest = self._oldest_alive({name: new.get(name, ()) for name in kept.by_type})
            kept = kept.replace(holders=holders_of(oldest, kept.by_type))
            if kept.graphs:
                kept = kept.replace(graph_holders=holders_of(_with_graph(oldest), kept.by_type))
        except Exception as error:  # a holder can be any object, and reading its attributes can run any code
            self.notes.append(f"{NO_HOLDERS}{type(error).__name__}: {error}")
        return kept

    def _with_graph_holders(self, kept: KeptObjects) -> KeptObjects:
        """Return the kept objects with the holders of tensors with an autograd graph."""
        try:
            tensors = _with_graph(gc.get_objects())[:SEARCHED]
            return kept.replace(graph_holders=holders_of(tensors, {type(each).__name__ for each in tensors}))
        except Exception as error:
            self.notes.append(f"{NO_HOLDERS}{type(error).__name__}: {error}")
            return kept

    def _oldest_alive(self, new: Mapping[str, Sequence[int]]) -> list[Any]:
        """Return, for each type, the oldest new objects that are still alive.

        `new` has the ids of the new objects. Call this right after a collection, because other objects might
        reuse the ids later. If a type has grown by n objects, at most n objects of this type are returned,
        because younger objects might belong only to the last step.
        """
        before, between = self._counts[:2]
        alive = {id(each): each for each in _objects(new)}
        most = {name: min(SEARCHED, between.get(name, 0) - before.get(name, 0)) for name in new}
        oldest: list[Any] = []
        for name, ids in new.items():
            oldest += [alive[each] for each in ids if each in alive][: most[name]]
        return oldest

    def result(self) -> KeptObjects | None:
        """Return the kept objects and their holders, or None if unknown."""
        if not self.is_over:
            self.give_up(f"the training ended before step {self.boundaries[len(self._counts)]}")
        return self._kept

    def give_up(self, why: str) -> None:
        """Stop counting objects."""
        self.is_over = True
        self._counts.clear()
        self.notes.append(UNKNOWN + why)


def _full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def _collect() -> None:
    """Collect all garbage, the youngest objects first.

    A collection untracks each container that contains no tracked objects, for example a tuple of numbers. A
    tuple of such tuples is untracked only by the next collection. So new objects go through three
    collections. Older objects go through only one, because a full collection takes a few tenths of a second.
    """
    for generation in range(3):
        gc.collect(generation)


def _forget_received_storages() -> None:
    """Drop torch's records of storages that loader workers have sent and that have been freed since.

    torch itself drops these records whenever there are 128 of them, so they do not count as growth.
    """
    cache = getattr(sys.modules.get("torch.multiprocessing.reductions"), "shared_cache", None)
    if cache is not None:
        with cache.lock:
            cache.free_dead_references()


def _per_step(growth: int, steps: int) -> int:
    return math.floor((growth + min(MISSING * steps, MOST_MISSING)) / steps)


def _count_types(objects: Iterable[Any]) -> dict[str, int]:
    """Return the number of objects of each type, without those that perfsuite itself keeps for each step.

    Types are identified by name, because a training run might create the same type again in each step.
    """
    of_types = Counter(map(type, objects))
    of_types.subtract(map(type, own_list.tracked_elements()))
    by_name: dict[str, int] = {}
    for kind, number in of_types.items():
        by_name[kind.__name__] = by_name.get(kind.__name__, 0) + number
    return by_name


def _with_graph(objects: Collection[Any]) -> list[Any]:
    """Return the tensors among these objects that refer to an autograd graph.

    The nodes of a graph belong to C++, so the collector does not track them. But they keep activations alive.

    This function does not read `grad_fn`. If the base of a view was changed in place, reading `grad_fn` would
    make torch replace the view's graph, and a later backward of the training could fail. Instead, this
    function looks at the base of a view, which shows whether the view has a graph. `without_torch_function`
    prevents subclasses of `Tensor` from running code of their own.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    tensors = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    base_of = private.base_of_view
    with private.without_torch_function():
        bases = [(each, base_of(each)) for each in objects if type(each) in tensors]
        return [tensor for tensor, base in bases if not (tensor if base is None else base).is_leaf]


def _objects(identities: Mapping[str, Sequence[int]]) -> list[Any]:
    """Return the objects that have these ids and types."""
    wanted = {name: frozenset(each) for name, each in identities.items()}
    return [each for each in gc.get_objects() if id(each) in wanted.get(type(each).__name__, ())]
