"""Tests with real processes that nothing is lost if directories and variables are not UTF-8."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.suite import FAKE

pytestmark = pytest.mark.launch

CASES = f"""{FAKE}
    @pytest.mark.parametrize("case", [FAKE])
    def test_it(bench, case):
        bench(case)
"""
NOT_UTF8 = {b"NCCL_x": b"a\x80", b"NCCL_\x80": b"b"}
WITHOUT_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("directory", "variables"),
    [
        pytest.param(b"d\xff\x80r", NOT_UTF8, id="a directory and variables that are not UTF-8"),
        pytest.param("größe".encode(), WITHOUT_UTF8, id="a directory that is not ASCII in the locale C"),
    ],
)
def test_bytes_that_are_not_utf8_lose_nothing(
    tmp_path: Path, directory: bytes, variables: dict[str | bytes, str | bytes]
) -> None:
    here = os.fsencode(tmp_path) + b"/" + directory
    os.mkdir(here)
    lines = [line.removeprefix("    ") for line in CASES.splitlines()]
    Path(os.fsdecode(here), "test_cases.py").write_text("\n".join(lines))
    environment = {
        **os.environb,
        **{os.fsencode(name): os.fsencode(value) for name, value in variables.items()},
    }

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=here, env=environment, capture_output=True, check=False
        )
        said = (done.stdout + done.stderr).decode(errors="backslashreplace")
        assert done.returncode == 0, said
        assert "Traceback" not in said
        return said

    run(
        "pytest",
        "-q",
        "test_cases.py",
        "--perf-record-launches=1",
        "--perf-allow-shared",
        "--perf-report=out",
    )
    (file,) = Path(os.fsdecode(here)).glob(".perfsuite/runs/*/results.json")
    session = json.loads(file.read_text())
    assert session["status"] == "complete"
    assert len(session["results"]) == 1
    assert {path.name for path in Path(os.fsdecode(here), "out").iterdir()} >= {"index.html", "summary.md"}
    assert "fake-llama-tiny" in run("perfsuite.cli", "report")
