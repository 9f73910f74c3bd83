"""Test that cases which torchtitan cannot run, and impossible options, are refused before any launch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from perfsuite import Case, Framework, LoRA, TorchTitan
from perfsuite.case.hardware import Machine
from perfsuite.errors import CaseError, MismatchError
from perfsuite.launch.requirements import unsupported
from perfsuite.node.machine import detect
from tests.fake_torch import install_torch
from tests.frameworks.refusals import TAKES, check_refusal, row
from tests.frameworks.test_base import SMALL, remove
from tests.frameworks.torchtitan.samples import LLAMAS, MARKS
from tests.samples import make_case

pytestmark = MARKS


TITAN = TorchTitan()
TITAN_2 = TorchTitan(tensor_parallel=2)
TITAN_6 = TorchTitan(tensor_parallel=6)
ADAPTERS = LoRA(rank=4, alpha=8)
PRECISIONS_OF_TITAN = "'fp32' or 'bf16-mixed' or 'bf16'"
THREE_HEADS: dict[str, Any] = {"num_attention_heads": 3, "hidden_size": 96}
OWN = "torchtitan's llama3"
IN_PARTS = (
    "torchtitan's {} splits a sequence into {} equal parts, but sequence_length={} cannot be split like this"
)
SCALED = {"rope_type": "llama3", "factor": 8.0}
YARN = {"type": "yarn", "factor": 2.0}


def test_an_arms_old_torch_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cases are checked with the torch of this environment, but an arm can have an older torch."""
    install_torch(tmp_path, monkeypatch, version="2.12.0", cuda=None)
    message = r"^torchtitan 0\.3 needs torch 2\.13 or newer, but this is 2\.12\.0,"
    with pytest.raises(MismatchError, match=message):
        TITAN.load(SMALL, torch.device("cpu"))


@pytest.mark.parametrize(
    ("case", "machine", "why"),
    [
        *(row(TITAN, None, model=name) for name in LLAMAS),
        row(TITAN_2, None, head_dim=32, rope_scaling=SCALED),
        row(TITAN, f"{OWN} builds only Llama models, but gpt2-tiny is a gpt2", model="gpt2-tiny"),
        row(TITAN, f"{OWN} builds only Llama models, but mamba-tiny is a mamba", model="mamba-tiny"),
        row(TITAN, f"{OWN} supports only attention_bias=False, but odd has True", attention_bias=True),
        row(TITAN, f"{OWN} supports only hidden_act='silu', but odd has 'gelu'", hidden_act="gelu"),
        row(TITAN, f"{OWN} supports only head_dim=32, but odd has 64", head_dim=64),
        row(TITAN, f"{OWN} supports rope_type default and llama3, but odd has 'yarn'", rope_scaling=YARN),
        row(TITAN_2, "tensor_parallel=2 must divide num_key_value_heads, 1", num_key_value_heads=1),
        row(TITAN_2, "tensor_parallel=2 must divide num_attention_heads, 3", **THREE_HEADS),
        row(TITAN, TAKES.format("torchtitan", PRECISIONS_OF_TITAN, "fp16-mixed"), precision="fp16-mixed"),
        row(TITAN, "torchtitan does not support lora...", lora=ADAPTERS),
        row(TITAN, "torchtitan supports attention 'sdpa', but the case asks for 'eager'", attention="eager"),
        row(TITAN, IN_PARTS.format("loss in chunks", 8, 20), sequence_length=20),
        row(TITAN_6, IN_PARTS.format("tensor_parallel", 6, 64), ranks=6),
        row(
            TITAN_2.replace(data_parallel_replicate=2),
            "tensor_parallel=2 times data_parallel_replicate=2 must divide the number of processes, 2",
        ),
    ],
)
def test_refuses_an_impossible_case_beforehand(case: Case, machine: Machine, why: str | None) -> None:
    check_refusal(case, machine, why)


TOGETHER = "give module and config together"
LLAMA = {"module": "llama3", "config": "llama3_8b"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"module": "llama3"}, TOGETHER),
        ({"overrides": ("--training.steps=3",)}, TOGETHER),
        ({**LLAMA, "tensor_parallel": 2}, "config llama3_8b sets all options: remove tensor_parallel2"),
        ({"module": "llama3", "config": "llama3-8b"}, "config: String should match pattern"),
        ({**LLAMA, "overrides": "--a.b=1"}, "overrides: Input should be a valid tuple"),
    ],
)
def test_bad_options_list_what_is_allowed(options: dict[str, Any], said: str) -> None:
    with pytest.raises(CaseError) as caught:
        make_case(framework={"name": "torchtitan", **options})
    assert said in str(caught.value)
    with pytest.raises(CaseError) as caught:
        TorchTitan(**options)
    assert said in str(caught.value)


BY_EP = ("--parallelism.expert_parallel_degree=8",)
REGISTERED = TorchTitan(module="deepseek_v3", config="deepseek_v3_16b")
GRAPHS = REGISTERED.replace(module="my.models", overrides=BY_EP, disable_cuda_graphs=False)


@pytest.mark.parametrize(
    ("framework", "slug"),
    [
        (TorchTitan(tensor_parallel=2), "torchtitan-tensor_parallel2"),
        (REGISTERED, "torchtitan-deepseek_v3_16b"),
        (GRAPHS, f"torchtitan-my.models-deepseek_v3_16b-{BY_EP[0][2:]}-no_disable_cuda_graphs"),
    ],
)
def test_the_slug_names_the_options(framework: Framework, slug: str) -> None:
    assert framework.slug() == slug


def test_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    remove(monkeypatch, "torchtitan")
    why = "it needs the package torchtitan, which is not installed: pip install 'perfsuite[torchtitan]'"
    assert unsupported(SMALL.replace(framework=TorchTitan()), detect()) == why
