import sys
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import pytest
import torch

from perfsuite.worker.hooks import calls


def test_notices_a_call_once_if_watched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: "replayed")
    before = calls.seen.copy()
    calls.watch()
    calls.watch()
    replay: Any = torch.cuda.CUDAGraph.replay
    assert replay(None) == "replayed"
    assert (calls.seen - before).total() == 1


@pytest.mark.parametrize("function", calls.STALLING)
def test_a_stall_is_counted_by_its_name(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _, name = function.rpartition(".")
    monkeypatch.setattr(resolve_name(owner), name, lambda *_: "waited")
    before = calls.stalls.copy()
    calls.watch()
    assert getattr(resolve_name(owner), name)() == "waited"
    assert calls.stalls - before == {function: 1}


def test_replaces_only_methods_that_send(monkeypatch: pytest.MonkeyPatch) -> None:
    class Buffer:
        combine_limit = 8

        def combine(self) -> str:
            return "sent"

        def size(self) -> int:
            return 1

    size = Buffer.size
    package = ModuleType("deep_ep")
    monkeypatch.setitem(sys.modules, "deep_ep", package)
    monkeypatch.setattr(package, "Buffer", Buffer, raising=False)
    before = calls.seen.copy()
    calls.watch_packages()
    assert (Buffer().combine(), Buffer.combine_limit, Buffer.size) == ("sent", 8, size)
    assert (calls.seen - before).total() == 1


class Engine:
    """A class of a library that has each kind of method."""

    def step(self, value: str) -> tuple[type, str]:
        return type(self), value

    @classmethod
    def load(cls, value: str) -> tuple[type, str]:
        return cls, value

    @staticmethod
    def clip(value: str) -> tuple[type, str]:
        return Engine, value


@pytest.mark.parametrize("name", ["step", "load", "clip"])
def test_watched_methods_are_called_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, name, vars(Engine)[name])
    seen: list[Any] = []
    calls.before(Engine, name, lambda *args: seen.append(args[-1]))
    assert getattr(Engine(), name)("x") == (Engine, "x")
    assert getattr(Engine, name).is_watched
    assert seen == ["x"]


def test_an_inherited_class_method_keeps_its_class() -> None:
    class Derived(Engine):
        """A class that inherits its methods."""

    calls.before(Derived, "load", lambda *_: None)
    assert Derived().load("x") == (Derived, "x")
    assert not hasattr(Engine.load, "is_watched")
