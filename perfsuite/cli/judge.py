"""`perfsuite judge`: judges step times that somebody else measured, by the engine of the plugin.

The docs' page on existing jobs explains its logs, which `cli.judge_logs` reads.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from perfsuite.analysis.figures import find_window
from perfsuite.cli.cases import tolerance as share
from perfsuite.cli.judge_logs import check_comparable, read_log
from perfsuite.errors import CaseError
from perfsuite.verdict.sequential import FEWEST_LAUNCHES, MAX_LAUNCHES, Decision, decide, pooled_noise

SHORT_SERIES = 15  # fewest steps of a launch whose warm-up is looked for
MAX_WARMUP = 20
"""Most steps of warm-up. That is 2/7 of the 70 steps of a real launch, and the same share of fewer steps."""
HEADINGS = f"{'outcome':<12}  {'change':>8}  {'99 % interval':^20}  launches  detects"
FEWEST_BASELINE = 3  # fewest launches of a baseline that tell how launches scatter

Series = Sequence[float]
"""Seconds of the steps of a launch, or what is proportional to them."""


def judge(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG", help="Of the launches to judge, in order.")],
    baseline: Annotated[
        list[Path],
        typer.Option(
            help="A log of a launch before the change; give it 3 times or more. A log is a TensorBoard event "
            "file or a directory of them, an MLPerf log, or a .json of its step times."
        ),
    ],
    tag: Annotated[
        str | None,
        typer.Option(
            help="What of the logs to judge: a scalar that is a time (default: iteration-time, Megatron's), "
            "or of MLPerf's train_step_time or throughput (default: the first that is there)."
        ),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(parser=share, metavar="SHARE", help="Slowdown that must not pass (3%).")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="for machines: print the decision")] = False,
) -> None:
    """Judge step times that somebody else measured, by the logs of TensorBoard, MLPerf or others.

    Exit status 1 if the launches are slower.
    """
    if len(baseline) < FEWEST_BASELINE:
        raise CaseError(
            f"--baseline is given {len(baseline)} times, which does not tell how launches scatter: "
            f"give {FEWEST_BASELINE} logs or more"
        )
    before, now = ([read_log(path, tag) for path in paths] for paths in (baseline, logs))
    check_comparable([*before, *now])
    decision = judged([log.series for log in before], [log.series for log in now], tolerance or 0.03)
    if json_output:
        typer.echo(as_json(decision))
    else:
        typer.echo(f"{'values':>6}  {'median':>10}  {before[0].what}")
        for side, of_side in (("baseline", before), ("judged", now)):
            for log in of_side:
                typer.echo(f"{len(log.series):>6}  {seconds_per_step(log.series):>10.4g}  {side}: {log.path}")
        typer.echo(f"\n{HEADINGS}\n{_as_row(decision)}")
    if decision.outcome == "regressed":
        raise typer.Exit(1)


def judged(baseline: Sequence[Series], launches: Sequence[Series], tolerance: float) -> Decision:
    """Judge launch by launch, as a real session does; `baseline` has 3 launches or more.

    If the launches run out before a decision: "passed" if it looks faster and a slowdown beyond the tolerance
    is excluded, else "inconclusive". One or two launches can pass; they are never a regression.
    """
    before, now = ([seconds_per_step(series) for series in side] for side in (baseline, launches))
    noise, most = pooled_noise([before]), max(FEWEST_LAUNCHES, min(MAX_LAUNCHES, len(now)))
    for used in range(1, min(most, len(now)) + 1):
        decision = decide(before, now[:used], tolerance=tolerance, noise=noise, max_launches=most)
        if decision.outcome != "undecided":
            return decision
    faster = decision.estimate < 0 and decision.interval[1] < tolerance
    return replace(decision, outcome="passed" if faster else "inconclusive")


def seconds_per_step(series: Series) -> float:
    """Return the median of a launch's steps after warm-up, in seconds.

    The end of warm-up is found as in a real launch (`perfsuite.analysis.figures`), after at most 20 steps and
    at most two sevenths of the steps. Under 15 steps it is not looked for, and the median is that of all
    steps.
    """
    if len(series) < SHORT_SERIES:
        return median(series)
    window = find_window(series, min(MAX_WARMUP, 2 * len(series) // 7))
    return median(series[window.start : window.stop])


def as_json(decision: Decision) -> str:
    """Format a decision as strict JSON, with null for an infinite number."""
    content = {
        "outcome": decision.outcome,
        "estimate": _finite(decision.estimate),
        "interval": [_finite(end) for end in decision.interval],
        "launches_used": decision.launches_used,
        "minimum_detectable_drop": _finite(decision.minimum_detectable_drop),
        "blind": decision.blind,
    }
    return json.dumps(content, allow_nan=False)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _as_row(decision: Decision) -> str:
    low, high = decision.interval
    interval, blind = f"{low:+.2%} to {high:+.2%}", "  blind" if decision.blind else ""
    return (
        f"{decision.outcome:<12}  {decision.estimate:>+8.2%}  {interval:^20}  "
        f"{decision.launches_used:>8}  {decision.minimum_detectable_drop:>7.2%}{blind}"
    )
