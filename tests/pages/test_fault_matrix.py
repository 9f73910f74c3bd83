"""Tests of the fault tables on pages: each row has a test that injects the fault, and vice versa."""

import ast
import re
from pathlib import Path
from typing import get_args

from perfsuite.results.outcome import Outcome
from perfsuite.results.rank_report import FailureKind

TESTS = Path(__file__).parents[1]
PAGES = sorted((TESTS.parent / "docs").rglob("*.md"))
COLUMNS = ["fault", "how it is detected", "what is reported", "what survives"]


def rows() -> list[list[str]]:
    """Return the cells of all rows of the tables of faults."""
    table = []
    is_matrix = False
    for line in (line for page in PAGES for line in page.read_text().splitlines()):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            is_matrix = False
        elif cells == COLUMNS:
            is_matrix = True
        elif is_matrix and set(cells[0]) != {"-", " "} and not cells[0].startswith("---"):
            table.append(cells)
    return table


def injected() -> set[str]:
    """Return the names that tests give to `pytest.mark.fault`."""
    calls = [
        node
        for file in TESTS.rglob("test_*.py")
        if "mark.fault(" in (text := file.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault"
    ]
    return {str(ast.literal_eval(call.args[0])) for call in calls}


def reported() -> set[str]:
    """Return all kinds of failures and outcomes in the column "what is reported"."""
    return {word for cells in rows() for word in re.findall(r"`([a-z_]+)`", cells[2])}


def test_each_row_has_a_test_and_each_test_a_row() -> None:
    names = [cells[0] for cells in rows()]
    assert len(names) == len(set(names))
    assert set(names) == injected()
    assert all(all(cells) and len(cells) == len(COLUMNS) for cells in rows())


def test_each_kind_of_failure_has_a_row() -> None:
    kinds = set(get_args(FailureKind))
    assert kinds <= reported() <= {*kinds, *get_args(Outcome), "running"}
