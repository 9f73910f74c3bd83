"""What launches tell of events and phases of a script, which stays as it is."""

from pathlib import Path
from typing import Any

import pytest

from perfsuite import Case, Model, Script, Topology
from perfsuite.measure import launch_once
from perfsuite.node.machine import detect
from perfsuite.results.run import Run
from tests.frameworks import test_base as base

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


def launched(directory: Path, *, phases: dict[str, str] | None = None, **env: Any) -> Run:
    directory.mkdir(exist_ok=True)
    path = directory / "train.py"
    path.write_text(TRAIN)
    variables = {name: str(value) for name, value in env.items()}
    case: Case = base.SMALL.replace(
        model=Model.named("net"),
        framework=Script(path=path, env=variables, phases=phases or {}),
        sequence_length=None,
        micro_batch=4,
        topology=Topology(processes_per_node=1),
        max_warmup_steps=4,
        steps=10,
    )
    return launch_once(case, detect(), directory / "run")


@pytest.mark.launch
def test_checkpoints_and_phases_of_a_script_are_spans(tmp_path: Path) -> None:
    run = launched(tmp_path / "one", phases={"rollout": "train:generate"}, EXTRA=2**20)
    assert run.failure is None, run.failure
    steps = {name: times.steps for name, times in run.spans.items()}
    assert steps == {
        "save checkpoint": (0, 5, 10),
        "load checkpoint": (0,),
        "rollout": tuple(range(14)),
        "score": tuple(range(14)),
    }
