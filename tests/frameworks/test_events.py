"""Test what launches report about events and phases of a script that is not modified."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perfsuite.launch.hang import HangDetector
from perfsuite.launch.local import LocalLauncher
from perfsuite.measure import USUAL, Launching
from perfsuite.results.count_baseline import from_runs
from perfsuite.results.run import Run
from perfsuite.verdict import exact
from perfsuite.verdict.arms import judge_counts
from tests.frameworks import net_scripts
from tests.samples import known

TRAIN = """
import os
import torch
import perfsuite

EXTRA = int(os.environ.get("EXTRA", 0))

def generate():
    return torch.ones(4, 8)

@perfsuite.phase("score")
def score(batch):
    return batch

def unused():
    pass

def save(model, path):
    torch.save({"model": model.state_dict(), "more": torch.ones(EXTRA)}, path)

def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = os.path.join(os.environ["PERFSUITE_LAUNCH_DIR"], "model.pt")
    save(model, path)
    model.load_state_dict(torch.load(path)["model"])
    for step in range(1000):
        optimizer.zero_grad()
        batch = score(generate())
        (model(batch) - 1).square().mean().backward()
        optimizer.step()
        if step % 5 == 4:
            save(model, path)

if __name__ == "__main__":
    main()
"""


SHARDED = """
import os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = os.environ["PERFSUITE_LAUNCH_DIR"]
    group = dist.new_group(backend="gloo")  # of the thread that saves next to training
    saving = None
    for step in range(1000):
        optimizer.zero_grad()
        (model(torch.ones(4, 8)) - 1).square().mean().backward()
        optimizer.step()
        if step == 4:
            dcp.save({"model": model.state_dict()}, checkpoint_id=f"{path}/whole")
        if step == 5:
            later = {"checkpoint_id": f"{path}/later", "process_group": group}
            saving = dcp.async_save({"model": model.state_dict()}, **later)
        if step == 9:
            saving.result()

main()
"""
SLOW = """
import os, time
import torch

class Slow:
    def __reduce__(self):
        time.sleep(float(os.environ["SLEEP_S"]))
        return (Slow, ())

def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1000):
        optimizer.zero_grad()
        (model(torch.ones(4, 8)) - 1).square().mean().backward()
        optimizer.step()
        if step == 8:
            torch.save(Slow(), os.path.join(os.environ["PERFSUITE_LAUNCH_DIR"], "slow.pt"))

main()
"""


def launched(
    directory: Path,
    *,
    text: str = TRAIN,
    ranks: int = 1,
    phases: dict[str, str] | None = None,
    how: Launching = USUAL,
    **env: Any,
) -> Run:
    return net_scripts.launched(directory, text, ranks=ranks, env=env, how=how, phases=phases or {})


def measured(directory: Path, **how: Any) -> Run:
    return net_scripts.that_went_well(launched(directory, **how))


@pytest.mark.launch
def test_script_checkpoints_and_phases_are_spans(tmp_path: Path) -> None:
    run = measured(tmp_path / "one", phases={"rollout": "train:generate"})
    steps = {name: times.steps for name, times in run.spans.items() if not name.startswith("start-up")}
    assert steps == {
        "save checkpoint": (0, 5, 10),
        "load checkpoint": (0,),
        "rollout": tuple(range(14)),
        "score": tuple(range(14)),
    }
    assert steps.keys() <= run.counts[0].counts.spans.keys()


@pytest.mark.launch
def test_larger_checkpoint_regresses(tmp_path: Path) -> None:
    before, same, more = (
        measured(tmp_path / name, EXTRA=extra)
        for name, extra in (("before", 2**18), ("same", 2**18), ("more", 2**19))
    )
    unchanged = known(exact.check([same], from_runs([before])))
    assert (unchanged.outcome, unchanged.findings, unchanged.notes) == ("passed", (), ())
    verdict = judge_counts(before, more)
    assert verdict.outcome == "regressed"
    (finding,) = known(verdict.counts).findings
    assert finding.sentence == "save checkpoint: bytes written: 1.0 -> 2.0 MiB"


@pytest.mark.launch
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            "train:nothing",
            "'nothing' does not exist in 'train' (the script itself). Name a function or method",
        ),
        pytest.param(
            "train:EXTRA",
            "'EXTRA' is not a function or method of 'train' (the script itself)",
            marks=pytest.mark.nightly,
        ),
        (
            "train:unused",
            "in the 14 steps, no rank completed a call of this function in the thread that trains",
        ),
        pytest.param(
            "elsewhere:run",
            "in the 14 steps, no rank completed a call of this function in the thread that trains",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_phase_that_never_runs_fails(tmp_path: Path, function: str, said: str) -> None:
    failure = known(launched(tmp_path / "wrong", phases={"rollout": function}).failure)
    assert failure.kind == "mismatch"
    assert failure.message.startswith(f"phases={{'rollout': '{function}'}}: {said}")


@pytest.mark.nightly
def test_sharded_checkpoint_counts_each_rank(tmp_path: Path) -> None:
    run = measured(tmp_path / "sharded", text=SHARDED, ranks=2)
    assert run.spans["save checkpoint"].steps == (5, 6)
    of_ranks = [entry.counts.spans["save checkpoint"] for entry in run.counts for _ in entry.ranks]
    written = [known(counts.bytes_written) for counts in of_ranks]
    whole = next((tmp_path / "sharded").rglob("whole"))
    assert sum(written) == sum(file.stat().st_size for file in whole.glob("*.distcp"))
    assert all(counts.collectives_begun for counts in of_ranks)


@pytest.mark.launch
@pytest.mark.nightly
def test_a_checkpoint_longer_than_a_hang_ends(tmp_path: Path) -> None:
    impatient = partial(HangDetector, hang_s=15, longest_steps=0, longest_warm_ups=0)
    how = Launching(launcher=LocalLauncher(new_detector=impatient))
    run = measured(tmp_path / "slow", text=SLOW, how=how, SLEEP_S=30)
    assert run.spans["save checkpoint"].steps == (9,)
