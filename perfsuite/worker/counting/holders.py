"""Find the holders of objects: globals of modules, attributes of classes or instances, local variables.

Imports no torch.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

from perfsuite.frameworks.common.own_list import OwnList
from perfsuite.worker.counting.python_calls import OURS
from perfsuite.worker.observation.frozen import unfrozen

DEPTH = 10  # maximum number of holders between an object and its named holder
MOST_FOLLOWED = 100  # maximum number of objects whose holders are searched at once
MOST_NAMED = 2  # maximum number of holders to report
OUTSIDE = "something outside of Python, such as C++ code"


class _Link(NamedTuple):
    """A link in a chain of holders. The object `thing` holds the object of the link `below`.

    The `thing` of the lowest link is one of the objects whose holders are searched.
    """

    thing: Any
    below: _Link | None
    ends: int  # the searched objects that `thing` holds, directly or through others. One bit per object


def holders_of(objects: Sequence[Any], growing: Collection[str]) -> tuple[str, ...]:
    """Return the names of the holders of these objects, the most frequent holder first.

    `growing` are the types of the objects. The search follows these rules:

    - An attribute of an object of a growing type is not reported as a holder. The search continues with the
      holders of that object, which explain why the object is kept.
    - Weak references are left out, because they hold nothing, and because their own holders do not explain
      the growth.
    - Suppose that the search finds no named holder for n objects. A holder of the other objects is then
      reported only if it holds more than n of them. Otherwise, readers would look only at this holder, and
      would overlook whatever holds those n objects.
    - A holder of at most half as many objects as the most frequent holder is left out as well.
    - Suppose that an object is the value of a global or an attribute, and that its type does not grow (a
      list, for example). The search ends at this object. Its other holders do not matter, because they are
      only other paths to it.

    Frozen objects are searched as well. Afterwards they are frozen again, together with all other objects.
    """
    with unfrozen(collects=False):
        return _holders_of(objects, growing)


def _holders_of(objects: Sequence[Any], growing: Collection[str]) -> tuple[str, ...]:
    held = [thing for thing in objects if not _is_weak(thing)]
    first = _Search((objects, held), growing, {})
    first.run(held[:MOST_FOLLOWED])
    search = _Search((objects, held), growing, first.with_name)
    search.run(held[:MOST_FOLLOWED])
    votes = Counter({name: ends.bit_count() for name, ends in search.found.items()})
    without = len(held[:MOST_FOLLOWED]) - _union(search.found.values()).bit_count()
    least = max(max(votes.values(), default=0) / 2, without)
    named = tuple(f"`{name}`" for name, number in votes.most_common(MOST_NAMED) if number > least)
    return (OUTSIDE,) if held and not named and search.is_complete else named


class Garbage:
    """Names the holders of objects that only the garbage collector frees, because of reference cycles.

    Create it before the collector runs, and call `holders` afterwards. It does not keep the objects alive.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        followed = objects[:MOST_FOLLOWED]
        search = _Search((objects, followed), (), {}, follows_frames=True)
        search.run(followed)
        self._found = search.found
        self._objects = [ref(thing) for thing in followed]

    def holders(self) -> tuple[str, ...]:
        """Return the names of the most frequent holders of the objects that have been freed by now."""
        freed = functools.reduce(
            operator.or_, (1 << at for at, alive in enumerate(self._objects) if alive() is None), 0
        )
        votes = Counter({name: (ends & freed).bit_count() for name, ends in self._found.items()})
        return tuple(f"`{name}`" for name, number in votes.most_common(MOST_NAMED) if number)


