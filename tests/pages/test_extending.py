"""Tests that docs/develop/extending.md works as written: its package is written, installed and used."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.doc_pages import ROOT, Page
from tests.processes import output_of

PAGE = Page(ROOT / "docs" / "develop" / "extending.md")


@pytest.mark.nightly
def test_installs_and_measures_the_pages_package(tmp_path: Path) -> None:
    assert set(PAGE.files) == {
        "pyproject.toml",
        "perfsuite_compressed.py",
        "test_compressed.py",
        "bench_cases/test_compression.py",
    }
    project = tmp_path / "project"
    installed = tmp_path / "installed"
    for name, content in PAGE.files.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(content)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PIP_TARGET": str(installed),
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": str(installed),
        "PYTEST_ADDOPTS": "-p no:xdist -p no:hypothesispytest --perf-allow-shared --perf-record-launches=1 "
        "-k compressed",  # without the case of DDP next to it
    }
    commands = [command for block in PAGE.blocks if block.language == "shell" for command in block.commands]
    assert [command.split()[0] for command in commands] == ["pip", "pytest", "pytest"]
    for command in commands:
        if command.startswith("pytest"):  # test the installed module, not the file next to the test
            (project / "perfsuite_compressed.py").unlink(missing_ok=True)
        output_of(command, shell=True, cwd=project, env=environment)
    (results,) = project.glob(".perfsuite/runs/*/results.json")
    ((run,),) = (result["runs"] for result in json.loads(results.read_text())["results"])
    assert run["observed"]["settings"]["hook"] == "fp16_compress_hook"
    assert run["case"]["framework"] == {
        "name": "compressed_ddp",
        "package": "perfsuite-compressed",
        "slug": "compressed_ddp",
        "dtype": "fp16",
    }
