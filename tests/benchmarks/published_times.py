"""Compares predicted with published step times: docs/evidence/step-times.md.

python -m tests.benchmarks.published_times             # from the stored logs, in seconds
python -m tests.benchmarks.published_times --record    # run the cases dry again (30 minutes)
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

from bench_cases.predicted import as_predicted, with_one_factor
from perfsuite.analysis.step_time.streams import MachineSpeeds
from perfsuite.dry.driver import dry_run
from perfsuite.results import device_log_file
from perfsuite.results.device_log import (
    Allocate,
    CollectiveWait,
    Communicate,
    EmptyCache,
    EndOfStep,
    Entry,
    Free,
    RecordEvent,
    StreamWait,
    UseIn,
    Workspace,
)
from perfsuite.results.run_dir import RunDir
from tests.bench_cases.published_steps import FEW, MORE, STEPS, PublishedStep
from tests.benchmarks import show_table

OF_MEMORY = (Allocate, Free, UseIn, Workspace, EmptyCache)


def main() -> None:
    """Print the errors of all rows and clusters, or record their logs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true")
    if parser.parse_args().record:
        for step in STEPS:
            for layers in (FEW, MORE):
                record(step, layers)
    show_table(("cluster", "row", "published, ms", "predicted, ms", "error"), map(_cells, STEPS))
    print()
    clusters = dict.fromkeys(step.cluster for step in STEPS)
    show_table(
        ("cluster", "rows", "median", "nine of ten", "median with one factor", "nine of ten with one factor"),
        map(_spread, clusters),
    )
    print()
    show_table(("row", "other row", "published change of speed", "predicted"), _pairs(STEPS))
    print()
    show_table(
        ("cluster", "network half as fast", "a quarter as fast", "kernels 10% slower"),
        map(_uncertainty, clusters),
    )


def _uncertainty(cluster: str) -> tuple[str, ...]:
    """Return how much longer the predicted steps take with slower networks or faster GPUs, as ranges."""
    changes: list[list[float]] = [[], [], []]
    for step in STEPS:
        if step.cluster == cluster:
            its = step.machine
            others = (_with_network(its, 0.5), _with_network(its, 0.25), its.with_device(1.1))
            for of_other, other in zip(changes, others, strict=True):
                of_other.append(step.predicted_on(other).total_s / step.predicted.total_s - 1)
    return cluster, *(f"{min(of_other):+.1%} to {max(of_other):+.1%}" for of_other in changes)


def _with_network(machine: MachineSpeeds, times: float) -> MachineSpeeds:
    links = machine.links
    assert links.between is not None
    return machine._replace(links=links._replace(between=times * links.between))


def _pairs(steps: Sequence[PublishedStep]) -> Iterator[tuple[str, ...]]:
    """For every two rows with the same cluster and model, yield by how much the speed per GPU differs."""
    for first, second in combinations(steps, 2):
        if first.cluster == second.cluster and first.case.model == second.case.model:
            predicted = first.gpu_seconds_per_token / second.gpu_seconds_per_token
            published = predicted * second.ratio / first.ratio
            yield (
                ", ".join(first.row.settings),
                ", ".join(second.row.settings),
                f"{published - 1:+.1%}",
                f"{predicted - 1:+.1%}",
            )


def record(step: PublishedStep, layers: int) -> None:
    """Make a dry run of a case with fewer layers, and store the log of its reported step."""
    with tempfile.TemporaryDirectory() as directory:
        run = dry_run(step.with_layers(layers), Path(directory), ranks=(0,))
        if run.failure is not None:
            raise SystemExit(f"{run.case.id}: {run.failure.message}")
        log = device_log_file.read(RunDir(Path(directory)).device_log(0))
    device_log_file.write(step.log(layers), timed(log))


def timed(log: Sequence[Entry]) -> list[Entry]:
    """Return the entries that a replay of the reported step needs, and earlier entries that it waits for."""
    begin = next(index for index, entry in enumerate(log) if entry == EndOfStep(3))
    step = [entry for entry in log[begin:] if not isinstance(entry, OF_MEMORY)]
    events = {entry.event for entry in step if isinstance(entry, StreamWait)}
    collectives = {entry.number for entry in step if isinstance(entry, CollectiveWait)}
    before = [
        entry
        for entry in log[:begin]
        if (isinstance(entry, RecordEvent) and entry.event in events)
        or (isinstance(entry, Communicate) and entry.number in collectives)
    ]
    return [*before, *step]


def _cells(step: PublishedStep) -> tuple[str, ...]:
    predicted_s = step.predicted.total_s
    settings = ", ".join(step.row.settings)
    published_s = predicted_s / step.ratio
    return (
        step.cluster,
        settings,
        f"{1e3 * published_s:,.0f}",
        f"{1e3 * predicted_s:,.0f}",
        f"{step.ratio - 1:+.1%}",
    )


def _spread(cluster: str) -> tuple[str, ...]:
    ratios = [step.ratio for step in STEPS if step.cluster == cluster]
    plain = as_predicted(ratios)
    if len(ratios) == 1:
        return cluster, "1", f"{plain.median:.1%}", "-", "-", "-"
    one = with_one_factor(ratios)
    return (
        cluster,
        str(len(ratios)),
        f"{plain.median:.1%}",
        f"{plain.nine_of_ten:.1%}",
        f"{one.median:.1%}",
        f"{one.nine_of_ten:.1%}",
    )


if __name__ == "__main__":
    main()
