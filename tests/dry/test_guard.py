import os
import re
import shutil
import subprocess
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perfsuite.dry import guard
from perfsuite.errors import DryRunError
from tests.fake_torch import install_torch
from tests.processes import executable

ASKING = Path(__file__).with_name("driver_asking.cpp")


@pytest.fixture(autouse=True)
def _own_cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give unit tests a new cache. Launch tests use the user's cache, because a build takes many seconds."""
    if request.node.get_closest_marker("launch") is None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def compiler(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a script as the compiler `g++` at the start of PATH."""
    executable(directory / "g++", script)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def test_missing_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert guard.why_not() == "there is no C++ compiler: install g++ (apt-get install g++)"
    guard.library().parent.mkdir(parents=True)
    guard.library().touch()
    assert guard.why_not() is None


def test_pretends_with_a_build_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_torch(tmp_path / "torch", monkeypatch, cuda="13.0")
    compiler(tmp_path, "exit 1", monkeypatch)
    assert guard.why_not() is None


def test_library_depends_on_torch_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "guard.cpp"
    source.write_text("// another")
    install_torch(tmp_path / "torch", monkeypatch)
    libraries = [guard.library(), guard.library(source)]
    install_torch(tmp_path / "another environment", monkeypatch)
    libraries.append(guard.library())
    install_torch(tmp_path / "another environment", monkeypatch, version="2.99.0")
    libraries.append(guard.library())
    assert len({*libraries}) == 4
    assert {library.parent for library in libraries} == {tmp_path / "cache" / "perfsuite"}


def test_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, "echo 'guard.cpp: no such header' >&2; exit 1", monkeypatch)
    with pytest.raises(
        DryRunError, match=r"(?s)g.. cannot build .*Output of the compiler: guard.cpp: no such header"
    ):
        guard.build(guard.library())
    assert list(guard.library().parent.iterdir()) == []


def test_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DryRunError, match=r"cannot write .*guard-.*: Not a directory. Set XDG_CACHE_HOME to"):
        guard.build(guard.library())


def test_two_processes_may_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo built > "$2"', monkeypatch)
    with ThreadPoolExecutor() as pool:
        list(pool.map(guard.build, [guard.library()] * 4))
    assert [file.read_text() for file in guard.library().parent.iterdir()] == ["built\n"]


def run(code: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run Python code in a new process, because libraries that it loads cannot be unloaded."""
    words = [sys.executable, "-c", code]
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **variables}, check=False)


@pytest.mark.parametrize(
    ("loads", "why"),
    [
        ("", "the guard for torch .* cannot be loaded: .*guard-.*: file too short"),
        (
            "ctypes.CDLL = lambda *words, **options: SimpleNamespace(perfsuite_install_guard=lambda: 0); ",
            r"reports no CUDA, although perfsuite's stand-in for it \(.*guard-.*so\) was loaded",
        ),
    ],
    ids=["broken", "refused by torch"],
)
def test_says_why_a_guard_cannot_be_used(tmp_path: Path, loads: str, why: str) -> None:
    own = "import ctypes, importlib; from types import SimpleNamespace; from perfsuite.dry import guard; "
    empty = "guard.library().parent.mkdir(parents=True); guard.library().touch(); "
    without_torch = "importlib.import_module = print; "
    done = run(own + empty + loads + without_torch + "guard.load()", XDG_CACHE_HOME=str(tmp_path))
    assert re.search(why, done.stderr), done.stderr


def driver_in(directory: Path) -> Path:
    """Put another library where the linker would look for NVIDIA's driver."""
    return Path(shutil.copy(unicodedata.__file__, directory / guard.DRIVER))


def test_refuses_a_driver_loaded_by_its_path(tmp_path: Path) -> None:
    load = f"import ctypes; ctypes.CDLL({str(driver_in(tmp_path))!r})"
    done = run(f"from perfsuite.dry import guard; guard.refuse_driver(); {load}; guard.refuse_driver()")
    assert f"has loaded NVIDIA's driver by its path ({tmp_path}/libcuda.so.1)" in done.stderr


@pytest.mark.launch
def test_who_loads_the_driver_gets_the_guard(tmp_path: Path) -> None:
    """CUDA's runtime loads the driver like this on a machine that has a driver."""
    driver_in(tmp_path)
    load = "import ctypes; ctypes.CDLL('libcuda.so.1'); guard.refuse_driver(); print('none')"
    done = run(f"from perfsuite.dry import guard; guard.load(); {load}", LD_LIBRARY_PATH=str(tmp_path))
    assert done.stdout == "none\n", done.stderr


DDP_STEP = """
import ctypes, importlib, os, sys
from perfsuite.dry import guard

def with_cuda(name, package=None):
    loaded = load(name, package)
    if name == "torch":
        ctypes.CDLL(sys.argv[1])
    return loaded

load, importlib.import_module = importlib.import_module, with_cuda
guard.load()
import torch
import torch.distributed as dist
from perfsuite.case.case import Topology
from perfsuite.dry import cuda, values
from perfsuite.results.device_log import DeviceLog
from perfsuite.dry.machine import ANY_GPU, pretended_gpu
from perfsuite.frameworks.common import pretend
from perfsuite.frameworks.common.private import FakeTensorMode

cuda.pretend(pretended_gpu(ANY_GPU, Topology(processes_per_node=2)), DeviceLog())
values.pretend_tensors()
values.pretend_ranks()
pretend.ddp()
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="-", MASTER_PORT="1")
with FakeTensorMode(allow_non_fake_inputs=True), values.NoValues():
    dist.init_process_group()
    linear = torch.nn.Linear(4, 4, device="cuda")
    model = torch.nn.parallel.DistributedDataParallel(linear, device_ids=[0], static_graph=True)
    for step in range(3):
        model(torch.ones(2, 4, device="cuda")).sum().backward()
    print(linear.weight.grad.device, flush=True)
os._exit(0)
"""


@pytest.mark.launch
@pytest.mark.nightly
def test_ddp_asks_no_driver_of_a_build_for_gpus(tmp_path: Path) -> None:
    """A library replaces the build for GPUs.

    The functions that it registers end the process if they are called.
    """
    library = tmp_path / "asking.so"
    guard.build(library, source=ASKING, driver="asking")
    words = [sys.executable, "-c", DDP_STEP, str(library)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == "cuda:0\n", done.stderr
