"""A framework as a case names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


from typing import TYPE_CHECKING, Literal

from perfsuite.documents import Data

if TYPE_CHECKING:
    pass


LossRule = Literal["falls", "finite"]
"""`falls`: every loss is a finite number, and those of the last steps are lower than those of the first.
`finite`: every loss is a finite number. Either way the curve has to follow the baseline's."""


def changed_fields(data: Data, skip: frozenset[str] = frozenset()) -> list[str]:
    """Fields that are required or differ from their default, short and readable, in declared order."""
    parts = []
    for name, info in type(data).model_fields.items():
        value = getattr(data, name)
        if name in skip or (not info.is_required() and value == info.default):
            continue
        if isinstance(value, bool) or value is None:
            parts.append(name if value else f"no_{name}")
        elif isinstance(value, str):
            parts.append(value.lower())
        elif isinstance(value, Data):
            parts += [name, *changed_fields(value)]
        elif isinstance(value, tuple):
            parts.append(name + "x".join(str(item) for item in value))
        else:
            parts.append(
                name + repr(value).removesuffix(".0") if isinstance(value, float) else f"{name}{value}"
            )
    return parts
