"""Tests of private names: the installed pytest still has them, and perfsuite can do without some of them."""

from types import SimpleNamespace

import pytest
from _pytest.mark import structures

from perfsuite.plugin import private


def test_pytest_has_its_reason_for_an_empty_parametrization(pytestconfig: pytest.Config) -> None:
    def function(case: object) -> None: ...

    mark = structures.get_empty_parameterset_mark(pytestconfig, ["case"], function)
    assert str(mark.kwargs["reason"]).startswith(private.EMPTY_REASON)


@pytest.mark.parametrize("value", ["given"])
def test_pytest_has_parameters(request: pytest.FixtureRequest, value: str) -> None:
    assert private.parameters(request.node) == {"value": value}


def test_a_test_without_parameters_has_none(request: pytest.FixtureRequest) -> None:
    assert private.parameters(request.node) == {}


def test_pytest_has_its_mark_of_a_missing_value() -> None:
    from _pytest.compat import NOTSET

    assert private.is_unset(NOTSET)
    assert not private.is_unset(None)


def test_without_that_mark_no_value_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from _pytest.compat import NOTSET

    with monkeypatch.context() as patched:
        patched.setattr("_pytest.compat", SimpleNamespace())
        assert not private.is_unset(NOTSET)


def test_pytest_has_expressions_of_marks() -> None:
    expression = private.expression("slow and not gpu")
    assert expression.evaluate(lambda name, **values: name == "slow")


def test_without_expressions_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("_pytest.mark.expression.Expression")
    assert private.expression("slow") is None
