import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from perfsuite import Script
from perfsuite.errors import MismatchError
from perfsuite.worker.observation import engines, replicas
from perfsuite.worker.observation.observe import owner, wrapping
from tests.dry.runs import failure_of
from tests.dry.test_script import case_of as dry_case_of
from tests.frameworks.test_base import observed
from tests.frameworks.test_script import case_of, measured, script

TWO_GROUPS = """
import sys
import deepspeed, torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which it would build, to talk on a CPU
torch.manual_seed(0)
layers = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 64)
model = torch.nn.Sequential(*layers)
groups = [
    {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-2)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": int(sys.argv[1])},
    "zero_allow_untested_optimizer": True,
}
rows = torch.randint(64, (800, 16))

def loss_of(model, tokens):
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
"""
BY_HAND = """
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
while True:
    for tokens in rows.split(4)[engine.global_rank :: 2]:
        engine.backward(loss_of(engine, tokens))
        engine.step()
"""
BY_ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

plugin = DeepSpeedPlugin(hf_ds_config={"train_batch_size": 16, **config})
accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
loader = torch.utils.data.DataLoader(rows, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
while True:
    for tokens in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, tokens))
            optimizer.step()
            optimizer.zero_grad()
"""
BY_THE_TRAINER = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2, deepspeed=config,
    max_steps=100, learning_rate=1e-2, report_to=[], save_strategy="no",
)
data = [{"input_ids": row, "labels": row} for row in torch.arange(800 * 16).view(800, 16) % 64]
Trainer(model=model, args=arguments, train_dataset=data).train()  # it makes two groups, too
"""


@pytest.mark.launch
@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize(
    ("text", "stage"),
    [
        pytest.param(BY_HAND, 0, marks=pytest.mark.nightly),
        pytest.param(BY_ACCELERATE, 1, marks=pytest.mark.nightly),
        (BY_HAND, 2),
        pytest.param(BY_THE_TRAINER, 3, marks=pytest.mark.nightly),
    ],
    ids=["by hand, 0", "by accelerate, 1", "by hand, 2", "by the Trainer, 3"],
)
def test_engine_step_counts_whoever_makes_it(tmp_path: Path, text: str, stage: int) -> None:
    """The step has two micro-batches. The optimizer steps two groups of parameters separately."""
    framework = Script(
        path=script(tmp_path, TWO_GROUPS + text),
        arguments=(str(stage),),
        cwd=str(tmp_path),
        env={"DS_ACCELERATOR": "cpu"},
    )
    result = measured(case_of(framework, gradient_accumulation=2), tmp_path)
    expected = {
        "wrapper": "DeepSpeedEngine",
        "sharding": f"DeepSpeed ZeRO-{stage}" if stage else "none",
        "parameters_changed": "yes",
    }
    settings = observed(result).settings
    assert {name: settings[name] for name in expected} == expected
    assert settings["optimizer"].startswith("AdamW")
    assert observed(result).environment["deepspeed"]
    assert len(result.step_s) == len(result.loss) == 12
    assert 3 < result.loss[0] < 6, "the loss is a mean over the micro-batches"
    assert result.loss[-1] < result.loss[0]


@pytest.mark.launch
def test_refuses_deepspeed_whose_steps_use_values(tmp_path: Path) -> None:
    package = tmp_path / "deepspeed" / "runtime"
    package.mkdir(parents=True)
    (package / "engine.py").write_text("class DeepSpeedEngine: ...")
    text = "from deepspeed.runtime.engine import DeepSpeedEngine\nengine = DeepSpeedEngine()\n"
    failure = failure_of(dry_case_of(tmp_path, text), tmp_path / "dry")
    assert failure.kind == "not_dry"
    assert "DeepSpeed's decisions depend on gradients" in failure.message
    assert "ended after 0 of 4 optimizer steps" in failure.message


STAND_IN = """
class ZeRO:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        optimizer.step()  # to make its state

    def step(self):
        for group in range(2):
            self.optimizer.step()

class DeepSpeedEngine(Module):
    def __init__(self, optimizer, stage):
        super().__init__()
        self.optimizer = ZeRO(optimizer)
        self.zero_optimization_stage = lambda: stage
        self.get_global_grad_norm = lambda: None

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
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "9.9")
    engines.watch()
    return module


@pytest.fixture
def flat() -> torch.optim.Optimizer:
    """Return an optimizer of a partition that no module owns."""
    return torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1)


def is_part(optimizer: Any, args: Any, kwargs: Any) -> None:
    engines.steps(optimizer, lambda _: None, lambda _: None)


def test_the_engine_of_zeros_optimizer_trains(stand_in: Any, flat: Any) -> None:
    engine = stand_in.DeepSpeedEngine(flat, 3)
    assert owner(flat) is owner(engine.optimizer) is engine
    seen = {"wrapper": "DeepSpeedEngine", "sharding": "DeepSpeed ZeRO-3", "wrapped_modules": "1"}
    assert wrapping(engine) == seen


def test_stage_0_shards_nothing(stand_in: Any, flat: Any) -> None:
    assert wrapping(stand_in.DeepSpeedEngine(flat, 0))["sharding"] == "none"


@pytest.mark.parametrize(("scale", "expected"), [(65536, 65536.0), (None, 1.0)])
def test_reads_the_loss_scale_of_an_engine(stand_in: Any, flat: Any, scale: Any, expected: float) -> None:
    engine = stand_in.DeepSpeedEngine(flat, 2)
    engine.optimizer.loss_scale = scale
    assert engines.loss_scale() == expected


def test_reads_the_gradient_norm_an_engine_keeps(stand_in: Any, flat: Any) -> None:
    engine = stand_in.DeepSpeedEngine(flat, 2)
    assert engines.gradient_norm(flat) is None, "the engine has no norm yet"
    engine.get_global_grad_norm = lambda: torch.tensor(1.5)
    assert engines.gradient_norm(flat) == 1.5


def test_refuses_a_deepspeed_that_steps_elsewhere(stand_in: Any, flat: Any) -> None:
    flat.register_step_pre_hook(is_part)
    said = (
        r"^deepspeed 9\.9 takes a step of SGD outside of DeepSpeedEngine\._take_model_step, in elsewhere, so "
    )
    with pytest.raises(MismatchError, match=said):
        stand_in.elsewhere(flat)


def test_parameters_of_zero_3_are_not_whole(stand_in: Any) -> None:
    model: Any = torch.nn.Linear(4, 4)
    model.weight.ds_tensor = torch.ones(8)  # ZeRO-3 marks its partitions like this
    assert replicas.replicated(model) == {"bias"}
    assert replicas.local(model.weight) is model.weight.ds_tensor