class _Search:
    """Follows the holders of objects, level by level, until a holder has a name.

    `ends` contains objects with names that are already known. The holders of these objects are not followed.
    """

    def __init__(
        self,
        ignored: Sequence[Any],
        growing: Collection[str],
        ends: Mapping[int, tuple[Any, str]],
        *,
        follows_frames: bool = False,
    ) -> None:
        self.found: dict[str, int] = {}  # name -> the objects that it holds, with one bit per object
        # id -> an object and its name. Objects whose type grows in number are left out.
        self.with_name: dict[int, tuple[Any, str]] = {}
        self.is_complete = False  # whether nothing is left to follow
        self._ignored = (*ignored, self.with_name, ends)
        self._growing = growing
        self._ends = ends
        self._follows_frames = follows_frames
        self._reached: dict[tuple[int, int], int] = {}

    def run(self, objects: Sequence[Any]) -> None:
        """Search for the holders of these objects."""
        level = [_Link(thing, None, 1 << at) for at, thing in enumerate(objects)]
        self._reached = {_place(link): link.ends for link in level}
        variables = {} if self._follows_frames else _local_variables()
        for _ in range(DEPTH):
            level = self._next(level, variables)
            if not level:
                break
        self.is_complete = not level

    def _next(self, level: list[_Link], variables: Mapping[int, str]) -> list[_Link]:
        """Record the named holders of a level. Return links to the others, which are to be followed.

        The first link is the one that leads to the largest number of searched objects.
        """
        following: dict[tuple[int, int], _Link] = {}
        links = [*_holders(level, self._ignored, follows_frames=self._follows_frames)]
        held_by = defaultdict[int, int](int)  # id of a holder -> the searched objects that it holds
        for link in links:
            held_by[id(link.thing)] |= link.ends
        for link in links:
            name = self._name(link, variables, number=held_by[id(link.thing)].bit_count())
            if name is not None:
                self.found[name] = self.found.get(name, 0) | link.ends
                continue
            place = _place(link)
            new = link.ends & ~self._reached.get(place, 0)
            # Follow a link only once for each searched object, even if several paths lead to it.
            if new and not isinstance(link.thing, type):
                self._reached[place] = self._reached.get(place, 0) | new
                previous = following.get(place)
                following[place] = link._replace(ends=new | (0 if previous is None else previous.ends))
        return sorted(following.values(), key=lambda link: -link.ends.bit_count())[:MOST_FOLLOWED]

    def _name(self, link: _Link, variables: Mapping[int, str], *, number: int) -> str | None:
        """Return the name of a holder, or None. It holds this number of the searched objects."""
        end = self._ends.get(id(link.thing))
        if end is not None:
            return end[1]
        name = _name(link, self._growing)
        if name is not None:
            self._note(link, name)
        elif type(link.thing).__name__ not in self._growing or number > 1:
            # A variable with an object of a growing type can be the object of one step. If it holds several
            # of the objects, it is their container, for example a list of lists.
            name = variables.get(id(link.thing))
        return name

    def _note(self, link: _Link, name: str) -> None:
        """Record the object that has this name: the value of a global or of an attribute."""
        below = link.below
        assert below is not None
        if isinstance(link.thing, FunctionType):
            return
        is_attribute = not isinstance(link.thing, dict) and isinstance(below.thing, dict)
        if is_attribute and below.below is not None and _key(_attributes(link.thing), below.below.thing):
            below = below.below
        if below.below is not None and type(below.thing).__name__ not in self._growing:
            self.with_name[id(below.thing)] = below.thing, name


def _is_weak(thing: Any) -> bool:
    return issubclass(type(thing), ReferenceType)  # `isinstance` would read the `__class__` of `thing`


def _place(link: _Link) -> tuple[int, int]:
    """Return the key under which a search stores a link.

    If `link.thing` is a dictionary, the key also depends on the object below it, because each value of
    a dictionary gets its own name later.
    """
    if link.below is None or not isinstance(link.thing, dict):
        return id(link.thing), 0
    return id(link.thing), id(link.below.thing)


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, masks, 0)


