"""Tests of the released wheel in a driver's and in a rank's environment, which have only its requirements.

Each environment is a venv whose packages are links to those of the environment that runs the tests. It has
only the named packages and everything that they depend on, directly or not. Nothing is downloaded.
"""

import importlib.metadata
import os
import shutil
import sys
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import perfsuite
from perfsuite import DDP, Fake, Model, Script, Topology, documents
from perfsuite.case.case import CaseFile
from perfsuite.measure import launch_once
from perfsuite.node.machine import detect
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run_dir import RunDir
from tests.processes import output_of
from tests.samples import make_case
from tests.suite import measuring

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "accelerate",
    "lightning",
    "peft",
    "bitsandbytes",
    "nanotron",
    "torchtitan",
    "asv",
)
DRIVER_ONLY = ("psutil", "rich", "typer", "pynvml", "yaml", "pytest", "packaging", *HEAVY[1:])
"""Packages that a rank must not need. jinja2 is allowed, since torch depends on it."""
MISSING_TORCH = "torch is not installed: perfsuite needs 2.11 or newer: pip install 'torch>=2.11'"

pytestmark = pytest.mark.launch


def dependencies(names: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """Return these distributions and all their direct and indirect dependencies, by name."""
    distributions: dict[str, importlib.metadata.Distribution] = {}
    left = list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name in distributions:
            continue
        distributions[name] = importlib.metadata.distribution(name)
        requirements = map(Requirement, distributions[name].requires or ())
        left += [
            requirement.name
            for requirement in requirements
            if not requirement.marker or requirement.marker.evaluate({"extra": ""})
        ]
    return distributions


def environment(directory: Path, names: Iterable[str]) -> tuple[str, Path]:
    """Make a venv with these distributions and their dependencies. Returns its Python and package folder."""
    venv.create(directory, symlinks=True, with_pip=False)
    [site] = directory.glob("lib/python*/site-packages")
    for distribution in dependencies(names).values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (site / top).unlink(missing_ok=True)  # several distributions can share a namespace
            (site / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return str(directory / "bin" / "python"), site


def run(*words: str, cwd: Path = ROOT, status: int = 0, **variables: str) -> str:
    """Run a command that must end with this exit status, and return everything that it writes."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    own = {"COLUMNS": "200", "CUDA_VISIBLE_DEVICES": "", **variables}
    return output_of(words, status=status, cwd=cwd, env={**inherited, **own})


def has(python: str, *packages: str) -> list[str]:
    """Return which of these packages an environment has."""
    code = "import importlib.util as u, sys; print(*(name for name in sys.argv[1:] if u.find_spec(name)))"
    return run(python, "-c", code, *packages).split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel like `make dist`, from the files that git knows, in a separate directory."""
    source = tmp_path_factory.mktemp("source")
    wheels = tmp_path_factory.mktemp("wheels")
    for name in tracked("perfsuite", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    run(
        *(sys.executable, "-m", "pip", "--isolated", "wheel", "--quiet", "--no-index", "--no-deps"),
        *("--no-build-isolation", f"--wheel-dir={wheels}", str(source)),
    )
    [built] = wheels.iterdir()
    return built


def tracked(*paths: str) -> list[str]:
    """Return the files below these paths that git knows or would add."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths)
    return [name for name in listed.splitlines() if (ROOT / name).exists()]


def test_wheel_holds_the_whole_package(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in held if name.startswith("perfsuite/")}
    assert package == set(tracked("perfsuite"))
    assert "perfsuite/py.typed" in package
    about = f"perfsuite-{perfsuite.__version__}.dist-info"
    assert {name.partition("/")[0] for name in held - package} == {about}


@pytest.fixture(scope="module")
def driver(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the Python of an environment made by `pip install perfsuite`."""
    requirements = map(Requirement, importlib.metadata.requires("perfsuite") or ())
    names = [requirement.name for requirement in requirements if not requirement.marker]
    python, _ = environment(tmp_path_factory.mktemp("driver"), names)
    run(
        *(sys.executable, "-m", "pip", "--isolated", "--python", python),
        *("install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel)),
    )
    return python


@pytest.fixture(scope="module")
def rank(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the Python of an environment that has torch, pydantic and perfsuite."""
    python, site = environment(tmp_path_factory.mktemp("rank"), ["torch", "pydantic"])
    shutil.unpack_archive(wheel, site, "zip")
    return python


SMALL = make_case(topology=Topology(processes_per_node=1))


def test_driver_needs_only_its_dependencies(driver: str, tmp_path: Path) -> None:
    assert has(driver, *HEAVY, "perfsuite", "pytest") == ["perfsuite", "pytest"]
    command = str(Path(driver).with_name("perfsuite"))
    looked_at = run(command, "doctor", "--quick", "--expect=cpu", cwd=tmp_path, status=1)
    assert "machine" in looked_at
    assert MISSING_TORCH in looked_at
    printed = run(command, "history", "trend", cwd=tmp_path, status=2)
    assert "pip install 'perfsuite[history]'" in printed
    file = tmp_path / "test_cases.py"
    frameworks = (Fake(), DDP(), Script(path=str(file)))
    file.write_text(measuring(*(SMALL.replace(framework=framework) for framework in frameworks)))
    pytest_words = (driver, "-m", "pytest", "-rs", "--perf-record-launches=1")
    assert MISSING_TORCH in run(*pytest_words, "-k", "script", cwd=tmp_path, status=4)
    printed = run(*pytest_words, "-k", "not script", "--perf-report=out", cwd=tmp_path)
    assert "1 skipped, 1 deselected, 1 recorded" in printed
    assert "for the model gpt2-tiny it needs the package transformers, which is not installed" in printed
    assert "<svg" in (tmp_path / "out" / "index.html").read_text()


TRAIN = """
import importlib.util, os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

absent = os.environ["ABSENT"].split()
assert not [name for name in absent if importlib.util.find_spec(name)]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(100):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    (model(x) - x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.nightly
def test_a_rank_needs_torch_and_pydantic_alone(rank: str, tmp_path: Path) -> None:
    """The script's two ranks run in their own environment. The driver of this environment measures them."""
    assert has(rank, "torch", "pydantic", "perfsuite", *DRIVER_ONLY) == ["torch", "pydantic", "perfsuite"]
    (tmp_path / "train.py").write_text(TRAIN)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    framework = Script(
        command=(rank, *torchrun, str(tmp_path / "train.py")), env={"ABSENT": " ".join(DRIVER_ONLY)}
    )
    net = {"model": Model.named("net"), "framework": framework, "sequence_length": 16, "micro_batch": 4}
    case = make_case(**net, max_warmup_steps=2, steps=10, timeout_s=240)
    launch = launch_once(case, detect(), tmp_path / "launch-1")
    assert launch.failure is None
    assert launch.observed is not None
    assert launch.observed.settings["wrapper"] == "DistributedDataParallel"
    assert "transformers" not in launch.observed.environment


def test_the_worker_needs_no_more(rank: str, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    documents.write(run_dir.case, CaseFile(case=SMALL, device="cpu"))
    modules = "node.agent", "worker.script.attach", "worker.main", "worker.observation.observe"
    imports = "".join(f"import perfsuite.{module}; " for module in modules)
    words = ("-c", f"{imports}perfsuite.worker.main.main({str(tmp_path)!r})")
    run(rank, *words, cwd=tmp_path, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    assert documents.read(run_dir.rank(0), RankReport).failure is None
