"""Measures the cost of the Slurm launcher. A script runs with perfsuite and with `srun torchrun`.

Each pair has a run of both kinds, on two nodes of the emulated cluster of the tests. Counting and the probe
are part of the cost.

Prints two ratios: that of the whole time of the command, and that of the median step, which the script itself
measures.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from perfsuite import Model, Script, Topology
from perfsuite.features.slurm.launcher import JOB_ID, SlurmLauncher
from perfsuite.measure import Launching
from perfsuite.node.machine import detect_cpu
from tests.benchmarks import launched, show_ratios
from tests.features.slurm.allocation import Allocation
from tests.features.slurm.emulated import slurm_cluster
from tests.samples import make_case

PAIRS = 8
TRAIN = """
import sys, time
from statistics import median
import torch

torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
layers = [torch.nn.Linear(512, 512) for _ in range(8)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = torch.ones(64, 512)
taken = []
for number in range(100):
    began = time.perf_counter()
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    taken.append(time.perf_counter() - began)
    if number == 90 and torch.distributed.get_rank() == 0:  # perfsuite ends the script after its last step
        with open(sys.argv[1], "w") as file:
            file.write(str(median(taken[50:])))
torch.distributed.destroy_process_group()
"""


def by_perfsuite(script: Path, step: Path, directory: Path) -> None:
    """Launch the script as a case of perfsuite."""
    framework = Script(path=str(script), arguments=(str(step),))
    net = {"model": Model.named("net"), "framework": framework, "sequence_length": None, "micro_batch": 64}
    two_nodes = Topology(nodes=2, processes_per_node=1)
    case = make_case(**net, topology=two_nodes, max_warmup_steps=50, steps=50)
    machine = detect_cpu("of two nodes").replace(nodes=2)
    launched(case, machine, directory, Launching(launcher=SlurmLauncher()))


def by_torchrun(script: Path, step: Path, directory: Path) -> None:
    """Launch the script like a user of Slurm."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    meet = ["--rdzv-backend=c10d", "--rdzv-endpoint=n1:29500", f"--rdzv-id={directory.name}"]
    srun = ["srun", f"--jobid={os.environ[JOB_ID]}", "--nodes=2", "--ntasks=2", "--overlap"]
    command = [*srun, *torchrun, *meet, str(script), str(step)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def main() -> None:
    """Print the median and the middle half of the pairs' ratios."""
    whole = []
    steps = []
    with slurm_cluster() as cluster, tempfile.TemporaryDirectory() as name:
        os.environ.update(cluster.environment)
        allocation = Allocation(cluster)
        os.environ[JOB_ID] = allocation.job_id
        script = Path(name) / "train.py"
        script.write_text(TRAIN)
        for pair in range(PAIRS):
            seconds = {}
            order = [by_perfsuite, by_torchrun] if pair % 2 else [by_torchrun, by_perfsuite]
            for launch in order:
                step = Path(name) / f"{launch.__name__}-{pair}.txt"
                began = time.monotonic()
                launch(script, step, Path(name) / f"{launch.__name__}-{pair}")
                seconds[launch] = time.monotonic() - began, float(step.read_text())
            whole.append(seconds[by_perfsuite][0] / seconds[by_torchrun][0])
            steps.append(seconds[by_perfsuite][1] / seconds[by_torchrun][1])
        allocation.release()
    for what, ratios in (("whole launch", whole), ("median step", steps)):
        show_ratios(f"{what}, perfsuite / srun torchrun", ratios, f"{PAIRS} pairs")


if __name__ == "__main__":
    main()
