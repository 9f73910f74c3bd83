"""What is released: a wheel that holds every file of the package, says its version, and works by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import perfsuite
from tests.test_workflows import CASES

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the files that git knows, in a directory of its own, as `make dist` builds it."""
    source = tmp_path_factory.mktemp("source")
    for name in tracked("perfsuite", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    python("-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={out}", str(source))
    (file,) = out.glob("*.whl")
    return file


def tracked(*paths: str) -> list[str]:
    """Files that git knows, or would add, below these paths."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def python(*arguments: str, path: Path | None = None, cwd: Path | None = None) -> str:
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "perfsuite.__version__"}
    assert version("perfsuite") == perfsuite.__version__


@pytest.mark.launch
def test_a_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in held if name.startswith("perfsuite/")}
    assert package == set(tracked("perfsuite"))
    assert "perfsuite/py.typed" in package
    assert {name.partition("/")[0] for name in held - package} == {
        f"perfsuite-{perfsuite.__version__}.dist-info"
    }


@pytest.mark.launch
def test_a_wheel_measures_and_reports_by_itself(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    python("-m", "pip", "install", "--quiet", "--no-deps", f"--target={site}", str(wheel))
    where = python(
        "-c", "import perfsuite; print(perfsuite.__file__, perfsuite.__version__)", path=site, cwd=tmp_path
    )
    assert where.split() == [str(site / "perfsuite" / "__init__.py"), perfsuite.__version__]
    (tmp_path / "test_cases.py").write_text(CASES)
    python("-m", "pytest", "test_cases.py", "--perf-report=out", path=site, cwd=tmp_path)
    assert "<svg" in (tmp_path / "out" / "index.html").read_text()
