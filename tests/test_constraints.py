"""The pins of `constraints.txt`, against indexes as a fresh machine has them: stub wheels in directories."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
PINS = [Requirement(line) for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]


def version_of(pin: Requirement) -> Version:
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    return Version(specifier.version)


def write_wheel(directory: Path, name: str, version: str) -> None:
    """A wheel without content, which pip can choose."""
    stem = f"{canonicalize_name(name).replace('-', '_')}-{version}"
    with zipfile.ZipFile(directory / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.fixture
def public_index(tmp_path: Path) -> Path:
    """What is pinned, without local versions: a public index holds none."""
    directory = tmp_path / "public"
    directory.mkdir()
    for pin in PINS:
        write_wheel(directory, pin.name, version_of(pin).public)
    return directory


@pytest.fixture
def cpu_index(tmp_path: Path) -> Path:
    """torch's own index of builds for CPUs."""
    directory = tmp_path / "cpu"
    directory.mkdir()
    write_wheel(directory, "torch", "2.13.0+cpu")
    return directory


def resolved(*indexes: Path) -> dict[str, str]:
    """What pip would install of everything that is pinned: name and version."""
    links = [f"--find-links={index}" for index in indexes]
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pip",
                "--isolated",
                "install",
                "--dry-run",
                "--ignore-installed",
                "--no-deps",
            ),
            *("--no-index", "--quiet", "--report=-", *links, f"--requirement={CONSTRAINTS}"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    chosen = [entry["metadata"] for entry in json.loads(done.stdout)["install"]]
    return {canonicalize_name(entry["name"]): entry["version"] for entry in chosen}


@pytest.mark.launch
def test_the_pins_resolve_with_the_public_index_alone(public_index: Path) -> None:
    chosen = resolved(public_index)
    assert len(chosen) == len(PINS)
    assert chosen["torch"] == "2.13.0"


@pytest.mark.launch
def test_with_the_cpu_index_beside_it_torch_is_the_build_for_cpus(
    public_index: Path, cpu_index: Path
) -> None:
    assert resolved(public_index, cpu_index)["torch"] == "2.13.0+cpu"


def test_everything_that_pyproject_names_is_pinned_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [project["dependencies"], *project["optional-dependencies"].values()]
    pinned = {canonicalize_name(pin.name): version_of(pin) for pin in PINS}
    for requirement in map(Requirement, chain.from_iterable(named)):
        if requirement.name != project["name"]:
            assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, requirement
