"""Hooks and fixtures for all tests. Tests in `tests/gpu` need a GPU and run alone (`make gpu-day`). No other
test sees a GPU.
"""

import gc
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Collection, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from perfsuite.launch.lock import LOCK_FILE
from perfsuite.node.machine import detect

GPU_TESTS = Path(__file__).parent / "gpu"
PROCESSES = [
    Path(__file__).parent / name for name in ("gpu", "launch", "node", "robustness/test_hard_failures.py")
]
"""Files and folders of tests that start processes as users do. So do tests with the mark `unforked`. Other
launch tests fork their processes."""
AS_USERS_DO = "--start-smoke-tests-as-users-do"
LAUNCHES = {"smoke", "launch", "nightly"}
"""Marks of the tests that start processes. Smoke tests and nightly tests get the mark `launch`, too."""
LAYERS = {"unit", *LAUNCHES, "simulation", "browser"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make smoke` and `make test-all` start new processes where `make test` forks them."""
    parser.addoption(AS_USERS_DO, action="store_true", help="fork no process of a smoke test")


def pytest_configure(config: pytest.Config) -> None:
    """Hide this machine's GPUs from tests and from the processes that they start. Also make these processes
    interruptible: a background job of a shell ignores SIGINT, and its child processes would, too."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not _only_gpu_tests(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A job of a pull request of perfsuite sets this variable, which tests must not see.
    os.environ.pop("GITHUB_BASE_REF", None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests in `tests/gpu` if the GPUs are hidden."""
    return True if collection_path == GPU_TESTS and not _only_gpu_tests(config) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give every test the mark of its layer: `unit` if it has no other, `launch` if it starts processes.

    Tests of perfsuite itself may contain cases that they do not measure.
    """
    if hasattr(item, "callspec"):
        item.add_marker("no_bench")
    marks = {mark.name for mark in item.iter_markers()}
    if not marks & LAYERS:
        item.add_marker("unit")
    elif marks & LAUNCHES and "launch" not in marks:
        item.add_marker("launch")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fork the launches of a test from a process with torch, unless they must start as users start them."""
    marks = {mark.name for mark in item.iter_markers()}
    if not is_forked(marks, item.path, as_users_do=item.config.getoption(AS_USERS_DO)):
        return (yield)
    from tests.warm import forked_launches  # not at the top, because test_conftest.py copies this file alone

    with forked_launches():
        return (yield)


def is_forked(marks: set[str], path: Path, *, as_users_do: bool) -> bool:
    """Return whether the launches of a test with these marks are forked."""
    is_real = "unforked" in marks or any(map(path.is_relative_to, PROCESSES))
    return "launch" in marks and not is_real and not ("smoke" in marks and as_users_do)


def _only_gpu_tests(config: pytest.Config) -> bool:
    paths = [(config.invocation_params.dir / name.partition("::")[0]).resolve() for name in config.args]
    return all(path.is_relative_to(GPU_TESTS) for path in paths)


@pytest.fixture(autouse=True, scope="session")
def _lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep sessions under test and processes of xdist from waiting for each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOCK_FILE, str(tmp_path_factory.mktemp("lock") / "perfsuite.lock"))
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_server_of_reruns() -> Iterator[None]:
    """Keep pytest-rerunfailures 16 from starting a server in every session that a test runs in this process.

    The plugin starts its server wherever xdist is installed, and the server's thread never ends.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytest_rerunfailures.HAS_PYTEST_HANDLECRASHITEM", False)
        yield


@pytest.fixture(autouse=True)
def _no_thread_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a unit test that leaves a thread running. Later tests count threads, or print their stacks."""
    before = {*sys._current_frames()}
    yield
    if request.node.get_closest_marker("unit"):
        left = threads_left(before)
        assert not left, f"the test left threads that run {', '.join(left)}: end them"


def threads_left(before: Collection[int], *, wait_s: float = 10.0) -> list[str]:
    """Return the function of each running thread that is not in `before`. A thread gets a while to end.

    `threading.enumerate` would not show the threads that `_thread.start_new_thread` starts.
    """
    until = time.monotonic() + wait_s
    while True:
        frames = [frame for thread, frame in sys._current_frames().items() if thread not in before]
        if not frames or time.monotonic() > until:
            return sorted(map(_function, frames))
        time.sleep(0.01)


def _function(frame: FrameType) -> str:
    """Return the function that a thread was started with. Functions of `threading` call it."""
    calls = [frame]
    while calls[-1].f_back is not None:
        calls.append(calls[-1].f_back)
    others = [call for call in calls if call.f_code.co_filename != threading.__file__]
    code = (others[-1] if others else frame).f_code
    return f"{code.co_qualname} ({code.co_filename})"


@pytest.fixture(autouse=True)
def _variables() -> Iterator[None]:
    """Restore the environment, because some libraries, such as torchtitan, set variables on import."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def compiling() -> Iterator[None]:
    """Make torch forget what a test compiled. Later tests would think that it belongs to their models."""
    import torch  # not at the top, because most tests do not need it

    yield
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    from tests.suite import CASES  # not at the top, because test_conftest.py copies this file alone

    # These tests do not need these plugins, and each inner run would import them again.
    monkeypatch.setenv(
        "PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio -W ignore::pytest.PytestAssertRewriteWarning"
    )
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # the inner runs are sessions of their own
    monkeypatch.setattr("cpuinfo.get_cpu_info", dict)  # pytest-benchmark's call takes a second
    pytester.makepyfile(test_cases=CASES)
    return pytester


@pytest.fixture
def recorded(suite: pytest.Pytester, tmp_path_factory: pytest.TempPathFactory) -> pytest.Pytester:
    """`suite` with a baseline of its first case. It is measured once for all tests of this process."""
    from tests.suite import run_cpu  # not at the top either

    kept = tmp_path_factory.getbasetemp() / "recorded"
    if kept.exists():
        shutil.copytree(kept, suite.path / ".perfsuite")
    else:
        run_cpu(suite)
        shutil.copytree(suite.path / ".perfsuite", kept)
    return suite


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the ranks of the framework `fake` in this process, so that a launch takes milliseconds."""
    from tests import simulated  # not at the top either

    simulated.patch(monkeypatch)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return `tests.packages.Packages`. No other installed package adds anything to perfsuite."""
    from tests.packages import site  # not at the top either

    with site(tmp_path / "site", monkeypatch) as packages:
        yield packages


def pytest_collection_finish() -> None:
    """Make full collections, which many tests trigger, skip the objects of libraries.

    Also make torch compute in one thread, as in a worker. Otherwise the threads of several test processes
    would wait for cores.
    """
    gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _collections_skip_earlier_modules() -> None:
    """Make full collections skip what earlier modules left, such as the libraries that they imported."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests in `tests/gpu` if there is no GPU, except for dry runs of their cases."""
    is_dry = item.config.getoption("--perf-dry")
    if item.path.is_relative_to(GPU_TESTS) and not is_dry:
        machine = detect()
        if machine.device == "cpu":
            pytest.skip(f"it needs a GPU: {machine.note}")
