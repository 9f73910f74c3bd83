"""The first day on a GPU cannot run here; that its parts name what is there can be seen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DAY = Path(__file__).parent / "gpu" / "day.sh"
SELECTIONS = sorted(set(re.findall(r"-k (\w+)", DAY.read_text())))
OPTIONS = sorted(set(re.findall(r"--perf-[\w-]+(?:=[\w%.=]+)?", DAY.read_text())))


def collected(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.launch
@pytest.mark.parametrize("selection", SELECTIONS)
def test_each_part_selects_cases(selection: str) -> None:
    shown = collected("tests/gpu/test_day.py", "-k", selection)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert f"test_{selection}[" in shown.stdout


@pytest.mark.launch
def test_its_options_are_those_of_pytest() -> None:
    known = subprocess.run(
        [sys.executable, "-m", "pytest", "--help"], capture_output=True, text=True, check=True
    )
    assert [option for option in OPTIONS if option.partition("=")[0] not in known.stdout] == []


@pytest.mark.parametrize("part", ["", "5"])
def test_it_says_which_parts_there_are(part: str) -> None:
    shown = subprocess.run([str(DAY), part], capture_output=True, text=True, check=False)
    assert shown.returncode == 2
    assert f"name a part, 1 to 4; got '{part}'" in shown.stderr
