"""Test that the savers and loops of libraries are events in launches of scripts that use them."""

from pathlib import Path

import pytest

from perfsuite.results.run import Run
from tests.frameworks import net_scripts
from tests.samples import known

pytestmark = [pytest.mark.launch, pytest.mark.nightly]

BY_THE_TRAINER = """
import os
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
data = [{"input_ids": row, "labels": row} for row in torch.arange(800 * 8).view(800, 8) % 32]
arguments = TrainingArguments(
    output_dir=os.environ["OUT"], per_device_train_batch_size=4, max_steps=100, report_to=[], use_cpu=True,
    save_steps=5, eval_strategy="steps", eval_steps=10, disable_tqdm=True,
)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))
Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8]).train(
    resume_from_checkpoint=os.environ["FROM"] or None
)
"""
BY_ACCELERATE = """
import os
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
if os.environ["FROM"]:
    accelerator.load_state(os.environ["FROM"])
for step in range(1, 100):
    accelerator.backward((model(torch.ones(4, 8)) - 1).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        accelerator.save_state(os.path.join(os.environ["OUT"], f"checkpoint-{step}"))
"""
BY_LIGHTNING = (
    """
import os
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
"""
    + net_scripts.LIGHTNING_MODULE
    + """
loader = torch.utils.data.DataLoader(torch.ones(4000, 8), batch_size=4)
saver = ModelCheckpoint(
    dirpath=os.environ["OUT"], filename="checkpoint-{step}", every_n_train_steps=5, save_top_k=-1,
    auto_insert_metric_name=False,
)
trainer = Trainer(
    accelerator="cpu", devices=1, max_steps=100, logger=False, callbacks=[saver], val_check_interval=10,
    limit_val_batches=2, num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Net(), loader, loader, ckpt_path=os.environ["FROM"] or None)
"""
)


def launched(
    directory: Path, text: str, *, resumes_from: Path | None = None, ranks: int = 1, **env: str
) -> Run:
    """Launch a script that saves into OUT, and that resumes from FROM unless this is empty."""
    variables = {"OUT": directory, "FROM": resumes_from or "", **env}
    return net_scripts.that_went_well(net_scripts.launched(directory, text, ranks=ranks, env=variables))


def events(run: Run) -> dict[str, tuple[int, ...]]:
    """Return the steps after which each event happened. 0: before the first step."""
    names = ("save checkpoint", "load checkpoint", "evaluate")
    return {name: run.spans[name].steps for name in names if name in run.spans}


def bytes_written(run: Run) -> int:
    """Return the number of bytes of one checkpoint, written by all ranks."""
    of_ranks = [entry.counts.spans["save checkpoint"] for entry in run.counts for _ in entry.ranks]
    return sum(known(counts.bytes_written) for counts in of_ranks)


def size(path: Path) -> int:
    """Return the number of bytes of the files with tensors or pickles in a checkpoint."""
    files = path.iterdir() if path.is_dir() else [path]
    kinds = {".bin", ".ckpt", ".distcp", ".pkl", ".pt", ".pth", ".safetensors"}
    return sum(file.stat().st_size for file in files if file.suffix in kinds)


@pytest.mark.parametrize(
    ("text", "checkpoint", "evaluates"),
    [
        pytest.param(BY_THE_TRAINER, "checkpoint-5", True, id="Trainer"),
        pytest.param(BY_ACCELERATE, "checkpoint-5", False, id="accelerate"),
        pytest.param(BY_LIGHTNING, "checkpoint-5.ckpt", True, id="Lightning"),
    ],
)
def test_events_of_a_library_are_spans(tmp_path: Path, text: str, checkpoint: str, evaluates: bool) -> None:
    run = launched(tmp_path / "first", text)
    evaluated = {"evaluate": (10,)} if evaluates else {}
    assert events(run) == {"save checkpoint": (5, 10), **evaluated}
    saved = tmp_path / "first" / checkpoint
    assert bytes_written(run) == size(saved) > 0
    resumed = launched(tmp_path / "resumed", text, resumes_from=saved)
    assert set(events(resumed)["load checkpoint"]) == {0}, "the Trainer loads several files"
