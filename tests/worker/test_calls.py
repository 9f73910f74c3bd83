import sys
from types import ModuleType

import pytest

from perfsuite.worker import calls


def test_of_a_package_only_methods_that_send_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class Buffer:
        combine_limit = 8

        def combine(self) -> str:
            return "sent"

        def size(self) -> int:
            return 1

    size, package = Buffer.size, ModuleType("deep_ep")
    monkeypatch.setitem(sys.modules, "deep_ep", package)
    monkeypatch.setattr(package, "Buffer", Buffer, raising=False)
    before = calls.seen.copy()
    calls.watch_packages()
    assert (Buffer().combine(), Buffer.combine_limit, Buffer.size) == ("sent", 8, size)
    assert (calls.seen - before).total() == 1
