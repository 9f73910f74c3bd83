from typing import Any

import pytest
import torch

from perfsuite import DDP, FSDP2, Accelerate, Case, Trainer
from perfsuite.case.catalog import llama
from perfsuite.errors import MismatchError
from perfsuite.frameworks.base import framework_of
from perfsuite.frameworks.common import float8
from perfsuite.frameworks.common.model import build_model
from tests.fake_group import CPU, fake_group
from tests.frameworks.common.test_model import TINY
from tests.frameworks.test_base import remove
from tests.samples import known, make_machine

BY_ACCELERATE = TINY.replace(
    framework=Accelerate(strategy="fsdp2", float8="tensorwise"), precision="bf16-mixed"
)
TENSORWISE = TINY.replace(framework=DDP(float8="tensorwise"))


@pytest.mark.parametrize(
    ("framework", "seen"),
    [
        (Accelerate(strategy="fsdp2", float8="tensorwise"), "27 Float8Linear, gathered in float8"),
        (Accelerate(strategy="fsdp2", float8="rowwise"), "27 Float8Linear"),
        (Accelerate(strategy="ddp", float8="tensorwise"), "27 Float8Linear"),
        (Trainer(fsdp="full_shard auto_wrap", float8="tensorwise"), "27 Float8Linear, gathered in float8"),
        (Trainer(float8="tensorwise"), "27 Float8Linear"),
        (Accelerate(strategy="fsdp2"), None),
    ],
)
def test_accelerate_skips_first_layer_and_head(framework: Any, seen: str | None) -> None:
    case = TINY.replace(framework=framework)
    assert framework_of(case).expected(case).get("low_precision_modules") == seen


@pytest.mark.parametrize("framework", [DDP(float8="tensorwise"), FSDP2(float8="rowwise_with_gw_hp")])
def test_observes_block_layers_but_the_head(framework: Any) -> None:
    case = TINY.replace(framework=framework)
    with fake_group(0, 2) as ranks:
        model = framework_of(case).build(case, ranks, None).model  # type: ignore[arg-type]
    assert float8.observed(model) == float8.expected(framework.float8, case)
    assert float8.observed(model) == {"low_precision_modules": "28 Float8Linear"}
    assert framework_of(case).expected(case).items() >= float8.observed(model).items()


def test_without_a_recipe_nothing_is_converted() -> None:
    model = build_model(TINY, CPU)
    float8.convert(None, model, CPU)
    assert float8.observed(model) == float8.expected(None, TINY) == {}


def test_names_sizes_that_float8_refuses() -> None:
    odd = TINY.replace(model=llama("odd", layers=1, heads=4, kv_heads=2, hidden=32, mlp=40, vocab=64))
    with pytest.raises(MismatchError, match=r"the weight of mlp.gate_proj is 40 x 32; give multiples of 16"):
        float8.convert("rowwise", build_model(odd, CPU), CPU)


@pytest.mark.parametrize("case", [TENSORWISE, BY_ACCELERATE])
def test_without_torchao_the_package_is_named(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    remove(monkeypatch, "torchao")
    reason = "it needs the package torchao, which is not installed: pip install 'perfsuite[torchao]'"
    assert framework_of(case).unsupported(case, make_machine()) == reason


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("recipe", "per_weight"), [("tensorwise", 6), ("rowwise_with_gw_hp", 4)])
def test_separates_float8_flops_only_on_a_gpu(recipe: Any, per_weight: int, device: str) -> None:
    from perfsuite.worker.counting.flops import count

    flops = count(TINY.model, TINY.sample_length)
    model: Any = build_model(TINY, CPU)
    float8.convert(recipe, model, torch.device(device))
    split = known(float8.with_float8(flops, model))
    of_blocks = flops.matmul_parameters - model.lm_head.weight.numel()
    assert split.per_token_float8 == (None if device == "cpu" else per_weight * of_blocks)
    assert float8.with_float8(None, model) is None


def test_counts_float8_flops_of_linear_layers_only() -> None:
    class Float8GroupedExperts: ...

    assert float8.flops_in_float8([Float8GroupedExperts()]) is None, "the formula knows only linear layers"
    assert float8.flops_in_float8([torch.nn.Linear(1, 1)]) == 0
