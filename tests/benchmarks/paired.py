"""Compares three ways of judging two arms, on the same simulated days of a drifting machine.

`paired` is `perfsuite compare`. `unpaired` has the same interleaved launches, but arm A is used as a
baseline, and arm B is judged like a night against a baseline. `base first` judges in the same way, but has
five launches of arm A and then up to 15 of arm B. `unpaired` and `base first` estimate the noise between
launches from three other cases, with five launches each.

A second table shows what `paired` finds on a machine whose launches slow down together with the probe. One
row is with the correction by the probe, and one is without it.

    python -m tests.benchmarks.paired [--trials 2000]
"""

import argparse
import math
from collections.abc import Iterator, Sequence

from perfsuite.verdict.paired_comparison import MAX_PAIRS, MIN_PAIRS
from perfsuite.verdict.sequential import MAX_LAUNCHES, Noise, decide, pooled_noise
from tests.benchmarks import show_table
from tests.benchmarks.simulated_gate import in_turn
from tests.benchmarks.simulated_pairs import FOLLOWING, arms, days, judge_day, simulate

SIGMA = 0.01
TOLERANCE = 0.03
MACHINES = {"none": (0.0, 0.0), "2%": (0.02, 0.0), "5%": (0.05, 0.0), "none, two speeds": (0.0, 0.10)}
"""The drift of each machine, and the slowdown of its slower launches if it has two speeds."""
CHANGES = (0.0, 0.01, 0.02, 0.03)
WAYS = ("drift", "way", "false alarms", "finds 1%", "2%", "3%", "launches, unchanged / 3%")
CORRECTIONS = (
    *("corrected", "false alarms", "unchanged: passed", "finds 10%", "launches, unchanged / 10%"),
    "passed, of 10% that B does to the probe, too",
)
BASE = 5
"""The number of launches of arm A before those of arm B."""


def paired(logs: Sequence[float], change: float, noise: Noise) -> tuple[str, int]:
    """Return the outcome and the number of launches of a paired comparison."""
    decision = judge_day(logs, change=change, tolerance=TOLERANCE)
    return decision.outcome, 2 * decision.pairs


def unpaired(logs: Sequence[float], change: float, noise: Noise) -> tuple[str, int]:
    """Return the outcome and the number of launches of an unpaired comparison."""
    a, b = arms(logs, MAX_PAIRS, change)
    for pairs in range(MIN_PAIRS, MAX_PAIRS + 1):
        decision = decide(a[:pairs], b[:pairs], tolerance=TOLERANCE, noise=noise, max_launches=MAX_PAIRS)
        if decision.outcome != "undecided":
            break
    return decision.outcome, 2 * pairs


def base_first(logs: Sequence[float], change: float, noise: Noise) -> tuple[str, int]:
    """Return the outcome and the number of launches if all launches of arm A come first."""
    seconds = [math.exp(log) for log in logs]
    b = [second * (1 + change) for second in seconds[BASE : BASE + MAX_LAUNCHES]]
    decision = in_turn(seconds[:BASE], b, tolerance=TOLERANCE, noise=noise)
    return decision.outcome, BASE + decision.launches_used


def main() -> None:
    """Print the tables, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    trials = parser.parse_args().trials
    print(f"noise {SIGMA:.0%}, tolerance {TOLERANCE:.0%}, {trials} days for each row\n")
    show_table(WAYS, (row for machine in MACHINES for row in by_each_way(machine, trials)))
    print(f"\nlaunches that follow a probe: {FOLLOWING}\n")
    show_table(CORRECTIONS, (corrected(corrects, trials) for corrects in (False, True)))


def by_each_way(machine: str, trials: int) -> Iterator[list[str]]:
    """Yield a row with the findings of each way on one machine."""
    drift, two_speeds = MACHINES[machine]
    today = list(days(SIGMA, drift, 2 * MAX_PAIRS, two_speeds=two_speeds, trials=trials, seed=11))
    others = [
        [math.exp(log) for log in logs]
        for logs in days(SIGMA, drift, 5, two_speeds=two_speeds, trials=3 * trials, seed=12)
    ]
    noises = [pooled_noise(others[3 * trial : 3 * trial + 3]) for trial in range(trials)]
    for way in (paired, unpaired, base_first):
        decisions = {
            change: [way(logs, change, noise) for logs, noise in zip(today, noises, strict=True)]
            for change in CHANGES
        }
        false = sum(outcome in ("regressed", "improved") for outcome, _ in decisions[0.0]) / trials
        power = [
            sum(outcome == "regressed" for outcome, _ in decisions[change]) / trials for change in CHANGES[1:]
        ]
        used = [sum(launches for _, launches in decisions[change]) / trials for change in (0.0, 0.03)]
        cells = [machine, way.__name__.replace("_", " "), f"{100 * false:.2f}%"]
        yield [*cells, *(f"{100 * share:.0f}%" for share in power), f"{used[0]:.1f} / {used[1]:.1f}"]


def corrected(corrects: bool, trials: int) -> list[str]:
    """Return a row with the findings on a machine whose launches slow down together with a probe."""
    slowed = simulate(**FOLLOWING, corrects=corrects, slows_probe=True, trials=trials, seed=11)
    table = simulate(**FOLLOWING, corrects=corrects, trials=trials, seed=11)
    none = table.row(0.0)
    slow = table.row(0.1)
    cells = ["yes" if corrects else "no", f"{100 * (none.regressed + none.improved):.2f}%"]
    cells += [f"{100 * none.passed:.0f}%", f"{100 * slow.regressed:.0f}%"]
    return [
        *cells,
        f"{2 * none.mean_pairs:.1f} / {2 * slow.mean_pairs:.1f}",
        f"{100 * slowed.row(0.1).passed:.0f}%",
    ]


if __name__ == "__main__":
    main()
