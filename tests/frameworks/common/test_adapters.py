import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from perfsuite.case.case import Case, LoRA
from perfsuite.case.model import Model
from perfsuite.errors import MismatchError
from perfsuite.frameworks.common import adapters, finetuning
from perfsuite.worker.observation.second_step import layers as blocks_of
from tests.frameworks.common.test_model import TINY

NAMED = TINY.replace(model=Model.named("unet"))
"""A case that has only the name of its model."""
SELF_ATTENTION = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(4, 4) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(4, 4), nn.Dropout(0.0)])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn1 = Attention()
        self.attn2 = Attention()
        self.ff = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class UNet(nn.Module):
    """A model with names like those in diffusers: the output layer of attention is the first of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 4)
        self.conv_in = nn.Conv2d(1, 4, 1)
        self.down_blocks = nn.ModuleList([Block(), Block(), Block()])
        self.mid_block = Block()
        self.head = nn.Linear(4, 2)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def adapted(**config: Any) -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    return inject_adapter_in_model(LoraConfig(**{"r": 4, "lora_alpha": 8, **config}), UNet())


def difference(case: Case, model: nn.Module) -> str | None:
    """Return the first setting in which adapters differ from the case, or None if there is none."""
    observed = finetuning.observed(model)
    asked = finetuning.expected(case, model, blocks_of(model), observed.get("lora"))
    return next((key for key, value in asked.items() if value not in (None, observed.get(key))), None)


PEFT_CONFIGS: dict[str, dict[str, Any]] = {
    "diffusers' own": {"target_modules": ["to_k", "to_q", "to_v", "to_out.0"]},
    "with a dot": {"target_modules": ["attn1.to_q"]},
    "a regular expression": {"target_modules": r"down_blocks\.\d\.attn2\.to_[qk]"},
    "all linear": {"target_modules": "all-linear"},
    "one list of two": {"target_modules": ["ff.0"]},
    "some blocks": {
        "target_modules": ["to_q", "to_v"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "down_blocks",
    },
    "all but some": {"target_modules": ["to_q", "to_v"], "exclude_modules": ["attn2.to_q"]},
    "not only linear": {"target_modules": ["conv_in", "embedding", "to_q"]},
    "a layer in full": {"target_modules": ["to_q"], "modules_to_save": ["head"]},
    "ranks by name": {"target_modules": ["to_q", "to_out.0"], "rank_pattern": {"attn2.to_q": 16}},
    "alphas by name": {
        "target_modules": ["to_q", "to_v"],
        "alpha_pattern": {r"down_blocks\.0\..*": 3, "mid_block.attn1.to_v": 5},
    },
}


@pytest.mark.parametrize("name", PEFT_CONFIGS)
@pytest.mark.parametrize("case", [NAMED, TINY], ids=["named", "configured"])
def test_the_suggested_adapters_pass(name: str, case: Case) -> None:
    model = adapted(**PEFT_CONFIGS[name])
    observed = finetuning.observed(model)
    with pytest.raises(MismatchError) as caught:
        finetuning.check_asked(case, model, blocks_of(model), observed)
    said = str(caught.value)
    code = said.partition("set lora=")[2].removesuffix(" in the case")
    suggested = case.replace(lora=eval(code, {"LoRA": LoRA}))
    assert difference(suggested, model) is None
    finetuning.check_asked(suggested, model, blocks_of(model), observed)
    assert Case.model_validate_json(suggested.model_dump_json()) == suggested


@pytest.mark.parametrize("name", PEFT_CONFIGS)
def test_other_adapters_differ_from_the_suggestion(name: str) -> None:
    """No two of these peft configurations make the same adapters."""
    model = adapted(**PEFT_CONFIGS[name])
    layers = adapters.adaptable(model)
    lora = eval(adapters.as_code(layers, blocks_of(model)), {"LoRA": LoRA})
    for other in PEFT_CONFIGS.keys() - {name, "a layer in full"}:
        assert difference(TINY.replace(lora=lora), adapted(**PEFT_CONFIGS[other])) is not None, other


def test_a_layer_in_a_list_is_named_with_the_list() -> None:
    model = adapted(target_modules=["to_q", "to_out.0"])
    assert finetuning.observed(model)["lora"] == "rank 4, alpha 8, on to_out.0 to_q"


@pytest.mark.parametrize(
    ("targets", "differs"),
    [
        (("to_k", "to_q", "to_v", "to_out.0"), None),
        (("attn1.to_q", "attn2.to_q", "to_k", "to_v", "to_out.0"), None),
        (r".*\.to_(q|k|v|out\.0)", None),
        (("to_k", "to_q", "to_v"), "lora"),
        # peft would match `ff.0`, too, which has no adapter.
        (("to_k", "to_q", "to_v", "0"), None),
        (("to_k", "to_q", "to_v", "to_out.0", "ff.0"), "lora"),
        (("k", "to_q", "to_v", "to_out.0"), "lora"),
        ("to_q", "lora"),  # a regular expression has to match the whole name
        ("all-linear", "lora"),
        ((), "lora"),
    ],
)
def test_checks_the_layers_of_a_named_model(targets: Any, differs: str | None) -> None:
    model = adapted(target_modules=["to_k", "to_q", "to_v", "to_out.0"])
    assert difference(NAMED.replace(lora=LoRA(rank=4, alpha=8, targets=targets)), model) == differs


@pytest.mark.parametrize("lora", [LoRA(rank=8, alpha=8), LoRA(rank=4, alpha=4)])
def test_checks_rank_and_alpha_of_a_named_model(lora: LoRA) -> None:
    model = adapted(target_modules=["to_q"])
    assert difference(NAMED.replace(lora=lora.replace(targets=("to_q",))), model) == "lora"


def test_named_models_layer_count_is_unknown() -> None:
    model = adapted(target_modules=["to_q"], layers_to_transform=[0], layers_pattern="down_blocks")
    lora = LoRA(rank=4, alpha=8, targets=("to_q",))
    assert difference(NAMED.replace(lora=lora), model) is None
    assert difference(TINY.replace(lora=lora), model) == "adapters"


def test_names_requested_adapters_briefly() -> None:
    """If the adapters that ran are reported with whole names, the suggestion has whole names, too."""
    model = adapted(target_modules=["to_q"], layers_to_transform=[0], layers_pattern="down_blocks")
    expected = partial(finetuning.expected, model=model, blocks=blocks_of(model))
    ran = finetuning.observed(model)["lora"]
    assert ran.endswith(" on down_blocks.0.attn1.to_q down_blocks.0.attn2.to_q")
    all_in_blocks = expected(TINY.replace(lora=LoRA(rank=4, alpha=8)), lora_observed=ran)
    assert all_in_blocks["lora"] == "rank 4, alpha 8, on ff.0 ff.2 to_k to_out.0 to_q to_v"
    others = LoRA(rank=4, alpha=8, targets=r"down_blocks\.1\..*to_q")
    ran = "rank 4, alpha 8, on to_q"
    asked = expected(TINY.replace(lora=others), lora_observed=ran)["lora"]
    assert asked == "rank 4, alpha 8, on down_blocks.1.attn1.to_q down_blocks.1.attn2.to_q"


def test_names_begin_where_peft_began() -> None:
    """The names of wrappers never appear in a script's regular expression."""
    wrapped = nn.ModuleDict({"_fsdp_wrapped_module": adapted(target_modules=["to_q"])})
    outer = nn.ModuleDict({"module": wrapped, "critic": nn.Linear(4, 4).requires_grad_(False)})
    lora = LoRA(rank=4, alpha=8, targets=r"(down_blocks\.\d|mid_block)\.attn\d\.to_q")
    assert difference(TINY.replace(lora=lora), outer) is None


