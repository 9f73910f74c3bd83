"""Test that when a process imports a library, the frameworks that know the library are found."""

import importlib
import sys

import pytest

from perfsuite import extensions
from perfsuite.errors import ExtensionError
from perfsuite.worker.hooks import libraries
from tests.packages import Packages
from tests.worker import motor


@pytest.fixture(autouse=True)
def _no_library_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the libraries that earlier tests in this process have imported."""
    for name in extensions.names(extensions.FRAMEWORKS):
        monkeypatch.delitem(sys.modules, name, raising=False)


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
    """A broken framework is left out of `imported()` and `packages()`.

    Only `of()` raises an error, which names the framework. The import hooks turn this error into a note.
    """
    motor.install(packages)
    (packages.directory / "perf_motor.py").write_text("import nothing_like_this")
    importlib.import_module("motor")
    with pytest.raises(ExtensionError, match=r"perf_motor:Motor.* of perf-motor 1\.5 .* cannot be imported"):
        libraries.of("motor")
    assert libraries.imported() == []
    assert "perf-motor" not in libraries.packages()


def test_imports_a_broken_framework_once(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock asks for the frameworks in each step, so a failed import must not be repeated."""
    tries: list[str] = []
    monkeypatch.setattr(sys, "tried", tries.append, raising=False)
    motor.install(packages)
    broken = "import sys; sys.tried('once')\nimport nothing_like_this"
    (packages.directory / "perf_motor.py").write_text(broken)
    importlib.import_module("motor")
    for _ in range(3):
        assert libraries.imported() == []
    assert tries == ["once"]


def test_reads_the_names_of_frameworks_once(packages: Packages) -> None:
    """The names come from the metadata of all packages, and the clock asks for them in each step."""
    for _ in range(3):
        libraries.imported()
    reads = libraries.names.cache_info()
    assert (reads.misses, reads.hits) == (1, 2)


def test_finds_a_library_imported_after_others(packages: Packages) -> None:
    motor.install(packages)
    importlib.import_module("motor")
    (first,) = libraries.imported()
    other = motor.FRAMEWORK.replace("motor.", "boat.").replace('"motor"', '"boat"')
    packages.install("perf-boat", other, frameworks="boat = perf_boat:Motor")
    (packages.directory / "boat.py").write_text("")
    assert [library.engine for library in libraries.imported()] == [first.engine]
    importlib.import_module("boat")
    assert len(libraries.imported()) == 2
