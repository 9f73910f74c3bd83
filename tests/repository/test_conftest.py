"""Tests that `conftest.py` keeps its promise: `make test` passes on a machine with GPUs."""

import os
import re
import shutil
import sys
import threading
from pathlib import Path

import pytest

from perfsuite import extensions
from perfsuite.extensions import FRAMEWORKS
from perfsuite.node.machine import detect
from tests.conftest import is_forked, threads_left

TESTS = Path(__file__).parents[1]
PYPROJECT = TESTS.parent / "pyproject.toml"
NO_DRIVER = """
class NVMLError(Exception): ...
def nvmlInit(): raise NVMLError("no driver")
"""
IS_HIDDEN = "import os\ndef test_it():\n    assert os.environ['CUDA_VISIBLE_DEVICES'] == ''\n"
SETS_A_VARIABLE = """
import os

def test_sets_it():
    os.environ["OF_A_LIBRARY"] = "1"

def test_does_not_see_it():
    assert "OF_A_LIBRARY" not in os.environ
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return tests that use this project's conftest, on a machine whose first GPU is visible."""
    shutil.copy(TESTS / "conftest.py", pytester.mkdir("tests"))
    (pytester.path / "tests" / "test_any.py").write_text(IS_HIDDEN)
    pytester.mkdir("tests/gpu")
    (pytester.path / "tests" / "gpu" / "test_gpu.py").write_text("def test_it():\n    raise AssertionError\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return pytester


def test_no_test_here_sees_a_gpu() -> None:
    assert detect().note == "CUDA_VISIBLE_DEVICES hides every GPU"


@pytest.mark.launch
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param("tests", marks=pytest.mark.nightly),
        pytest.param("tests/test_any.py", marks=pytest.mark.nightly),
        "tests/test_any.py::test_it",
    ],
)
def test_gpus_are_hidden_and_their_tests_left_out(project: pytest.Pytester, asked: str) -> None:
    project.runpytest_subprocess(asked, "-p", "no:hypothesispytest").assert_outcomes(passed=1)


def test_a_variable_ends_with_the_test_that_set_it(project: pytest.Pytester) -> None:
    (project.path / "tests" / "test_any.py").write_text(SETS_A_VARIABLE)
    project.runpytest_inprocess("tests", "-p", "no:hypothesispytest").assert_outcomes(passed=2)


def test_names_the_threads_that_a_test_left() -> None:
    has_begun = threading.Event()
    is_over = threading.Event()

    def serve() -> None:
        has_begun.set()
        is_over.wait()

    before = {*sys._current_frames()}
    thread = threading.Thread(target=serve)
    thread.start()
    has_begun.wait()
    try:
        (left,) = threads_left(before, wait_s=0)
    finally:
        is_over.set()
    assert "test_names_the_threads_that_a_test_left.<locals>.serve (" in left
    assert threads_left(before) == [], "a thread gets time to end"
    thread.join()


@pytest.mark.launch
@pytest.mark.parametrize(
    "asked", [pytest.param("tests/gpu", marks=pytest.mark.nightly), "tests/gpu/test_gpu.py::test_it"]
)
def test_gpu_tests_run_alone_or_are_skipped(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    project.makepyfile(pynvml=NO_DRIVER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(project.path), os.environ.get("PYTHONPATH", "")]))
    result = project.runpytest_subprocess(asked, "-rs", "-p", "no:hypothesispytest")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*it needs a GPU: NVML found no GPU: no driver*"])


@pytest.mark.launch
@pytest.mark.parametrize(
    "ways", [(), pytest.param(("--numprocesses=1",), marks=pytest.mark.nightly)], ids=["alone", "xdist"]
)
def test_a_hang_ends_with_its_test_and_its_stack(pytester: pytest.Pytester, ways: tuple[str, ...]) -> None:
    (settings,) = re.findall(r"^faulthandler_.*\n^faulthandler_.*\n", PYPROJECT.read_text(), re.MULTILINE)
    assert "= 900\n" in settings
    pytester.makeini("[pytest]\n" + settings.replace("900", "1"))
    pytester.makepyfile("import time\ndef test_slow():\n    time.sleep(600)\n")
    result = pytester.runpytest_subprocess(*ways, "-p", "no:hypothesispytest", timeout=120)
    assert result.ret == 1
    assert re.search(r"Timeout \(0:00:01\)!(.*\n)+.*line 3 in test_slow", result.stderr.str())
    if ways:
        result.stdout.fnmatch_lines(["worker 'gw0' crashed while running '*::test_slow'", "*1 failed*"])


LAYERED = """
import pytest

def test_plain(): ...

@pytest.mark.smoke
def test_first(): ...

@pytest.mark.launch
def test_second(): ...

@pytest.mark.nightly
def test_third(): ...

@pytest.mark.browser
def test_page(): ...
"""


def test_every_test_has_the_mark_of_its_layer(pytester: pytest.Pytester) -> None:
    shutil.copy(TESTS / "conftest.py", pytester.path)
    pytester.makeini("[pytest]\nmarkers = unit\n launch\n smoke\n nightly\n browser")
    pytester.makepyfile(LAYERED)
    items, _ = pytester.inline_genitems("-p", "no:hypothesispytest")
    assert {item.name: {mark.name for mark in item.iter_markers()} for item in items} == {
        "test_plain": {"unit"},
        "test_first": {"smoke", "launch"},
        "test_second": {"launch"},
        "test_third": {"nightly", "launch"},
        "test_page": {"browser"},
    }


def test_each_framework_has_a_named_smoke_test() -> None:
    texts = [file.read_text() for file in TESTS.rglob("test_*.py")]
    assert {name for text in texts for name in re.findall(r'mark\.smoke\("(\w+)"\)', text)} == {
        *extensions.own(FRAMEWORKS)
    }


@pytest.mark.parametrize(
    ("marks", "file", "as_users_do", "expected"),
    [
        ({"unit"}, "dry/test_rank.py", False, False),
        ({"launch"}, "dry/test_rank.py", True, True),
        ({"launch"}, "launch/test_local.py", False, False),
        ({"launch", "unforked"}, "dry/test_rank.py", False, False),
        ({"launch", "smoke"}, "dry/test_rank.py", False, True),
        ({"launch", "smoke"}, "dry/test_rank.py", True, False),
    ],
)
def test_forks_launches_except_in_smoke_tests(
    marks: set[str], file: str, as_users_do: bool, expected: bool
) -> None:
    assert is_forked(marks, TESTS / file, as_users_do=as_users_do) == expected