@pytest.mark.parametrize(
    ("targets", "name"),
    [
        *itertools.product(
            [("to_q",), ("attn1.to_q", "0"), ("o_q",), ("a.attn1.to_q",), ".*to_q", "to_q", r"a\..*\.0"],
            ["to_q", "a.to_q", "a.attn1.to_q", "a.0", "0", "10", "a.b.0", "to_q.b", "attn1_to_q"],
        )
    ],
)
def test_targets_match_as_in_peft(targets: Any, name: str) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    config = LoraConfig(target_modules=targets if isinstance(targets, str) else list(targets))
    matched = bool(check_target_module_exists(config, name))
    assert LoRA(rank=1, alpha=1, targets=targets).selects(name) == matched


@pytest.mark.parametrize("name", ["to_q", "attn1.to_q", "a.attn1.to_q", "b.attn1.to_q", "a.attn2.to_v"])
def test_patterns_match_as_in_peft(name: str) -> None:
    from peft.utils.other import get_pattern_key

    pattern = {"attn1.to_q": 2, r"a\..*": 3, "to_v": 5}
    lora = LoRA(rank=1, alpha=7, rank_pattern=pattern, alpha_pattern={"to_q": 11})
    by_peft = pattern.get(get_pattern_key(sorted(pattern), name), 1)
    assert lora.of(name) == (by_peft, 11 if name.endswith("to_q") else 7)
