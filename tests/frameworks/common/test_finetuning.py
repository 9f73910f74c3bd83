import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from perfsuite.case.case import Case, LoRA
from perfsuite.case.model import Model
from perfsuite.errors import MismatchError
from perfsuite.frameworks.common import finetuning
from perfsuite.frameworks.common.model import build_model, build_optimizer
from perfsuite.worker.observation.second_step import layers
from tests.frameworks.common.test_loop import losses, workload
from tests.frameworks.common.test_model import CPU, TINY

ADAPTED = TINY.replace(lora=LoRA(rank=4, alpha=8), learning_rate=1e-2)
"""A CPU can build this case even if it is quantised. Only the driver requires a GPU for quantised cases."""
ADAPTERS_ONLY = {"trained": "adapters only", "quantised_layers": "0"}


def test_adapters_start_as_zero_on_the_model() -> None:
    assert losses(ADAPTED, 1) == losses(TINY, 1)


@pytest.mark.parametrize(
    ("model", "targets", "adapters"),
    [
        ("llama-tiny", (), 4 * 7),
        ("llama-tiny", ("q_proj", "v_proj"), 4 * 2),
        ("gpt2-tiny", (), 2 * 4),
        ("gpt2-tiny", ("c_attn",), 2),
    ],
)
def test_only_the_adapters_are_trained(model: str, targets: tuple[str, ...], adapters: int) -> None:
    case = ADAPTED.replace(model=model, lora=LoRA(rank=4, alpha=8, targets=targets))
    built = build_model(case, CPU)
    trained = build_optimizer(case, built).param_groups[0]["params"]
    assert len(trained) == 2 * adapters
    whole = "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
    names = whole if "llama" in model else "c_attn c_fc c_proj"
    lora = f"rank 4, alpha 8, on {' '.join(targets) or names}"
    settings = {**ADAPTERS_ONLY, "adapters": str(adapters), "lora": lora}
    assert finetuning.observed(built) == settings == finetuning.expected(case, built, layers(built))


def test_reports_a_model_that_is_trained_in_full() -> None:
    built = build_model(TINY, CPU)
    assert finetuning.observed(built) == {"trained": "all"}
    assert finetuning.expected(TINY, built, layers(built)) == {}
    finetuning.check_asked(TINY, built, layers(built), finetuning.observed(built))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_trained_layers_belong_to_adapters() -> None:
    """An example is peft's `modules_to_save`, which are stored with the adapter."""
    from peft import LoraConfig, get_peft_model

    built: Any = build_model(TINY, CPU)
    peft: Any = get_peft_model(built, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    assert finetuning.observed(peft)["trained"] == "adapters only"
    peft.model.model.norm.weight.requires_grad_(True)
    assert finetuning.observed(peft)["trained"] == "others", "a layer of the model is trained"


def test_advice_names_parameters_that_are_no_adapters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert finetuning.advice_on_others(model) == (
        "remove lora from the case, because parameters that are not adapters are trained: "
        "0.weight, 0.bias, 1.weight and 1 more"
    )


def test_frozen_share_is_by_multiplied_weights() -> None:
    """The share does not depend on how weights are packed: one byte holds two 4-bit weights."""
    built: Any = build_model(TINY, CPU)
    assert finetuning.frozen_share(built) == 0
    for layer in built.model.layers:
        layer.requires_grad_(False)
    head = built.lm_head.weight.numel()
    whole = sum(m.weight.numel() for m in built.modules() if isinstance(m, torch.nn.Linear))
    assert finetuning.frozen_share(built) == pytest.approx(1 - head / whole)
    packed: Any = build_model(ADAPTED.replace(quantization="4bit"), CPU)
    packed.lm_head.weight.requires_grad_(True)
    assert finetuning.frozen_share(packed) == pytest.approx(1 - head / whole)


@pytest.mark.parametrize(("quantization", "bits"), [("4bit", 4), ("8bit", 8)])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16"])
def test_the_layers_of_the_blocks_are_quantised(quantization: Any, bits: int, precision: Any) -> None:
    flat = Model.from_config({**ADAPTED.model.config, "num_hidden_layers": 1}, name="flat")
    case = ADAPTED.replace(model=flat, quantization=quantization, precision=precision)
    built = workload(case)
    layer = built.model.model.layers[0].mlp.up_proj.base_layer
    stored = layer.weight.numel() * layer.weight.element_size()
    assert stored == layer.in_features * layer.out_features * bits // 8
    assert finetuning.observed(built.model)["quantised_layers"] == f"7 {quantization}"
    assert finetuning.observed(built.model) == finetuning.expected(case, built.model, layers(built.model))
    near = losses(case.replace(quantization="none"))
    trained = [float(loss) for loss in built.run(4)]
    assert trained == pytest.approx(near, abs=0.15)
    if (quantization, precision) == ("4bit", "fp32"):
        assert losses(case) == trained, "each build of the model trains in the same way"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"lora": LoRA(rank=1, alpha=1, targets=("q_proj", "c_attn", "attn.q_proj"))},
            r"^lora: no linear layer is called c_attn, attn\.q_proj; the linear layers are down_proj, ",
        ),
        (
            {"lora": LoRA(rank=1, alpha=1, targets="q_proj")},
            r"^lora: no linear layer is called q_proj; the linear layers are down_proj, gate_proj, k_proj, ",
        ),
        (
            {"model": "gpt2-tiny", "quantization": "8bit"},
            r"^quantization: attn\.c_attn is a Conv1D, not a torch Linear$",
        ),
    ],
)
def test_names_layers_that_the_model_lacks(changes: dict[str, Any], said: str) -> None:
    case: Case = ADAPTED.replace(**changes)
    with pytest.raises(MismatchError, match=said):
        build_model(case, torch.device("cpu"))


