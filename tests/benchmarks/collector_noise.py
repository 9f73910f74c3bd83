"""Measures the noise from Python's garbage collector. perfsuite does not change the collector's settings.

A script has a shuffle buffer of records, which are Python objects. Each step replaces one record in 20. The
script is launched alternately with Python's default collector and with `gc.disable()`. Each row has three
standard deviations of logarithms: of the steps in a launch, of the launches' median steps, and of the
launches' mean steps (as in `tokens/s with stalls`).

    python -m tests.benchmarks.collector_noise [--launches 12] [--records 20000]   # docs/evidence/costs.md
"""

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from perfsuite import Case, Model, Script, Topology
from perfsuite.node.machine import detect_cpu
from perfsuite.results.run import Run
from tests.benchmarks import launched, show_table
from tests.benchmarks.launch_noise import WINDOW, scatter_of
from tests.samples import make_case

TRAIN = """
import collections
import gc
import os
import torch

if os.environ["COLLECTOR"] == "off":
    gc.disable()
RECORDS = int(os.environ["RECORDS"])
buffer = collections.deque(({"tokens": [row]} for row in range(RECORDS)), maxlen=RECORDS)
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, foreach=False)
for step in range(1000):
    buffer.extend([{"tokens": [step + row]} for row in range(RECORDS // 20)])
    batch = torch.full((16, 8, 64), buffer[0]["tokens"][0] / RECORDS)
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
"""
COLLECTOR = {"on": "as Python has it", "off": "`gc.disable()`"}


def main() -> None:
    """Print a row with the collector, a row without it, and the ratio of each pair of launches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=12)
    parser.add_argument("--records", type=int, default=20_000)
    options = parser.parse_args()
    count = options.launches
    machine = detect_cpu("of a benchmark")
    runs: dict[str, list[Run]] = {setting: [] for setting in COLLECTOR}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "train.py").write_text(TRAIN)
        for number in range(count):
            for setting in COLLECTOR if number % 2 else reversed(COLLECTOR):
                case = script(directory / "train.py", setting, options.records)
                runs[setting].append(launched(case, machine, directory / f"{setting}-{number}"))
                print(f"launch {number + 1}, {COLLECTOR[setting]}", flush=True)
    headings = ("collector", "collecting", "in a launch", "between launches: median", "mean")
    show_table(headings, [row(COLLECTOR[setting], made) for setting, made in runs.items()])
    for figure in ("step_s_p50", "step_s_mean"):
        pairs = zip(figures_of(runs["on"], figure), figures_of(runs["off"], figure), strict=True)
        ratios = [on / off for on, off in pairs]
        print(f"{figure}, on / off: median {median(ratios):.3f} of {count} pairs")


def script(path: Path, setting: str, records: int) -> Case:
    """Return a case of the script with the collector `on` or `off`, and with this number of records."""
    return make_case(
        model=Model.named("net"),
        framework=Script(path=str(path), env={"COLLECTOR": setting, "RECORDS": str(records)}),
        sequence_length=None,
        micro_batch=16,
        topology=Topology(processes_per_node=1),
        **WINDOW,
    )


def row(label: str, runs: Sequence[Run]) -> list[str]:
    """Return the cells of the row that describes these launches."""
    collecting = median(
        (run.figures.gc_s_per_step or 0.0) / (run.figures.step_s_mean or math.nan) for run in runs
    )
    of_steps = median(scatter_of(run.measured_steps) for run in runs)
    between = [scatter_of(figures_of(runs, figure)) for figure in ("step_s_p50", "step_s_mean")]
    return [label, f"{collecting:.1%} of a step", *(f"{scatter:.1%}" for scatter in (of_steps, *between))]


def figures_of(runs: Sequence[Run], name: str) -> list[float]:
    """Return the number called `name` of each launch."""
    return [getattr(run.figures, name) for run in runs]


if __name__ == "__main__":
    main()