def _holders(level: list[_Link], ignored: Sequence[Any], *, follows_frames: bool) -> Iterator[_Link]:
    """Yield a link for each holder of an object in `level`. Holders in `ignored` are left out.

    With `follows_frames`, frames that no longer run, such as those of a caught exception, are holders.
    """
    running = _running() if follows_frames else set()
    by_identity = defaultdict[int, list[_Link]](list)
    for link in level:
        by_identity[id(link.thing)].append(link)
    for holder in gc.get_referrers(*(link.thing for link in level)):
        if isinstance(holder, _Link | ModuleType) or type(holder) is OwnList or _is_weak(holder):
            continue
        if isinstance(holder, FrameType) and (not follows_frames or id(holder) in running):
            continue
        if not any(holder is each for each in ignored):
            held = (link for each in gc.get_referents(holder) for link in by_identity.get(id(each), ()))
            yield from (_Link(holder, link, link.ends) for link in held)


def _name(link: _Link, growing: Collection[str]) -> str | None:
    """Return the name under which an object holds the object below it, or None if the holder has no name."""
    thing, below, _ = link
    assert below is not None
    if isinstance(thing, dict):
        module = dict.get(thing, "__name__")
        is_module = isinstance(module, str) and getattr(sys.modules.get(module), "__dict__", None) is thing
        return f"{module}.{_key(thing, below.thing)}" if is_module else None
    # Do not read the variables of a frame, because this would keep their values alive. Use the name of its
    # function instead.
    if isinstance(thing, FrameType):
        return f"{thing.f_globals.get('__name__', '')}.{thing.f_code.co_qualname}"
    # A function holds objects in its closure or its defaults. Its globals belong to the module.
    if isinstance(thing, FunctionType):
        if below.thing is thing.__globals__ or type(thing).__name__ in growing:
            return None
        return f"{thing.__module__}.{thing.__qualname__}"
    owner = thing if isinstance(thing, type) else type(thing)
    if owner is not thing and owner.__name__ in growing:
        return None
    # An object's attributes are either in its `__dict__`, which is then the object below in the chain, or in
    # the object itself (slots).
    attribute = None
    if below.below is not None and isinstance(below.thing, dict):
        attribute = _key(_attributes(thing), below.below.thing)
    attribute = attribute or _key(_attributes(thing), below.thing) or _slot(thing, below.thing)
    return None if attribute is None else f"{owner.__qualname__}.{attribute}"


def _attributes(thing: Any) -> Mapping[str, Any]:
    try:
        attributes: Mapping[str, Any] = vars(thing)
    except Exception:  # the object has no attributes, or reading them runs code that fails
        return {}
    return attributes


def _slot(thing: Any, value: Any) -> str | None:
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            member = vars(kind).get(name)
            if isinstance(member, MemberDescriptorType) and getattr(thing, str(name), None) is value:
                return str(name)
    return None


def _key(values: Mapping[Any, Any], value: Any) -> str | None:
    return next((str(key) for key, each in [*values.items()] if each is value), None)


def _running() -> set[int]:
    """Return the ids of the frames of all running functions."""
    ids = set[int]()
    for frame in sys._current_frames().values():
        above: FrameType | None = frame
        while above is not None:
            ids.add(id(above))
            above = above.f_back
        del frame  # as in `_local_variables`
    return ids


def _local_variables() -> dict[int, str]:
    """Return the names of the local variables of running functions. The keys are the ids of the values."""
    names: dict[int, str] = {}
    for frame in sys._current_frames().values():
        above: FrameType | None = frame
        while above is not None:
            code = above.f_code
            if not code.co_filename.startswith(OURS) and code.co_name != "<module>":
                module = above.f_globals.get("__name__", "")
                for name, value in above.f_locals.items():
                    if name.isidentifier():  # names such as `.0` belong to comprehensions
                        names.setdefault(id(value), f"{module}.{code.co_qualname}.{name}")
            above = above.f_back
        del frame  # one of the frames is this function's own, and would keep itself and its callers alive
    return names
