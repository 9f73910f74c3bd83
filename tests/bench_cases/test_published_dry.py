"""Tests of the table that compares published rows with dry runs.

They test which case runs instead of a compiled one, and what a row shows.
"""

from pathlib import Path
from typing import Any

import pytest

from bench_cases.published import PublishedFigure, Row
from perfsuite import Case
from perfsuite.results.rank_report import Failure, Flops
from perfsuite.results.run import Run
from tests.bench_cases.test_published import CASES, PUBLISHED
from tests.bench_cases.test_published_tables import comparison
from tests.benchmarks import published_dry
from tests.counted import FACTS
from tests.frameworks.removable import skip_module_without
from tests.samples import make_run

skip_module_without("torchtitan")  # most rows are its cases

ROWS = [
    (published, row)
    for published in PUBLISHED
    if published.name in published_dry.NAMES
    for row in published.rows
]
FIRST, COMPILED = (row for _, row in ROWS[:2])


def test_compiled_case_runs_as_its_twin() -> None:
    eager = CASES[FIRST.case]
    compiled = CASES[COMPILED.case]
    assert published_dry.uncompiled(compiled) == eager
    assert published_dry.uncompiled(eager) == eager
    cases = [published_dry.uncompiled(CASES[row.case]) for _, row in ROWS if row.case]
    assert not any("compile" in case.id for case in cases)


@pytest.fixture
def run_fields(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the fields of a dry run: 62 GiB, 5e10 FLOPs per token, at most 941,530 tokens/s on all GPUs."""
    flops = Flops(formula="f", per_token=5e10, parameters=8, matmul_parameters=7)
    run_fields: dict[str, Any] = {"dry": True, "duration_s": 14.6, "dry_facts": FACTS, "flops": flops}

    def dry_run(case: Case, directory: Path) -> Run:
        return make_run(case=case, **run_fields)

    monkeypatch.setattr(published_dry, "dry_run", dry_run)
    published_dry.dry.cache_clear()
    return run_fields


def row(length: str = "8192", memory: bool = True, **changes: Any) -> Row:
    speed = PublishedFigure(quantity="tokens_per_s_per_device", value=5000, reported="5,000")
    held = PublishedFigure(quantity="reserved_memory_bytes", value=80 * 2**30, reported="80 GiB")
    words = ("8B", "FSDP", "2", length)
    return Row(
        settings=words, devices=8, figures=(speed, held) if memory else (speed,), case=FIRST.case
    ).replace(**changes)


@pytest.mark.usefixtures("run_fields")
@pytest.mark.parametrize(
    ("row", "shown"),
    [
        (row(), ("80.0", "62.0 (-22.5%)")),
        (row(memory=False), ("-", "62.0")),
        (row(case=COMPILED.case), ("80.0", "62.0 * (-22.5%)")),
    ],
)
def test_a_row_has_its_shares_and_its_memory(row: Row, shown: tuple[str, ...]) -> None:
    cells = published_dry._with_case(comparison(row), row)
    assert len(cells) == len(published_dry.HEADINGS)
    assert cells[:6] == ("x", "8B", "8", "FSDP", "2", "5,000")
    assert cells[6:8] == ("25.3%", "4.2%")  # 5000 * 5e10 / 989.5e12; 8 * 5000 / 941,530
    assert cells[8:] == shown


def test_a_row_without_a_case_has_its_reason() -> None:
    without = row(length="32768", case="", no_case="a pipeline")
    cells = published_dry._without(comparison(without), without)
    assert len(cells) == len(published_dry.WITHOUT)
    assert cells == ("x", "8B", "8", "FSDP, 32768 tokens", "2", "5,000", "80.0", "a pipeline")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"failure": Failure(kind="not_dry", message="torch has no name")}, "-1x8: torch has no name"),
        ({"flops": None}, "-1x8: nothing was predicted, or no speed"),
    ],
)
def test_a_dry_run_that_failed_ends_the_table(
    run_fields: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    run_fields |= changes
    with pytest.raises(SystemExit, match=said):
        published_dry._with_case(comparison(row()), row())


def test_both_tables_are_printed(run_fields: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    published_dry.main()
    first, seconds, second = capsys.readouterr().out.split("\n\n")
    assert seconds == "The dry runs took 15 to 15 s each."
    assert len(first.splitlines()) == 2 + sum(bool(row.case) for _, row in ROWS)
    assert len(second.splitlines()) == 2 + sum(bool(row.no_case) for _, row in ROWS)
