"""Measures how many CPU seconds a launch takes if it counts 12 steps, and if it counts one step.

The launches measure no times, as in `perfsuite compare --counts`. Each pair has one launch of each kind. The
cases are one of DDP and one of the Trainer. Run it as `python -m tests.benchmarks.counting_cost`.
"""

import os
import tempfile
from pathlib import Path
from statistics import median

from perfsuite import DDP, Trainer
from perfsuite.case.case import Case
from perfsuite.measure import Launching
from perfsuite.node.machine import detect_cpu
from tests.benchmarks import launched, show_table
from tests.samples import make_case

PAIRS = 4
MANY = 12


def main() -> None:
    """Print the CPU seconds of both kinds of launches, and the difference within pairs."""
    cases = {"DDP": make_case(model="llama-tiny", framework=DDP())}
    cases["Trainer"] = make_case(model="llama-tiny", framework=Trainer())
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for label, case in cases.items():
            one: list[float] = []
            many: list[float] = []
            for pair in range(PAIRS):
                for counted in (1, MANY) if pair % 2 else (MANY, 1):
                    took = cpu_s(case, counted, Path(name, f"{label}-{pair}-{counted}"))
                    (many if counted == MANY else one).append(took)
            added = sorted(more - less for more, less in zip(many, one, strict=True))
            spread = f"{median(added):.1f} s ({added[0]:.1f} to {added[-1]:.1f})"
            rows.append((label, f"{median(one):.1f} s", f"{median(many):.1f} s", spread))
    show_table(("case", "one step", f"{MANY} steps", "added, in pairs"), rows)


def cpu_s(case: Case, counted_steps: int, directory: Path) -> float:
    """Launch a case once, and count its work without timing it. Returns the CPU seconds of all processes."""
    before = os.times()
    how = Launching(counted_steps=counted_steps)
    launched(case, detect_cpu("of a benchmark"), directory, how)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


if __name__ == "__main__":
    main()
