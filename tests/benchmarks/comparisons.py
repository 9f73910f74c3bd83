"""Runs `perfsuite compare` on real launches while another process uses one core in bursts.

One comparison has unchanged code in both arms, and the next has a slowdown of 10% in arm B. A line is printed
for each comparison, and at the end, how often each outcome was seen. A comparison takes some minutes. Nothing
else should run on the machine.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from perfsuite import Case, Model, Script
from perfsuite.launch.arm import here
from perfsuite.report.progress import Progress
from perfsuite.results.metric import CPU_S_PER_STEP, TOKENS_PER_S
from perfsuite.results.outcome import Outcome, Verdict
from perfsuite.session.against_arm import AgainstArm
from perfsuite.session.session import Session
from perfsuite.session.setup import Host, Options, Setup
from tests.samples import make_case

COUNT = 20
"""The number of comparisons of each kind."""
TOLERANCE = 0.10
BURSTS = """
import time
while True:
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        pass
    time.sleep(0.8)
"""
TRAIN = """
import torch

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
layers = [torch.nn.Linear(256, 256) for _ in range(4)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
batch, target = torch.randn(256, 256), torch.randn(256, 256)
while True:  # perfsuite ends the script after its last step
    optimizer.zero_grad()
    (model(batch) - target).square().mean().backward()
    optimizer.step()
"""
SLOWDOWN = "slowdown=10%"


@contextlib.contextmanager
def bursts() -> Iterator[None]:
    """Use one core for 0.2 s of each second."""
    process = subprocess.Popen([sys.executable, "-c", BURSTS])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def compare(case: Case, directory: Path, *, inject: str | None) -> Verdict:
    """Compare this environment with itself, like `perfsuite compare --against .`."""
    options = Options(
        root=directory,
        store=directory / "store",
        baselines=directory / "baselines",
        inject=inject,
        wait_quiet_s=0,
    )
    setup = Setup(options, Progress(line=lambda line: None, cases=1), Host(shared=options.store))
    arms = here(directory), here(directory)
    session = Session(AgainstArm(setup, arms, tolerance=TOLERANCE, explains=False))
    try:
        return session.measure(case, case.id).verdict
    finally:
        session.setup.lock.release()


def told(verdict: Verdict, metric: str) -> str:
    """Return a comparison's result for one metric, for example `passed, +1.2% (-3.4 to +5.9%)`."""
    check = verdict.check(metric)
    if check is None or check.change is None or check.interval is None:
        return "not judged"
    low, high = check.interval
    return f"{check.outcome}, {check.change:+.1%} ({low:+.1%} to {high:+.1%})"


def main() -> None:
    """Print the result of each comparison, then how often each outcome was seen."""
    seen = Counter[tuple[str, Outcome]]()
    with tempfile.TemporaryDirectory() as name, bursts():
        directory = Path(name)
        script = directory / "train.py"
        script.write_text(TRAIN)
        net = {"model": Model.named("net"), "framework": Script(path=str(script)), "sequence_length": None}
        case = make_case(**net, micro_batch=256, max_warmup_steps=20, steps=200)
        for inject in [None, SLOWDOWN] * COUNT:
            began = time.monotonic()
            verdict = compare(case, directory, inject=inject)
            seconds = time.monotonic() - began
            speed, cpu = (told(verdict, metric.name) for metric in (TOKENS_PER_S, CPU_S_PER_STEP))
            arms = f"B {SLOWDOWN}" if inject else "unchanged"
            seen[arms, verdict.outcome] += 1
            print(
                f"{arms:14} {verdict.outcome:12} {verdict.launches} launches, {seconds:.0f} s; "
                f"{len(verdict.unhealthy_launches)} pairs set aside; time: {speed}; CPU time: {cpu}",
                flush=True,
            )
    for (arms, outcome), count in sorted(seen.items()):
        print(f"{arms:14} {outcome:12} {count} of {COUNT}")


if __name__ == "__main__":
    main()
