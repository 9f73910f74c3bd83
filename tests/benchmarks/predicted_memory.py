"""Shows the predicted memory of dry runs next to published memory: docs/evidence/memory.md (15 minutes).

Each row of the comparison `gpt-on-v100` (4 x V100-16GB, Lightning's FSDP) has a dry run. The published memory
is only that of the allocator, without other memory on the GPU. If the allocator had to retry, the published
memory is 14,992 MB, although the card has 16,160 MiB.
"""

from bench_cases.published import Row
from tests.bench_cases.test_published import CASES, PUBLISHED
from tests.benchmarks import show_table
from tests.benchmarks.published_dry import dry, memory

MIB = 1 << 20
HEADINGS = ("model", "batch", "published", "predicted", "error", "the card must have", "verdict")


def main() -> None:
    """Print the table."""
    (comparison,) = (candidate for candidate in PUBLISHED if candidate.name == "gpt-on-v100")
    show_table(HEADINGS, map(_cells, comparison.rows))


def _cells(row: Row) -> tuple[str, ...]:
    """Return a row of the table, in MiB."""
    facts = dry(CASES[row.case]).dry_facts
    published = memory(row)
    if facts is None or (fit := facts.fit) is None:
        raise SystemExit(f"{row.case}: nothing was predicted")
    return (
        *row.settings,
        f"{published / MIB:,.0f}" if published else row.figures[0].reported,
        f"{fit.reserved / MIB:,.0f}",
        f"{fit.reserved / published - 1:+.0%}" if published else "-",
        f"{fit.least / MIB:,.0f} to {fit.most / MIB:,.0f}",
        fit.verdict,
    )


if __name__ == "__main__":
    main()
