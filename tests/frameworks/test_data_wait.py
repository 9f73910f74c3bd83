"""Test what a launch of a script reports about its data: the wait for batches, and the work for a batch."""

import sys
from pathlib import Path
from typing import Any

import pytest

from perfsuite import Script
from perfsuite.errors import CaseError
from perfsuite.results.count_baseline import from_runs
from perfsuite.results.run import Run
from perfsuite.verdict import exact
from perfsuite.verdict.arms import judge_counts, judge_pairs
from tests.frameworks import net_scripts
from tests.samples import known

PAIRS = 5
SLEEP_S = 0.3  # added to a batch: far more than the wait differs between launches
TRAIN = """
import os, time
import torch
from torch.utils.data import DataLoader

def option(name, default=0):
    return float(os.environ.get(name, default))

def tokenize(row):
    return row

class Rows:
    def __len__(self):
        return int(option("ROWS", 10_000))

    def __getitem__(self, row):
        time.sleep(option("SLEEP_S") / 4)
        for _ in range(int(option("CALLS"))):
            tokenize(row)
        return torch.ones(8)

def batches():
    while True:
        time.sleep(option("SLEEP_S"))
        yield torch.ones(4, 8)

def loader():
    workers = int(option("WORKERS"))
    how = {"multiprocessing_context": os.environ.get("CONTEXT", "fork")} if workers else {}
    while True:
        yield from DataLoader(Rows(), batch_size=4, num_workers=workers, **how)

def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches() if "OWN" in os.environ else loader():
        optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        optimizer.step()

if __name__ == "__main__":
    main()
"""


SLOW_ROW_S = 0.02
OF_SLOW_ROWS = f"""
import time, torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, row):
        time.sleep({SLOW_ROW_S})
        return torch.ones(8)
"""
BY_THE_TRAINER = f"""{OF_SLOW_ROWS}
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Tokens(Rows):
    def __getitem__(self, row):
        tokens = super().__getitem__(row).long()
        return {{"input_ids": tokens, "labels": tokens}}

sizes = {{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}}
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, max_steps=100, report_to=[], use_cpu=True,
    save_strategy="no",
)
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, **sizes))
Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
"""
BY_LIGHTNING = f"""{OF_SLOW_ROWS}
from lightning.pytorch import LightningModule, Trainer
{net_scripts.LIGHTNING_MODULE}
quiet = {{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}}
trainer = Trainer(accelerator="cpu", devices=1, max_steps=100, **quiet)
trainer.fit(Net(), torch.utils.data.DataLoader(Rows(), batch_size=4))
"""
IN_A_LOOP = """
for batch in loader:
    optimizer.zero_grad()
    (model(batch) - 1).square().mean().backward()
    optimizer.step()
"""
BY_ACCELERATE = f"""{OF_SLOW_ROWS}
from accelerate import Accelerator

model = torch.nn.Linear(8, 8)
plain = torch.utils.data.DataLoader(Rows(), batch_size=4)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = Accelerator(cpu=True).prepare(model, optimizer, plain)
{IN_A_LOOP}"""
BY_TORCHDATA = f"""{OF_SLOW_ROWS}
from torchdata.stateful_dataloader import StatefulDataLoader

model = torch.nn.Linear(8, 8)
loader = StatefulDataLoader(Rows(), batch_size=4)
optimizer = torch.optim.AdamW(model.parameters())
{IN_A_LOOP}"""
BY_LIGHTNING_FABRIC = f"""{OF_SLOW_ROWS}
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=1)
model = torch.nn.Linear(8, 8)
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(Rows(), batch_size=4))
{IN_A_LOOP}"""


def launched(directory: Path, *, loader: str | None = None, **env: Any) -> Run:
    return net_scripts.launched(directory, TRAIN, env=env, loader=loader)


def measured(directory: Path, **how: Any) -> Run:
    return net_scripts.that_went_well(launched(directory, **how))


@pytest.mark.launch
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_dataset_that_became_slow_regresses(tmp_path: Path, workers: int) -> None:
    fast = measured(tmp_path / "fast", WORKERS=workers)
    slow = measured(tmp_path / "slow", WORKERS=workers, SLEEP_S=SLEEP_S)
    verdict = judge_pairs([fast] * PAIRS, [slow] * PAIRS)
    assert known(verdict.check("data_wait_s")).outcome == verdict.outcome == "regressed"
    assert known(slow.figures.data_wait) > known(fast.figures.data_wait)


