"""Tests of the pins in `constraints.txt`.

Directories of empty wheels replace the indexes of a fresh machine.
"""

import json
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from perfsuite.case.torch_build import MIN_TORCH
from tests.packages import write_wheel

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
PINS = [Requirement(line) for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]


def version_of(pin: Requirement) -> Version:
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    return Version(specifier.version)


def resolved(name: str, *indexes: Path) -> dict[str, str]:
    """Return what pip would install for a package, within all pins: names and versions."""
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--no-index", "--quiet", "--report=-"]
    options += [f"--find-links={index}" for index in indexes]
    options += [f"--constraint={CONSTRAINTS}"]
    command = [sys.executable, "-m", "pip", "--isolated", "install", *options, name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    chosen = [entry["metadata"] for entry in json.loads(done.stdout)["install"]]
    return {canonicalize_name(entry["name"]): entry["version"] for entry in chosen}


@pytest.mark.launch
def test_torch_is_a_cpu_build_from_a_cpu_index(tmp_path: Path) -> None:
    public = tmp_path / "public"
    cpu = tmp_path / "cpu"
    public.mkdir()
    cpu.mkdir()
    [pinned] = [str(version_of(pin)) for pin in PINS if pin.name == "torch"]
    for version in ("1.0", pinned, "99.0"):
        write_wheel(public, "torch", version)
        write_wheel(cpu, "torch", f"{version}+cpu")
    assert resolved("torch", public, cpu) == {"torch": f"{pinned}+cpu"}


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAMED = [
    requirement
    for requirement in map(
        Requirement, chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    )
    if requirement.name != PROJECT["name"]
]


def test_pins_no_local_versions() -> None:
    assert [pin for pin in PINS if version_of(pin).local] == []


def test_the_extra_of_torch_has_the_lowest_version() -> None:
    assert PROJECT["optional-dependencies"]["torch"] == ["torch>={}.{}".format(*MIN_TORCH)]


@pytest.mark.parametrize("requirement", NAMED, ids=str)
def test_pins_versions_within_bounds(requirement: Requirement) -> None:
    pinned = {canonicalize_name(pin.name): version_of(pin) for pin in PINS}
    assert pinned[canonicalize_name(requirement.name)] in requirement.specifier
