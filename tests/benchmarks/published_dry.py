"""Shows published tables next to dry runs of their rows: docs/evidence/published.md (5 minutes).

Compiled cases run dry without compilation, since the memory of compiled code depends on fusion.
"""

import tempfile
from functools import cache
from pathlib import Path

from bench_cases.published import Comparison, PublishedFigure, Row
from perfsuite import Case
from perfsuite.dry.driver import dry_run
from perfsuite.results.run import Run
from tests.bench_cases.test_published import CASES, PUBLISHED
from tests.benchmarks import show_table

NAMES = (
    "torchtitan-h100",
    "torchtitan-async-tp",
    "torchtitan-405b",
    "torchao-float8",
    "torchtitan-h200",
    "accelerate-float8",
)
GIB = 1 << 30
SETTINGS = ("table", "model", "GPUs", "parallelism and techniques", "batch", "tokens/s per GPU")
HEADINGS = (*SETTINGS, "MFU", "share of the roofline", "memory, GiB", "predicted")
WITHOUT = (*SETTINGS, "memory, GiB", "why it is not a case")


def main() -> None:
    """Print two tables in Markdown: one of the rows that have a case, and one of the rows without a case.

    Between the tables, print how long the dry runs took.
    """
    rows = [
        (comparison, row) for comparison in PUBLISHED if comparison.name in NAMES for row in comparison.rows
    ]
    show_table(HEADINGS, (_with_case(comparison, row) for comparison, row in rows if row.case))
    seconds = [dry(uncompiled(CASES[row.case])).duration_s for _, row in rows if row.case]
    print(f"\nThe dry runs took {min(seconds):.0f} to {max(seconds):.0f} s each.\n")
    show_table(WITHOUT, (_without(comparison, row) for comparison, row in rows if row.no_case))


def uncompiled(case: Case) -> Case:
    """Return `case` without compilation, and without torchtitan's options for compilation."""
    framework = case.framework
    if framework.name == "torchtitan":
        overrides = framework.model_dump()["overrides"]
        words = tuple(word for word in overrides if not word.startswith("--compile."))
        framework = framework.replace(overrides=words)
    return case.replace(compile=False, framework=framework)


@cache
def dry(case: Case) -> Run:
    """Make a dry run of a case. Raises SystemExit if the dry run fails."""
    with tempfile.TemporaryDirectory() as directory:
        run = dry_run(case, Path(directory))
    if run.failure is not None:
        raise SystemExit(f"{case.id}: {run.failure.message}")
    return run


def _with_case(comparison: Comparison, row: Row) -> tuple[str, ...]:
    case = CASES[row.case]
    run = dry(uncompiled(case))
    facts = run.dry_facts
    flops = run.flops
    speed = _speed(row).value
    held = memory(row)
    if facts is None or facts.fit is None or facts.roofline is None or flops is None or speed is None:
        raise SystemExit(f"{row.case}: nothing was predicted, or no speed was published")
    predicted = facts.fit.reserved_expandable
    return (
        *_settings(comparison, row),
        f"{speed * flops.per_token / facts.roofline.peak_flops:.1%}",
        f"{facts.roofline.share(speed * row.devices):.1%}",
        _gib(held),
        _gib(predicted) + " *" * case.compile + (f" ({predicted / held - 1:+.1%})" if held else ""),
    )


def _without(comparison: Comparison, row: Row) -> tuple[str, ...]:
    return (*_settings(comparison, row), _gib(memory(row)), row.no_case)


def _settings(comparison: Comparison, row: Row) -> tuple[str, ...]:
    """Return the first columns of a row. The sequence length is shown only if it is not 8192."""
    *table, model, how, batch, length = row.settings
    more = "" if length == "8192" else f", {length} tokens"
    table = [comparison.name, *table]
    return " ".join(table), model, str(row.devices), how + more, batch, _speed(row).reported


def _speed(row: Row) -> PublishedFigure:
    (speed,) = (figure for figure in row.figures if figure.quantity == "tokens_per_s_per_device")
    return speed


def memory(row: Row) -> float | None:
    """Return the published memory of a row in bytes, if it has one."""
    return next((figure.value for figure in row.figures if figure.quantity == "reserved_memory_bytes"), None)


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / GIB:.1f}"


if __name__ == "__main__":
    main()
