"""Test that a dry run counts the same with a build of torch for CPUs and with one for CUDA."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perfsuite import Case
from perfsuite.case import torch_build
from perfsuite.launch.arm import Arm
from tests.benchmarks.dry_builds import CASES, differences
from tests.dry.runs import passed

STORE = Path(__file__).parents[2] / ".perfsuite" / "builds"
NEEDED_BYTES = 12 << 30  # the wheels and their content


@pytest.fixture(scope="module")
def build_for_cuda() -> Arm:
    """Return an arm with the CUDA build of the installed version of torch, from the public index.

    If TORCH_FOR_CUDA names a directory with this build, it is used. Otherwise the build is installed once, in
    `STORE`.
    """
    if torch_build.installed()["cuda"] is not None:
        pytest.skip("the installed torch is built for CUDA: there is none for CPUs to compare it with")
    version = importlib.metadata.version("torch").partition("+")[0]
    directory = Path(os.environ.get("TORCH_FOR_CUDA") or STORE / f"torch-{version}")
    if not (directory / "torch").exists():
        STORE.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(STORE).free < NEEDED_BYTES:
            pytest.skip(f"a build of torch for CUDA needs {NEEDED_BYTES >> 30} GiB of disk")
        words = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--target",
            str(directory),
            f"torch=={version}",
        ]
        hidden = ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_INDEX_URL")
        variables = {name: value for name, value in os.environ.items() if name not in hidden}
        done = subprocess.run(
            words,
            env={**variables, "PIP_CONFIG_FILE": os.devnull},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            shutil.rmtree(directory, ignore_errors=True)
            pytest.skip(f"no build of torch for CUDA can be installed: {done.stderr[-500:]}")
    return Arm(packages=str(directory))


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_both_builds_count_the_same(case: Case, build_for_cuda: Arm, tmp_path: Path) -> None:
    beside = tmp_path / "packages"  # so that imports search as many directories as with the other build
    beside.mkdir()
    for_cpus = passed(case, tmp_path / "cpus", arm=Arm(packages=str(beside)))
    for_cuda = passed(case, tmp_path / "cuda", arm=build_for_cuda)
    assert for_cuda.machine.device == "cuda"
    assert differences(for_cpus, for_cuda) == []