@pytest.mark.launch
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(BY_THE_TRAINER, id="Trainer"),
        pytest.param(BY_ACCELERATE, id="accelerate"),
        pytest.param(BY_LIGHTNING, id="Lightning", marks=pytest.mark.nightly),
        pytest.param(BY_LIGHTNING_FABRIC, id="Fabric", marks=pytest.mark.nightly),
        pytest.param(BY_TORCHDATA, id="torchdata", marks=pytest.mark.nightly),
    ],
)
def test_times_the_loader_of_a_library(tmp_path: Path, text: str) -> None:
    """A batch has four rows, and each of them sleeps."""
    run = net_scripts.that_went_well(net_scripts.launched(tmp_path, text, env={}))
    assert known(run.figures.data_wait_s) >= 4 * SLOW_ROW_S


def with_worker(directory: Path, **env: Any) -> Run:
    return measured(directory, WORKERS=1, **env)


@pytest.fixture(scope="module")
def forked_worker(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return with_worker(tmp_path_factory.mktemp("forked"), CONTEXT="fork", CALLS=100)


@pytest.mark.nightly
def test_the_same_work_in_a_worker_passes(forked_worker: Run, tmp_path: Path) -> None:
    same = with_worker(tmp_path / "same", CONTEXT="fork", CALLS=100)
    unchanged = known(exact.check([same], from_runs([forked_worker])))
    assert (unchanged.outcome, unchanged.findings, unchanged.notes) == ("passed", (), ())


@pytest.mark.launch
@pytest.mark.parametrize(
    "context",
    [
        "fork",
        pytest.param("spawn", marks=pytest.mark.nightly),
        pytest.param("forkserver", marks=pytest.mark.nightly),
    ],
)
def test_work_in_a_worker_is_counted(forked_worker: Run, tmp_path: Path, context: str) -> None:
    before = forked_worker
    if context != "fork":
        before = with_worker(tmp_path / "before", CONTEXT=context, CALLS=100)
    more = with_worker(tmp_path / "more", CONTEXT=context, CALLS=1_000)
    verdict = judge_counts(before, more)
    assert verdict.outcome == "regressed"
    findings = known(verdict.counts).findings
    of_other_threads = 0.0
    # Since Python 3.12, the calls of the threads that pass batches on are counted as well, and these vary.
    if sys.version_info >= (3, 12):
        findings = tuple(finding for finding in findings if finding.outcome == "regressed")
        of_other_threads = 0.02 * 4 * 900
    (finding,) = findings
    assert finding.quantity.endswith("calls of a loader's worker per batch")
    assert finding.now - finding.before == pytest.approx(4 * 900, abs=of_other_threads)
    assert "tokenize +3,600" in finding.sentence


@pytest.mark.nightly
def test_counts_workers_forked_in_a_step_alike(forked_worker: Run, tmp_path: Path) -> None:
    """With three batches in an epoch, workers are forked in step 4 and inherit the rank's counter."""
    short = with_worker(tmp_path / "short", CALLS=100, ROWS=12)
    batches = [run.counts[0].counts.worker_batch for run in (forked_worker, short)]
    assert known(batches[0]) == batches[1]


@pytest.mark.launch
@pytest.mark.parametrize(
    "loader",
    [
        pytest.param(None, marks=pytest.mark.nightly),
        "train:batches",
        pytest.param("__main__:batches", marks=pytest.mark.nightly),
    ],
)
def test_times_an_iterator_named_by_the_case(tmp_path: Path, loader: str | None) -> None:
    run = measured(tmp_path / "own", OWN=1, SLEEP_S=0.01, loader=loader)
    assert (run.figures.data_wait_s is None) == (loader is None)
    assert run.figures.data_wait_s is None or run.figures.data_wait_s >= 0.01


@pytest.mark.launch
@pytest.mark.parametrize(
    ("loader", "said"),
    [
        ("train:nothing", "loader='train:nothing': 'nothing' does not exist in 'train' (the script itself)"),
        ("train:batches", "loader='train:batches': it was not called in the first steps"),
    ],
)
def test_a_named_loader_that_gives_no_batch_fails(tmp_path: Path, loader: str, said: str) -> None:
    failure = known(launched(tmp_path / "wrong", loader=loader).failure)
    assert (failure.kind, failure.message.startswith(said)) == ("mismatch", True), failure


@pytest.mark.parametrize("name", ["batches", "train:", ":batches", "train.batches", "a b:c", "train:a:b"])
def test_a_loader_is_named_by_module_and_name(name: str) -> None:
    with pytest.raises(
        CaseError,
        match=f"^Script: loader: '{name}' is not of the form module:name",
    ):
        Script(path="train.py", loader=name)


def test_a_loader_is_not_named_by_its_file() -> None:
    with pytest.raises(CaseError) as error:
        Script(path="train.py", loader="train.py:get")
    assert str(error.value) == (
        "Script: loader: 'train.py:get' names a file, not a module. Leave out '.py': 'train:get'"
    )


def test_naming_a_loader_keeps_the_case_id() -> None:
    """The training is the same, so the case's baselines stay valid."""
    named = Script(path="train.py", loader="train:batches")
    assert named.slug() == Script(path="train.py").slug()
