"""Tests of the Slurm fixtures if Slurm is not installed, and if a test fails."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.features.slurm import emulated


@pytest.mark.parametrize(("ci", "outcome"), [("", {"skipped": 1}), ("true", {"errors": 1})])
def test_without_slurm_skips_or_fails_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, outcome: dict[str, int]
) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), pytester.path)
    pytester.makepyfile("def test_it(cluster): ...")
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(emulated, "missing", lambda: "no Slurm: run `make slurm`")
    result = pytester.runpytest_inprocess("-rs", "-p", "no:xdist")
    result.assert_outcomes(**outcome)
    result.stdout.fnmatch_lines(["*no Slurm: run `make slurm`*"])


def test_a_failure_shows_the_logs_of_slurm(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), pytester.path)
    pytester.makepyfile("def test_it(cluster):\n    raise TimeoutError")
    monkeypatch.setattr(emulated, "missing", lambda: None)
    cluster = SimpleNamespace(logs=lambda: "slurmctld.log:\nerror: no route to n2")
    monkeypatch.setattr(emulated, "slurm_cluster", lambda: nullcontext(cluster))
    result = pytester.runpytest_inprocess("-p", "no:xdist")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*- Slurm -*", "slurmctld.log:", "error: no route to n2"])
