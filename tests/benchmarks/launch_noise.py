"""Measures how start-up and data wait, in seconds, vary between launches of unchanged code.

A case of DDP and a script with a data worker are launched alternately. The table has a row for each part of
the start-up and a row for the data wait. Each row has the median seconds and two standard deviations between
launches: of the logarithm of the seconds, and of the logarithm of the judged value. The last column is the
smallest growth that is found 95 times in 100. It comes from `simulated_spans` or `simulated_data_wait`, with
the second of these standard deviations as the scatter.

    python -m tests.benchmarks.launch_noise [--launches 12]   # docs/evidence/statistics.md
"""

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median, stdev

from perfsuite import DDP, Case, Model, Script, Topology
from perfsuite.node.machine import detect_cpu
from perfsuite.results.metric import DATA_WAIT, span_metrics
from perfsuite.results.run import Figures
from tests.benchmarks import launched, show_table, simulated_data_wait, simulated_spans
from tests.samples import make_case

TRAIN = """
import time
import torch
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, row):
        time.sleep(0.001)
        return torch.full((256,), float(row))


torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Rows(), batch_size=16, num_workers=1):
    optimizer.zero_grad()
    model(batch / 100_000).square().mean().backward()
    optimizer.step()
"""
WINDOW = {"max_warmup_steps": 20, "steps": 60}


def main() -> None:
    """Print a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=12)
    count = parser.parse_args().launches
    machine = detect_cpu("of a benchmark")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        cases = {"DDP": make_case(model="llama-tiny", framework=DDP(), **WINDOW), "script": script(directory)}
        launches: dict[str, list[Figures]] = {case: [] for case in cases}
        for number in range(count):
            for label, case in cases.items():
                run = launched(case, machine, directory / f"{label}-{number}")
                launches[label].append(run.figures)
                print(f"launch {number + 1} of {label}", flush=True)
    for label, made in launches.items():
        print(f"\n{label}, {count} launches\n")
        show_table(("part", "median", "scatter", "judged scatter", "found from"), rows(made))


def script(directory: Path) -> Case:
    """Return a case of a script whose only worker takes 16 ms for a batch."""
    path = directory / "train.py"
    path.write_text(TRAIN)
    return make_case(
        model=Model.named("net"),
        framework=Script(path=str(path)),
        sequence_length=None,
        micro_batch=16,
        topology=Topology(processes_per_node=1),
        **WINDOW,
    )


def rows(launches: Sequence[Figures]) -> Iterator[list[str]]:
    """Yield a row for each part of the start-up, and a row for the data wait."""
    for metric in span_metrics(launches):
        seconds = [value for launch in launches if (value := metric.of(launch)) is not None]
        scatter = scatter_of(seconds)
        least = simulated_spans.found(scatter, median(seconds))
        judged = scatter_of([metric.cost(duration_s) for duration_s in seconds])
        yield [metric.label, f"{median(seconds):.2f} s", f"{scatter:.1%}", f"{judged:.1%}", f"{least:g} s"]
    waits = [value for launch in launches if (value := DATA_WAIT.of(launch)) is not None]
    if waits:
        step_s = fmean(launch.step_s_mean or math.nan for launch in launches)
        share = median(waits) / step_s
        scatter = scatter_of(waits)
        least = simulated_data_wait.found(scatter, share)
        wait = DATA_WAIT.against(launches)
        judged = scatter_of([wait.cost(wait_share) for wait_share in waits])
        yield [
            "data wait",
            f"{share:.0%} of a step",
            f"{scatter:.1%}",
            f"{judged:.1%}",
            f"{least:.1%} of a step",
        ]


def scatter_of(values: Sequence[float]) -> float:
    """Return the standard deviation of the values' logarithms."""
    return stdev(map(math.log, values))


if __name__ == "__main__":
    main()
