"""Test that DeepSpeed's checkpoints are events in launches of scripts that use its engine."""

from pathlib import Path

import pytest

from tests.frameworks.test_savers import bytes_written, events, launched, size

pytestmark = [pytest.mark.launch, pytest.mark.nightly]

TRAIN = """
import os
import deepspeed, torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would build, to talk on a CPU
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
config = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
if os.environ["FROM"]:
    engine.load_checkpoint(os.environ["FROM"])
for step in range(1, 100):
    engine.backward((engine(torch.ones(4, 8)) - 1).square().mean())
    engine.step()
    if step % 5 == 0:
        engine.save_checkpoint(os.environ["OUT"], tag=f"step-{step}")
"""


@pytest.mark.usefixtures("deepspeed")
def test_checkpoints_of_the_engine_are_events(tmp_path: Path) -> None:
    run = launched(tmp_path / "first", TRAIN, ranks=2, DS_ACCELERATOR="cpu")
    # They come after steps 5 and 10, but the step in which the engine is recognised is not counted.
    assert events(run) == {"save checkpoint": (4, 9)}
    saved = tmp_path / "first" / "step-5"
    assert bytes_written(run) == size(saved) > 0
    resumed = launched(
        tmp_path / "resumed", TRAIN, ranks=2, resumes_from=tmp_path / "first", DS_ACCELERATOR="cpu"
    )
    assert events(resumed)["load checkpoint"] == (0,)
