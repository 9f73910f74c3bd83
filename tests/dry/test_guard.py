import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perfsuite.case import torch_build
from perfsuite.dry import guard
from perfsuite.errors import DryRunError
from tests.processes import executable

FOR_CPUS = {"__version__": "2.13.0+cpu"}
"""What a build of torch without CUDA tells of itself: the tests may run with another."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def compiler(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a compiler of our own before all others."""
    executable(directory / "g++", script)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_missing_compiler_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_build, "installed", lambda: FOR_CPUS)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert guard.why_not() == "there is no C++ compiler: install g++ (apt-get install g++)"
    guard.library().parent.mkdir(parents=True)
    guard.library().touch()
    assert guard.why_not() is None


def test_a_build_for_gpus_is_not_pretended_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.13.0", "cuda": "13.0"})
    told = "torch 2.13.0 is built for CUDA 13.0: CUDA is pretended in a build for CPUs only"
    assert guard.why_not() == told


def test_library_depends_on_torch_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = guard.library()
    assert first.parent == tmp_path / "cache" / "perfsuite"
    monkeypatch.setattr(guard, "_torch", lambda: tmp_path / "another environment" / "torch")
    second = guard.library()
    monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.99.0"})
    third = guard.library()
    other = tmp_path / "guard.cpp"
    other.write_text("// another")
    monkeypatch.setattr(guard, "SOURCE", other)
    assert len({first, second, third, guard.library()}) == 4


def test_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, "echo 'guard.cpp: no such header' >&2; exit 1", monkeypatch)
    with pytest.raises(DryRunError, match=r"(?s)g.. cannot build .*It said: guard.cpp: no such header"):
        guard.build(guard.library())
    assert list(guard.library().parent.iterdir()) == []


def test_two_processes_may_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo built > "$2"', monkeypatch)
    with ThreadPoolExecutor() as pool:
        list(pool.map(guard.build, [guard.library()] * 4))
    assert [file.read_text() for file in guard.library().parent.iterdir()] == ["built\n"]
