"""Finds what holds objects: a module's global, an attribute of a class or an instance, a local variable.

Imports no torch.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FrameType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

from perfsuite.worker.counting.python_calls import OURS
from perfsuite.worker.observation.frozen import unfrozen

DEPTH = 10  # holders between an object and the one that has a name
MOST_FOLLOWED = 100  # objects whose holders are searched at once
MOST_NAMED = 2
OUTSIDE = "something outside of Python, such as C++ code"


class _Link(NamedTuple):
    """An object, and the one below that it holds: a chain that ends at an object whose holder is searched."""

    thing: Any
    below: _Link | None
    ends: int = 1  # objects whose holder is searched, below this one


def holders_of(objects: Sequence[Any], growing: Collection[str]) -> tuple[str, ...]:
    """Return what holds these objects, the most frequent first; nothing where it has no name.

    `growing` are the types of the objects. An attribute of one of them is no holder: something holds both.
    Holders are also searched among frozen objects. These are frozen again, with all others.
    """
    with unfrozen(collects=False):
        return _holders_of(objects, growing)


def _holders_of(objects: Sequence[Any], growing: Collection[str]) -> tuple[str, ...]:
    found = Counter[str]()
    seen = {id(thing) for thing in objects}
    variables = _local_variables()
    level = [_Link(thing, None) for thing in objects]
    for _ in range(DEPTH):
        above = [link for link in _holders(level[:MOST_FOLLOWED]) if link.thing is not objects]
        following: dict[int, _Link] = {}
        for link in above:
            name = _name(link, growing)
            if name is None and type(link.thing).__name__ not in growing:
                name = variables.get(id(link.thing))
            if name is not None:
                found[name] += link.ends
            elif id(link.thing) not in seen and not isinstance(link.thing, type):
                other = following.get(id(link.thing))
                ends = link.ends + (0 if other is None else other.ends)
                following[id(link.thing)] = link._replace(ends=ends)
        seen.update(following)
        level = [*following.values()]
        if not level:
            break
    if objects and not found and not level:
        return (OUTSIDE,)
    most = max(found.values(), default=0)
    named = [name for name, votes in found.most_common(MOST_NAMED) if votes > most / 2]
    return tuple(f"`{name}`" for name in named)


def _holders(level: list[_Link]) -> Iterator[_Link]:
    """Yield a link for each object that holds one of the level."""
    by_identity = {id(link.thing): link for link in level}
    for holder in gc.get_referrers(*(link.thing for link in level)):
        if not isinstance(holder, _Link | FrameType | ModuleType):
            held = (by_identity.get(id(each)) for each in gc.get_referents(holder))
            yield from (_Link(holder, link, link.ends) for link in held if link is not None)


def _name(link: _Link, growing: Collection[str]) -> str | None:
    """Return the name by which an object holds the one below; None if it is one of a chain without a name."""
    thing, below, _ = link
    assert below is not None
    if isinstance(thing, dict):
        module = dict.get(thing, "__name__")
        is_module = isinstance(module, str) and getattr(sys.modules.get(module), "__dict__", None) is thing
        return f"{module}.{_key(thing, below.thing)}" if is_module else None
    if isinstance(thing, FunctionType):  # in a closure, or as a default; its globals are the module's
        return None if below.thing is thing.__globals__ else f"{thing.__module__}.{thing.__qualname__}"
    owner = thing if isinstance(thing, type) else type(thing)
    if owner is not thing and owner.__name__ in growing:
        return None
    # The attributes are a dictionary of their own, which is then what is below, or within the object.
    attribute = None
    if below.below is not None and isinstance(below.thing, dict):
        attribute = _key(_attributes(thing), below.below.thing)
    attribute = attribute or _key(_attributes(thing), below.thing) or _slot(thing, below.thing)
    return None if attribute is None else f"{owner.__qualname__}.{attribute}"


def _attributes(thing: Any) -> Mapping[str, Any]:
    try:
        attributes: Mapping[str, Any] = vars(thing)
    except Exception:  # it has none, or makes them
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


def _local_variables() -> dict[int, str]:
    """Return the names of the variables of functions that run, by the identity of what they are."""
    names: dict[int, str] = {}
    for frame in sys._current_frames().values():
        above: FrameType | None = frame
        while above is not None:
            code = above.f_code
            if not code.co_filename.startswith(OURS) and code.co_name != "<module>":
                module = above.f_globals.get("__name__", "")
                for name, value in above.f_locals.items():
                    if name.isidentifier():  # others are of comprehensions and the like
                        names.setdefault(id(value), f"{module}.{code.co_qualname}.{name}")
            above = above.f_back
    return names
