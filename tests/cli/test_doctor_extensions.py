from __future__ import annotations

import pytest

from perfsuite.cli.doctor_checks import extensions_row
from tests.fake_packages import Packages, packages

__all__ = ["packages"]

FAKE = """
from typing import ClassVar
from perfsuite.frameworks.fake import Fake

class Mine(Fake):
    name: ClassVar[str] = "{name}"
"""


def test_no_extension(packages: Packages) -> None:
    row = extensions_row()
    assert (row.check, row.status, row.found) == ("extensions", "pass", "none installed")


def test_good_extensions_are_listed(packages: Packages) -> None:
    packages.install("perf-mine", FAKE.format(name="mine"), frameworks="mine = perf_mine:Mine")
    packages.install("perf-k8s", "K8s = object()", launchers="k8s = perf_k8s:K8s")
    row = extensions_row()
    assert (row.status, row.found) == ("pass", "mine of perf-mine, k8s of perf-k8s")


@pytest.mark.parametrize(
    ("code", "entry_points", "said"),
    [
        ("", {"launchers": "local = perf_mine:X"}, "taken twice: by perfsuite itself, and by perf-mine 1.5"),
        (FAKE.format(name="ddp"), {"frameworks": "ddp = perf_mine:Mine"}, "taken twice: by perfsuite itself"),
        (
            FAKE.format(name="x"),
            {"frameworks": "mine = perf_mine:Mine"},
            "Mine.name is 'x': set it to 'mine'",
        ),
        ("M = 3", {"metrics": "m = perf_mine:M"}, "it is a int"),
        ("1 / 0", {"launchers": "m = perf_mine:M"}, "cannot be imported: ZeroDivisionError"),
    ],
)
def test_bad_extensions_say_what_is_wrong(
    packages: Packages, code: str, entry_points: dict[str, str], said: str
) -> None:
    packages.install("perf-mine", code, **entry_points)
    row = extensions_row()
    assert row.status == "fail"
    assert said in row.found
    assert "pip uninstall perf-mine" in row.found
    assert row.advice is not None
