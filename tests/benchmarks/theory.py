"""Compares formulas with the counts of dry runs at full size: docs/evidence/dry-run.md (ten minutes).

python -m tests.benchmarks.theory [NAME ...]
"""

import sys
import tempfile
from pathlib import Path

from tests.bench_cases.test_theory import THEORIES, Step, counted
from tests.benchmarks import show_table

GIB = 1 << 30
HEADINGS = ("configuration", "sent, GiB", "calls", "TFLOP", "parameters and optimizer, GiB", "differs")


def main(names: list[str]) -> None:
    """Print a row for each configuration: numbers from the formulas, counts, and where they differ."""
    show_table(HEADINGS, map(_row, names or THEORIES))


def _row(name: str) -> list[str]:
    case, theory = THEORIES[name](True)
    with tempfile.TemporaryDirectory() as directory:
        sent, counts = counted(case, Path(directory))
    assert counts.memory is not None
    seen = Step(sent=sent)
    seen.flops.update({str(phase): flops for phase, flops in counts.flops.items()})
    held = [counts.memory.at_peak[part] for part in ("parameter", "optimizer state")]
    both: list[tuple[object, object, object]] = [
        *((key, theory.sent[key], sent[key]) for key in {*sent, *theory.sent}),
        *((phase, theory.flops[phase], flop) for phase, flop in counts.flops.items()),
        ("held", [theory.parameter, theory.optimizer], held),
    ]
    differs = [
        f"{what}: {expected}, {counted_value}"
        for what, expected, counted_value in both
        if expected != counted_value
    ]
    said = zip(_figures(theory, theory.parameter + theory.optimizer), _figures(seen, sum(held)), strict=True)
    return [name, *(" / ".join(pair) for pair in said), "; ".join(differs) or "nothing"]


def _figures(step: Step, held: int) -> tuple[str, ...]:
    calls, sent = (sum(calls_and_bytes[part] for calls_and_bytes in step.sent.values()) for part in (0, 1))
    return f"{sent / GIB:,.3f}", f"{calls:,}", f"{step.flops.total() / 1e12:,.3f}", f"{held / GIB:,.3f}"


if __name__ == "__main__":
    main(sys.argv[1:])
