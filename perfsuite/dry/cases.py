"""Finds the cases of a repository, by id or by expression: pytest collects them, in a process of its own."""

import shlex
import sys
import tempfile
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from perfsuite import documents
from perfsuite.case.case import Case, CaseList
from perfsuite.errors import CaseError
from perfsuite.node.processes import captured

NO_TESTS_COLLECTED = 5  # pytest's exit status where a selection is empty


def by_id(directory: Path, ids: Sequence[str]) -> list[Case]:
    """Return the cases of these ids among the tests in `directory`. Raises `CaseError` for an unknown one."""
    known = {case.id: case for case in _collected(directory)}
    for case_id in ids:
        if case_id not in known:
            near = get_close_matches(case_id, known, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {len(known)} others"
            raise CaseError(f"no case in {directory} is called {case_id!r}: {hint} (-k selects by a part)")
    return [known[case_id] for case_id in ids]


def by_expression(directory: Path, expression: str, marker: str = "") -> list[Case]:
    """Return the cases that `-k` and `-m` select in `directory`. Raises `CaseError` where there is none."""
    given = [word for option in (("-k", expression), ("-m", marker)) if option[1] for word in option]
    if not (cases := _collected(directory, *given)):
        raise CaseError(f"{shlex.join(given)} selects no case in {directory}")
    return cases


def _collected(directory: Path, *selection: str) -> list[Case]:
    """Return the cases of the selected tests. Raises `CaseError` with what pytest says of an error."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "cases.json"
        command = [sys.executable, "-m", "pytest", str(directory), "--collect-only", "--quiet", *selection]
        done = captured([*command, "--perf-dry", f"--perf-cases={file}"])
        if done.returncode not in (0, NO_TESTS_COLLECTED):
            said = (done.stderr.strip() or done.stdout.strip())[-2000:]
            raise CaseError(f"pytest cannot collect the cases in {directory}: {said}")
        return list(documents.read(file, CaseList).cases) if file.exists() else []
