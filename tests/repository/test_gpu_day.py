"""Tests that the parts of the first day on a GPU name things that exist. The day itself cannot run here."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.processes import output_of

DAY = Path(__file__).parents[1] / "gpu" / "day.sh"
SELECTIONS = sorted(set(re.findall(r"-k (\w+)", DAY.read_text())))
OPTIONS = sorted(set(re.findall(r"--perf-[\w-]+(?:=[\w%.=]+)?", DAY.read_text())))


@pytest.mark.launch
def test_each_part_selects_cases() -> None:
    words = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu/test_day.py"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    shown = output_of([sys.executable, *words], env=environment, stderr=None)
    assert [name for name in SELECTIONS if f"test_{name}[" not in shown] == []


def test_its_options_are_those_of_pytest(pytestconfig: pytest.Config) -> None:
    names = {option: option.partition("=")[0][2:].replace("-", "_") for option in OPTIONS}
    assert [option for option, name in names.items() if name not in vars(pytestconfig.option)] == []


@pytest.mark.parametrize("part", ["", "5"])
def test_it_says_which_parts_there_are(part: str) -> None:
    printed = output_of(f"'{DAY}' '{part}' 2>&1 >/dev/null", shell=True, status=2)
    assert f"name a part, 1 to 4; got '{part}'" in printed
