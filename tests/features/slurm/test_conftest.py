"""Tests of the Slurm fixtures if Slurm is not installed, and if a test fails."""

import shutil
from pathlib import Path

import pytest


def test_its_tests_are_unforked(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("unforked") is not None


@pytest.mark.parametrize(("ci", "outcome"), [("", {"skipped": 1}), ("true", {"errors": 1})])
def test_without_slurm_skips_or_fails_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, outcome: dict[str, int]
) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), pytester.path)
    pytester.makepyfile("def test_it(cluster): ...")
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", "")
    result = pytester.runpytest_inprocess("-rs", "-p", "no:xdist")
    result.assert_outcomes(**outcome)
    result.stdout.fnmatch_lines(["*slurmctld, slurmd, srun, * not installed: run `make slurm`*"])


def test_a_failure_shows_the_logs_of_slurm(pytester: pytest.Pytester) -> None:
    shutil.copy(Path(__file__).with_name("conftest.py"), pytester.path)
    pytester.makepyfile(
        """
        from types import SimpleNamespace

        import pytest

        @pytest.fixture
        def cluster():
            return SimpleNamespace(logs=lambda: "slurmctld.log:\\nerror: no route to n2")

        def test_it(cluster):
            raise TimeoutError
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:xdist")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*- Slurm -*", "slurmctld.log:", "error: no route to n2"])
