"""Test that torchtitan's checkpoints are events in launches of scripts that use them."""

from pathlib import Path

import pytest

from tests.frameworks.test_savers import bytes_written, events, launched, size
from tests.frameworks.torchtitan.samples import MARKS

pytestmark = [*MARKS, pytest.mark.launch, pytest.mark.nightly]

TRAIN = """
import os
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    config = CheckpointManager.Config(
        enable=True, interval=5, folder=os.environ["OUT"], async_mode=os.environ["MODE"], keep_latest_k=0,
        initial_load_path=os.environ["FROM"] or None,
    )
    checkpoints = CheckpointManager(
        config, dataloader=None, model_parts=[model], optimizers=optimizer, lr_schedulers=None, states={},
        sd_adapter=None,
    )
    checkpoints.load()
    for step in range(1, 100):
        optimizer.zero_grad()
        (model(torch.ones(4, 8)) - 1).square().mean().backward()
        checkpoints.maybe_wait_for_staging()
        optimizer.step()
        checkpoints.save(step)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_checkpoints_of_torchtitan_are_events(tmp_path: Path, mode: str) -> None:
    run = launched(tmp_path / "first", TRAIN, ranks=2, MODE=mode)
    assert events(run) == {"save checkpoint": (5, 10)}
    saved = tmp_path / "first" / "step-5"
    assert bytes_written(run) == size(saved) > 0
    resumed = launched(tmp_path / "resumed", TRAIN, ranks=2, resumes_from=saved, MODE=mode)
    assert events(resumed)["load checkpoint"] == (0,)