# --- adapters that are not peft's -------------------------------------------------------------------------


def layer(**parts: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, part in {"weight": torch.zeros(8, 8), **parts}.items():
        setattr(module, name, torch.nn.Parameter(part) if isinstance(part, torch.Tensor) else part)
    return module


def torchtune(a: torch.Tensor) -> torch.nn.Module:
    lora_a = torch.nn.Linear(8, 4, bias=False)
    lora_b = torch.nn.Linear(4, 8, bias=False)
    lora_a.weight = torch.nn.Parameter(a)
    return layer(lora_a=lora_a, lora_b=lora_b)


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    # litgpt stores LoRA like this, too: the matrices are parameters of a layer, which holds q, k and v
    # together.
    "loralib": lambda: layer(r=4, lora_alpha=8, lora_A=torch.zeros(12, 8), lora_B=torch.zeros(24, 4)),
    "torchtune": lambda: torchtune(torch.zeros(4, 8)),
    "as ZeRO 3 leaves it between steps": lambda: torchtune(torch.zeros(0)),
    "named like a LoRA, and none that anybody knows": lambda: layer(lora_magnitude=torch.zeros(8)),
}


def not_pefts(kind: str) -> torch.nn.Module:
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.ModuleDict({"qkv": LAYERS[kind]()}) for _ in range(2))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return model


@pytest.mark.parametrize("kind", LAYERS)
def test_foreign_adapters_are_observed(kind: str) -> None:
    model = not_pefts(kind)
    settings = finetuning.observed(model)
    assert settings == {**ADAPTERS_ONLY, "lora": f"not peft's, rank {seen_rank(kind)}"}
    finetuning.check_asked(ADAPTED, model, [model], settings)


def seen_rank(kind: str) -> str:
    """Return the rank of these adapters, which only some libraries keep."""
    return "4" if kind in ("loralib", "torchtune") else "not seen"


@pytest.mark.parametrize("rank", [4, 8])
@pytest.mark.parametrize("kind", LAYERS)
def test_foreign_adapters_have_the_rank_asked_for(kind: str, rank: int) -> None:
    """A setting of None allows any value."""
    model = not_pefts(kind)
    settings = finetuning.observed(model)
    case = TINY.replace(lora=LoRA(rank=rank, alpha=8))
    lora = None if seen_rank(kind) == "not seen" else f"not peft's, rank {rank}"
    expected = finetuning.expected(case, model, [model], settings["lora"])
    assert expected == {**ADAPTERS_ONLY, "adapters": None, "lora": lora}


def peft_on_two() -> torch.nn.Module:
    return build_model(ADAPTED.replace(lora=LoRA(rank=4, alpha=8, targets=("q_proj", "v_proj"))), CPU)


@pytest.mark.parametrize(
    ("model", "are", "say"),
    [
        (
            peft_on_two,
            "rank 4, alpha 8, on q_proj v_proj",
            'LoRA(rank=4, alpha=8, targets=("q_proj", "v_proj")) in the case',
        ),
        (
            lambda: not_pefts("loralib"),
            "not peft's, rank 4",
            "LoRA(rank=4, alpha=4) in the case, but replace this alpha with the one that you use",
        ),
        (
            lambda: not_pefts("as ZeRO 3 leaves it between steps"),
            "not peft's, rank not seen",
            "LoRA(rank=16, alpha=32) in the case, but replace both numbers with your own",
        ),
    ],
    ids=["peft", "loralib", "sharded"],
)
def test_refuses_adapters_that_the_case_lacks(
    model: Callable[[], torch.nn.Module], are: str, say: str
) -> None:
    built = model()
    said = f"lora: the case has none, but only adapters are trained ({are}). "
    said += f"The FLOPs depend on them: set lora={say}"
    with pytest.raises(MismatchError, match=f"^{re.escape(said)}$"):
        finetuning.check_asked(TINY, built, layers(built), finetuning.observed(built))
