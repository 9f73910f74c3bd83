"""Reads the cases from this repository's own files."""

import runpy
from pathlib import Path

from perfsuite import Case

BENCH_CASES = Path(__file__).parent.parent / "bench_cases"


def cases_of(file: Path) -> dict[str, Case]:
    """Return the cases of all parametrized tests of a file, by id."""
    tests = runpy.run_path(str(file)).values()
    marks = [mark for test in tests for mark in getattr(test, "pytestmark", [])]
    return {case.id: case for mark in marks for case in mark.args[1] if isinstance(case, Case)}
