"""The private names of pytest that the plugin uses.

For each name, `tests/plugin/test_private.py` has a test that fails if pytest changes the name.
"""

from collections.abc import Mapping
from typing import Any

import pytest

EMPTY_REASON = "got empty parameter set"
"""Beginning of pytest's reason to skip a test whose parametrization is empty (seen in pytest 8 and 9).

If pytest changes this text, `is_unset` still finds such a test, but collection then ends with an error."""


def parameters(item: pytest.Item) -> Mapping[str, object]:
    """Return the values of a test's parameters, by name: `item.callspec` (seen in pytest 8 and 9).

    If pytest removes this attribute, no test has a case, which is an error during collection.
    """
    callspec: Any = getattr(item, "callspec", None)
    return {} if callspec is None else callspec.params


def is_unset(value: object) -> bool:
    """Return whether a parameter has no value: `_pytest.compat.NOTSET` (seen in pytest 8 and 9).

    If pytest removes this name, only `EMPTY_REASON` finds a test whose parametrization is empty.
    """
    from _pytest import compat

    return value is getattr(compat, "NOTSET", object())


def expression(text: str) -> Any:
    """Compile a value of `-m`: `_pytest.mark.expression.Expression` (seen in pytest 8.3 to 9.2).

    If pytest removes this name, None is returned. Then, if `-m` deselects a case, its baseline looks
    unclaimed, and a complete nightly run fails because of it.
    """
    try:
        from _pytest.mark.expression import Expression
    except ImportError:
        return None
    return Expression.compile(text)
