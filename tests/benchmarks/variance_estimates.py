"""Compares estimates of three kinds of noise with their true values.

The noise is that of sessions, of cases within a session, and of launches. The program draws baselines of one
hardware class: all cases have launches in the same sessions. `perfsuite.verdict.noise` estimates the noise.
If an interpreter with statsmodels is given, its MixedLM (REML with crossed effects) estimates it as well.

    python -m tests.benchmarks.variance_estimates [--statsmodels PYTHON]   # docs/evidence/statistics.md
"""

import argparse
import json
import math
import os
import random
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter

from perfsuite.verdict.noise import pooled_over_sessions
from perfsuite.verdict.variance import Component
from tests.benchmarks import show_table

CASES = 10
LAUNCHES = 4
NAMES = ("session", "case_within_session", "launch")
SLOW = 0.1  # additional cost of a launch that is an outlier, in logarithms
Costs = dict[str | None, list[float]]  # the costs of one case, by session
MIXED_LM = """
import json, sys, warnings
import pandas
from statsmodels.regression.mixed_linear_model import MixedLM
for line in sys.stdin:
    rows = pandas.DataFrame(json.loads(line), columns=["case", "session", "cost"])
    rows["cell"] = rows["case"] + " " + rows["session"]
    effects = {"session": "0 + C(session)", "cell": "0 + C(cell)"}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            model = MixedLM.from_formula(
                "cost ~ 0 + C(case)", groups=[1] * len(rows), vc_formula=effects, data=rows
            )
            fit = model.fit(reml=True)
            scale = 1e-4
            answer = [fit.vcomp[model.exog_vc.names.index(name)] * scale for name in ("session", "cell")]
            answer.append(fit.scale * scale)
        except Exception as error:
            answer = None
    print(json.dumps([answer, len(seen)]), flush=True)
"""


@dataclass(frozen=True)
class Truth:
    """Standard deviations of the effects, in logarithms, and the share of launches that are outliers."""

    session: float
    case_within_session: float
    launch: float
    outliers: float = 0.0

    @property
    def title(self) -> str:
        """The effects in words."""
        effects = ", ".join(f"{value:.1%}" for value in (self.session, self.case_within_session, self.launch))
        return effects + (f", outliers {self.outliers:.0%}" if self.outliers else "")


TRUTHS = (
    Truth(0.01, 0.002, 0.003),
    Truth(0.01, 0.005, 0.003),
    Truth(0.01, 0.002, 0.01),
    Truth(0.0, 0.0, 0.003),
    Truth(0.01, 0.002, 0.003, outliers=0.05),
)


def drawn(truth: Truth, sessions: int, rng: random.Random) -> list[Costs]:
    """Return the costs of all cases of a class."""
    of_session = {str(number): rng.gauss(0, truth.session) for number in range(sessions)}
    cases = []
    for case in range(CASES):
        costs: Costs = {}
        for name, shift in of_session.items():
            level = case + shift + rng.gauss(0, truth.case_within_session)
            slow = [SLOW if rng.random() < truth.outliers else 0.0 for _ in range(LAUNCHES)]
            costs[name] = [math.exp(level + late + rng.gauss(0, truth.launch)) for late in slow]
        cases.append(costs)
    return cases


def of_perfsuite(cases: Sequence[Costs]) -> Mapping[str, float]:
    """Return the standard deviations that perfsuite estimates."""
    of_session, of_case, launch = estimated(cases)
    return dict(zip(NAMES, (of_session.sigma, of_case.sigma, launch), strict=True))


def estimated(cases: Sequence[Costs]) -> tuple[Component, Component, float]:
    """Return perfsuite's estimates of the noise of sessions, of cases within a session, and of launches."""
    noise = pooled_over_sessions(cases)
    assert noise is not None
    assert noise.of_session is not None
    assert noise.of_case is not None
    return noise.of_session, noise.of_case, noise.sigma


def covered(truth: Truth, sessions: int, trials: int) -> list[float]:
    """Return how often the upper limits of the first two effects are not below the true values."""
    rng = random.Random(1)
    counts = [0, 0]
    for _ in range(trials):
        of_session, of_case, _ = estimated(drawn(truth, sessions, rng))
        counts[0] += of_session.upper_sigma >= truth.session
        counts[1] += of_case.upper_sigma >= truth.case_within_session
    return [count / trials for count in counts]


@dataclass
class Estimates:
    """The estimates of one method over all trials."""

    estimate: Callable[[Sequence[Costs]], Mapping[str, float]]
    values: list[Mapping[str, float]]
    seconds: list[float]

    def add(self, cases: Sequence[Costs]) -> None:
        """Estimate the effects of one class."""
        began = perf_counter()
        estimate = self.estimate(cases)
        self.seconds.append(perf_counter() - began)
        self.values.append(estimate)

    def cells(self, truth: Truth) -> list[str]:
        """Return the median and the root mean square error of each effect, and the cost of an estimate."""
        texts = []
        for name in NAMES:
            values = [value[name] for value in self.values if name in value]
            error = math.sqrt(fmean((value - getattr(truth, name)) ** 2 for value in values))
            texts.append(f"{median(values):.2%} (error {error:.2%})")
        failed = sum(not value for value in self.values)
        return [*texts, f"{failed} of {len(self.values)}", f"{1e3 * median(self.seconds):,.1f}"]


def main() -> None:
    """Print a table of estimates, and a table of the upper limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--statsmodels", help="an interpreter that has statsmodels")
    parser.add_argument("--trials", type=int, default=40)
    chosen = parser.parse_args()
    methods = {"perfsuite": of_perfsuite}
    if chosen.statsmodels:
        process = subprocess.Popen(
            [chosen.statsmodels, "-c", MIXED_LM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )
        methods["statsmodels"] = lambda cases: of_statsmodels(process, cases)
    heads = ["session, case within, launch", "sessions", "method", "session", "case within session", "launch"]
    show_table([*heads, "failed", "ms"], estimates(methods, chosen.trials))
    show_table(
        [*heads[:2], "sessions below their limit", "cases within a session below their limit"],
        (
            [truth.title, str(sessions), *(f"{share:.0%}" for share in covered(truth, sessions, 500))]
            for truth in TRUTHS
            for sessions in (2, 3, 5)
        ),
    )


def estimates(
    methods: Mapping[str, Callable[[Sequence[Costs]], Mapping[str, float]]], trials: int
) -> Iterator[list[str]]:
    """Yield a row for each truth, number of sessions and method."""
    for truth in TRUTHS:
        for sessions in (3, 5):
            rng = random.Random(0)
            results = {name: Estimates(estimate, [], []) for name, estimate in methods.items()}
            for _ in range(trials):
                cases = drawn(truth, sessions, rng)
                for result in results.values():
                    result.add(cases)
            for name, result in results.items():
                yield [truth.title, str(sessions), name, *result.cells(truth)]


def of_statsmodels(process: "subprocess.Popen[str]", cases: Sequence[Costs]) -> Mapping[str, float]:
    """Return the standard deviations that MixedLM estimates. The result is empty if the fit fails."""
    assert process.stdin is not None
    assert process.stdout is not None
    rows = [
        [f"c{number}", f"s{session}", 100 * math.log(cost)]
        for number, costs in enumerate(cases)
        for session, launches in costs.items()
        for cost in launches
    ]
    print(json.dumps(rows), file=process.stdin, flush=True)
    answer, _ = json.loads(process.stdout.readline())
    if answer is None:
        return {}
    return {name: math.sqrt(max(variance, 0.0)) for name, variance in zip(NAMES, answer, strict=True)}


if __name__ == "__main__":
    main()
