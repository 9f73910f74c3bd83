import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from perfsuite import Case, Script
from perfsuite.errors import MismatchError
from perfsuite.worker import deepspeed
from perfsuite.worker.observe import owner, wrapping
from tests.frameworks.test_script import TORCHRUN, case_of, measured, script

NO_COMPILER = """
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would build, to talk on a CPU
"""
BY_HAND = """import sys
import torch, deepspeed

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.head = torch.nn.Linear(16, 64)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

torch.manual_seed(0)
model = Net()
groups = [
    {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
]
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": int(sys.argv[1])},
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.AdamW(groups, lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
torch.manual_seed(1 + engine.global_rank)
while True:
    loss = engine(torch.randint(64, (4, 16)))
    engine.backward(loss)
    engine.step()
"""
PREPARED = """
import sys
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
plugin = DeepSpeedPlugin(hf_ds_config=config)
accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = torch.utils.data.DataLoader(torch.arange(400 * 16).view(400, 16) % 64, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
while True:
    for tokens in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
"""
TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2,
    max_steps=100, learning_rate=1e-2, report_to=[], save_strategy="no",
    deepspeed={
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    },
)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
tokens = [{"input_ids": row, "labels": row} for row in torch.arange(800 * 16).view(800, 16) % 64]
Trainer(model=model, args=arguments, train_dataset=tokens).train()
"""


def engine_case(framework: Script) -> Case:
    return case_of(framework.replace(env={"DS_ACCELERATOR": "cpu"}), gradient_accumulation=2)


# --- launched ---------------------------------------------------------------------------------------------


@pytest.mark.launch
@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_the_engine_is_a_step(tmp_path: Path, stage: int) -> None:
    """Of two micro-batches, with two groups of parameters, each stepped apart."""
    train = script(tmp_path, NO_COMPILER + BY_HAND)
    result = measured(engine_case(Script(path=train, arguments=(str(stage),), cwd=str(tmp_path))), tmp_path)
    assert result.observed is not None
    settings = result.observed.settings
    assert settings["wrapper"] == "DeepSpeedEngine"
    assert settings["sharding"] == (f"DeepSpeed ZeRO-{stage}" if stage else "none")
    assert settings["optimizer"] == "AdamW"
    assert settings["parameters_changed"] == "yes"
    assert result.observed.environment["deepspeed"]
    assert len(result.step_s) == len(result.loss) == 12
    assert 3 < result.loss[0] < 6, "a mean over the micro-batches"
    assert result.loss[-1] < result.loss[0]


@pytest.mark.launch
@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize(("text", "stage"), [(PREPARED, 2), (TRAINER, 3)], ids=["accelerate", "trainer"])
def test_the_engine_may_be_somebody_elses(tmp_path: Path, text: str, stage: int) -> None:
    command = (*TORCHRUN, script(tmp_path, NO_COMPILER + text))
    result = measured(engine_case(Script(command=command, cwd=str(tmp_path))), tmp_path)
    assert result.observed is not None
    assert result.observed.settings["wrapper"] == "DeepSpeedEngine"
    assert result.observed.settings["sharding"] == f"DeepSpeed ZeRO-{stage}"
    assert len(result.step_s) == len(result.loss) == 12


# --- with a stand-in --------------------------------------------------------------------------------------

STAND_IN = """
class ZeRO:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        optimizer.step()  # to make its state

    def step(self):
        for group in range(2):
            self.optimizer.step()

class DeepSpeedEngine(Module):
    def __init__(self, module, optimizer, stage):
        super().__init__()
        self.module = module
        self.optimizer = ZeRO(optimizer)
        self.stage = stage
        self.norm = None

    def get_global_grad_norm(self):
        return self.norm

    def zero_optimization_stage(self):
        return self.stage

    def step(self):
        self._take_model_step(None)

    def _take_model_step(self, lr_kwargs):
        self.optimizer.step()

def elsewhere(optimizer):
    optimizer.step()
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("deepspeed.runtime.engine")
    module.Module = torch.nn.Module
    exec(compile(STAND_IN, "engine.py", "exec"), vars(module))
    for name in ("deepspeed", "deepspeed.runtime"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", module)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "9.9")
    return module


@pytest.fixture
def flat() -> tuple[torch.optim.Optimizer, list[str]]:
    """An optimizer of a partition that no module owns, and what the clock is told."""
    told: list[str] = []
    optimizer = torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1)

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        around = (lambda _: told.append("before"), lambda _: told.append("after"))
        if not deepspeed.takes(optimizer, *around):
            told.append("alone")

    optimizer.register_step_pre_hook(hook)
    optimizer.register_step_post_hook(hook)
    return optimizer, told


def test_the_clock_is_told_of_each_step_of_the_engine_from_the_second_on(stand_in: Any, flat: Any) -> None:
    optimizer, told = flat
    engine = stand_in.DeepSpeedEngine(torch.nn.Linear(2, 2), optimizer, 3)
    assert told == [], "the state is made, nothing is trained"
    for steps in range(3):
        engine.step()
        assert told == ["before", "after"] * steps
    optimizer.step()
    assert told[4:] == ["alone", "alone"], "a step beside DeepSpeed is one of its own"
    assert owner(optimizer) is engine, "it is what trains"
    assert wrapping(engine) == {
        "wrapper": "DeepSpeedEngine",
        "sharding": "DeepSpeed ZeRO-3",
        "wrapped_modules": "1",
    }


def test_the_engine_tells_the_norm_of_gradients_that_it_keeps_to_itself(stand_in: Any, flat: Any) -> None:
    optimizer, _ = flat
    assert deepspeed.gradient_norm(optimizer) is None, "in no engine"
    engine = stand_in.DeepSpeedEngine(torch.nn.Linear(2, 2), optimizer, 2)
    assert deepspeed.gradient_norm(optimizer) is None, "none yet"
    engine.norm = torch.tensor(1.5)
    assert deepspeed.gradient_norm(optimizer) == 1.5


def test_a_deepspeed_that_steps_elsewhere_is_refused_by_name(stand_in: Any, flat: Any) -> None:
    optimizer, _ = flat
    with pytest.raises(
        MismatchError,
        match=r"^DeepSpeed 9\.9 steps SGD outside of DeepSpeedEngine\._take_model_step, by elsewhere: ",
    ):
        stand_in.elsewhere(optimizer)
