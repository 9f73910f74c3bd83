"""What frameworks know of libraries is found once a process imports them."""

import importlib
import sys

import pytest

from perfsuite.errors import ExtensionError
from perfsuite.worker.hooks import libraries
from tests.packages import Packages
from tests.worker import motor


def test_asks_for_a_library_only_once_imported(packages: Packages) -> None:
    motor.install(packages)
    assert libraries.imported() == []
    assert "perf_motor" not in sys.modules
    importlib.import_module("motor")
    (library,) = libraries.imported()
    assert library.shard == "motor_part"


def test_finds_nothing_of_a_framework_without_one(packages: Packages) -> None:
    assert "ddp" in libraries.names()
    assert libraries.of("ddp") is None


def test_names_the_packages_of_imported_libraries(packages: Packages) -> None:
    motor.install(packages)
    assert "perf-motor" not in libraries.packages()
    importlib.import_module("motor")
    assert "perf-motor" in libraries.packages()


def test_leaves_a_broken_framework_out(packages: Packages) -> None:
    """Only the hooks that wait for its library name it, in a note."""
    motor.install(packages)
    (packages.directory / "perf_motor.py").write_text("import nothing_like_this")
    importlib.import_module("motor")
    with pytest.raises(ExtensionError, match=r"perf_motor:Motor.* of perf-motor 1\.5 .* cannot be imported"):
        libraries.of("motor")
    assert libraries.imported() == []
    assert "perf-motor" not in libraries.packages()
