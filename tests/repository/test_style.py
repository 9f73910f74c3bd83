"""Tests of style that linters lack, for all Python files: one statement per line, short test names."""

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
MOST_TUPLES = 1.5
"""The allowed number of assignments like `a, b = x, y` per 1,000 lines. Swaps need them. Other values get a
line each."""
MOST_WALRUSES = 1.0
"""The allowed number of walruses per 1,000 lines.

Loops and chains of `elif` need walruses to call a function only once.
"""
LONGEST_NAME = 70
"""The largest number of letters in the name of a test, including `test_`."""

AREAS = pytest.mark.parametrize("area", ["", "perfsuite/", "tests/"], ids=lambda area: area or "all files")


class Counted(NamedTuple):
    """The counts of one file."""

    tuples: int
    walruses: int
    lines: int  # lines that are not blank
    tests: tuple[str, ...]  # names of functions that begin with `test_`


def count(source: str) -> Counted:
    nodes = [*ast.walk(ast.parse(source))]
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Counted(
        tuples=sum(map(is_tuple_assignment, nodes)),
        walruses=sum(isinstance(node, ast.NamedExpr) for node in nodes),
        lines=sum(bool(line.strip()) for line in source.splitlines()),
        tests=tuple(name for name in functions if name.startswith("test_")),
    )


def is_tuple_assignment(node: ast.AST) -> bool:
    """Whether a statement assigns several written-out values to the same number of names."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple | ast.List) for target in node.targets)


@cache
def all_files() -> dict[str, Counted]:
    """Return the counts of each Python file, by its path."""
    folders = ("perfsuite", "tests", "bench_cases", "docs")
    files = [*ROOT.glob("*.py"), *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]
    own = [file for file in files if "node_modules" not in file.parts]
    return {file.relative_to(ROOT).as_posix(): count(file.read_text()) for file in own}


def files_of(area: str) -> dict[str, Counted]:
    return {file: counted for file, counted in all_files().items() if file.startswith(area)}


def too_many(by_file: Mapping[str, int], lines: int, most: float) -> str | None:
    """Return a message with the worst files first, or None if the numbers are small enough."""
    rate = 1000 * sum(by_file.values()) / lines
    if rate <= most:
        return None
    worst = sorted(by_file.items(), key=lambda entry: -entry[1])[:10]
    listed = "\n".join(f"  {number} in {file}" for file, number in worst if number)
    return f"{rate:.1f} per 1,000 lines, at most {most} are allowed; give each a line of its own:\n{listed}"


def too_long(names: Mapping[str, Iterable[str]]) -> str | None:
    """Return a message with the longest test names first, or None if all are short enough."""
    long = [(file, name) for file, tests in names.items() for name in tests if len(name) > LONGEST_NAME]
    if not long:
        return None
    first = sorted(long, key=lambda entry: -len(entry[1]))[:10]
    listed = "\n".join(f"  {len(name)} letters: {name} in {file}" for file, name in first)
    return f"{len(long)} have more than {LONGEST_NAME} letters; say in fewer words what is claimed:\n{listed}"


@AREAS
def test_few_statements_assign_several_values(area: str) -> None:
    files = files_of(area)
    tuples = {file: counted.tuples for file, counted in files.items()}
    wrong = too_many(tuples, sum(counted.lines for counted in files.values()), MOST_TUPLES)
    assert wrong is None, f"assignments such as `a, b = x, y`: {wrong}"


@AREAS
def test_few_conditions_assign_a_name(area: str) -> None:
    files = files_of(area)
    walruses = {file: counted.walruses for file, counted in files.items()}
    wrong = too_many(walruses, sum(counted.lines for counted in files.values()), MOST_WALRUSES)
    assert wrong is None, f"walruses (`:=`): {wrong}"


def test_no_name_of_a_test_is_too_long() -> None:
    wrong = too_long({file: counted.tests for file, counted in files_of("tests/").items()})
    assert wrong is None, f"names of tests: {wrong}"


@pytest.mark.parametrize(
    ("source", "tuples"),
    [
        ("a, b = 1, 2", 1),
        ("[a, b] = 1, 2", 1),
        ("c = a, b = 1, 2", 1),
        ("a = 1\nb = 2", 0),
        ("a, b = pair", 0),
        ("a, b = f(1, 2)", 0),
        ("a = 1, 2", 0),
    ],
)
def test_only_values_that_are_written_out_count(source: str, tuples: int) -> None:
    assert count(source).tuples == tuples


def test_every_walrus_counts() -> None:
    assert count("if (a := f()) and (b := g()):\n    c = [d for e in a if (d := e)]").walruses == 3


def test_blank_lines_do_not_count() -> None:
    assert count("x = 1\n\n   \ny = 2\n").lines == 2


def test_the_worst_files_are_named_first() -> None:
    wrong = too_many({"a.py": 1, "b.py": 0, "c.py": 2}, lines=2, most=1.0)
    assert wrong is not None
    assert wrong.startswith("1500.0 per 1,000 lines, at most 1.0 are allowed")
    assert wrong.endswith("  2 in c.py\n  1 in a.py")


def test_as_many_as_are_allowed_are_not_too_many() -> None:
    assert too_many({"a.py": 1}, lines=1000, most=1.0) is None


def test_tests_in_classes_have_names_too() -> None:
    source = "def test_a(): ...\nclass TestB:\n    async def test_c(self): ...\ndef helper(): ..."
    assert set(count(source).tests) == {"test_a", "test_c"}


def test_the_longest_names_are_listed_first() -> None:
    wrong = too_long({"a.py": ["x" * 70, "y" * 71], "b.py": [*["z" * 72] * 9, "v" * 73]})
    assert wrong is not None
    assert wrong.startswith("11 have more than 70 letters")
    first, *_, last = wrong.splitlines()[1:]
    assert (first, last) == (f"  73 letters: {'v' * 73} in b.py", f"  72 letters: {'z' * 72} in b.py")


def test_names_of_70_letters_are_short_enough() -> None:
    assert too_long({"a.py": ["x" * 70]}) is None
