"""Find the cases of a repository by id or by expression. pytest collects them in a separate process."""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from perfsuite import documents
from perfsuite.case.case import Case, CaseList
from perfsuite.errors import CaseError
from perfsuite.launch.arm import HERE, Arm
from perfsuite.node.processes import captured
from perfsuite.report.text import plural

COLLECT_S = 900  # maximum number of seconds in which pytest must collect the cases
NO_TESTS_COLLECTED = 5  # pytest's exit status for an empty selection
IDS_SHOWN = 4  # maximum number of ids that a message lists
HOW_TO_GET_CASES = "name the directory of your cases with --cases, or write a first case with perfsuite init"


def by_id(directory: Path, ids: Sequence[str]) -> list[Case]:
    """Return the cases with these ids in the tests of `directory`. Raises `CaseError` for an unknown id."""
    cases = {case.id: case for case in _collected(directory).cases}
    for case_id in ids:
        if case_id not in cases:
            near = get_close_matches(case_id, cases, n=3, cutoff=0.4)
            hint = (
                f"Did you mean {' or '.join(near)}?"
                if near
                else f"The directory has {plural(len(cases), 'case')}."
            )
            raise CaseError(
                f"no case in {directory} is called {case_id!r}. {hint} (-k selects cases by a part of the id)"
            )
    return [cases[case_id] for case_id in ids]


def by_expression(directory: Path, expression: str, marker: str = "") -> list[Case]:
    """Return the cases that `-k` and `-m` select in `directory`.

    Raises `CaseError` if no case is selected, or if a name in `-k` matches no test, as in `llama or typo`.
    """
    given = [word for option in (("-k", expression), ("-m", marker)) if option[1] for word in option]
    collected = _collected(directory, *given)
    if not collected.cases and not given:
        raise CaseError(f"{directory} has no cases: {HOW_TO_GET_CASES}")
    if not collected.cases:
        raise CaseError(f"{shlex.join(given)} selects no case in {directory}{_what_there_is(directory)}")
    if collected.unmatched:
        names = ", ".join(collected.unmatched)
        raise CaseError(f"-k {expression!r}: no test in {directory} matches {names}. Correct or remove it")
    return [*collected.cases]


def _what_there_is(directory: Path) -> str:
    """Describe the cases in a directory, after a selection that matched none of them."""
    cases = _collected(directory).cases
    if not cases:
        return f", because it has no cases: {HOW_TO_GET_CASES}"
    ids = [case.id for case in cases[:IDS_SHOWN]]
    return (
        f". The directory has {len(cases)} case(s): {', '.join(ids)}"
        f"{', ...' if len(cases) > IDS_SHOWN else ''}"
    )


def _collected(directory: Path, *selection: str) -> CaseList:
    """Return the cases of the selected tests. Raises `CaseError` if there is no such directory.

    If pytest fails, `CaseError` has pytest's message.
    """
    if not directory.exists():
        raise CaseError(f"there is no {directory.absolute()}: {HOW_TO_GET_CASES}")
    with tempfile.TemporaryDirectory() as temporary:
        return collect([str(directory)], *selection, file=Path(temporary) / "cases.json")


def collect(paths: Sequence[str], *words: str, file: Path, arm: Arm = HERE) -> CaseList:
    """Return the cases that pytest collects from these paths in an arm. Writes them to `file`.

    `words` are additional options for pytest. If pytest fails, raises `CaseError` with pytest's message.
    """
    command = [arm.python, "-m", "pytest", *paths, "--collect-only", "--quiet", *words]
    how: dict[str, Any] = {}
    if arm != HERE:
        how = {"cwd": arm.directory, "env": {**os.environ, **arm.variables}, "timeout": COLLECT_S}
    try:
        done = captured([*command, "--perf-dry", f"--perf-cases={file}"], **how)
    except subprocess.TimeoutExpired:
        raise CaseError(f"pytest did not end within {COLLECT_S} s: {shlex.join(command)}") from None
    except OSError as error:
        raise CaseError(f"{arm.python}: {error.strerror}") from None
    if done.returncode not in (0, NO_TESTS_COLLECTED):
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise CaseError(f"pytest cannot collect the cases in {' '.join(paths) or arm.directory}: {said}")
    return documents.read(file, CaseList) if file.exists() else CaseList(cases=(), tests=())
