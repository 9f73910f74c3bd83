from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from perfsuite import LoRA, Model
from perfsuite.case.catalog import MODELS, gpt2, llama
from perfsuite.frameworks.common.model import build_model, transformers_config, transformers_model
from perfsuite.worker.counting.flops import count, count_known, notes
from tests.frameworks.common.test_model import TINY as TINY_CASE
from tests.samples import known, make_case

TINY = {"layers": 2, "heads": 4, "hidden": 64, "mlp": 96, "vocab": 101}


def by_torch(built: Any, sequences: int, sequence_length: int) -> dict[str, int]:
    """Return the FLOPs that torch counts in a forward and a backward, by operator."""
    tokens = torch.arange(sequences * sequence_length).view(sequences, sequence_length)
    with FlopCounterMode(display=False) as counter:
        built(input_ids=tokens, labels=tokens).loss.backward()
    return {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}


def parameters_in(built: Any) -> int:
    return sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize(
    "model",
    [
        MODELS["llama-tiny"],
        MODELS["gpt2-tiny"],
        llama("all-heads", kv_heads=4, **TINY),
        llama("grouped-query", kv_heads=1, **TINY),
        llama("tied-embedding", kv_heads=2, **TINY, tie_word_embeddings=True),
        llama("wide-heads", kv_heads=2, **TINY, head_dim=32),
        gpt2("untied-gpt2", layers=3, heads=2, hidden=32, vocab_size=97, tie_word_embeddings=False),
    ],
    ids=lambda model: model.name,
)
@pytest.mark.parametrize(("sequences", "sequence_length"), [(1, 8), (3, 16)])
def test_the_formula_is_what_torch_counts(model: Model, sequences: int, sequence_length: int) -> None:
    """Forward and backward count attention in full: eager attention multiplies the masked half as well."""
    built = transformers_model(transformers_config(model), attention="eager")
    counted = count(model, sequence_length)
    seen = sum(by_torch(built, sequences, sequence_length).values())
    assert seen == counted.per_token * sequences * sequence_length
    assert counted.parameters == parameters_in(built)


def test_mamba_counts_include_the_small_scan() -> None:
    """Linear layers are counted exactly.

    The product of the scan, with states of 16, is left out. In a tiny model, this is 4.4%.

    Convolutions are ignored, because torch counts the backward of a depthwise convolution like that of a full
    one.
    """
    model = MODELS["mamba-tiny"]
    by_op = by_torch(transformers_model(transformers_config(model), attention="eager"), 3, 16)
    counted = count(model, 16).per_token * 3 * 16
    assert by_op["aten.mm"] == counted
    assert by_op["aten.bmm"] == 6 * 2 * (2 * 64) * 16 * 3 * 16
    assert by_op["aten.bmm"] / counted == pytest.approx(0.044, abs=0.001)
    scan, convolution = (6 * 56 * (2 * 2048) * size for size in (16, 4))
    per_token = count(MODELS["mamba-1.6b"], 4096).per_token
    assert (scan + convolution) / per_token == pytest.approx(0.003, abs=2e-4)


@pytest.mark.parametrize(
    ("fields", "is_known"),
    [
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, False),
        ({"model_type": "gemma2", "sliding_window": 32}, False),
        ({"model_type": "gemma2", "sliding_window": 64}, True),
        ({"model_type": "mistral", "sliding_window": 32}, False),
        ({"model_type": "mistral", "sliding_window": None}, True),
        ({"model_type": "gpt_neo", "window_size": 32}, False),
    ],
)
def test_formula_is_for_full_attention_only(fields: dict[str, Any], is_known: bool) -> None:
    case = make_case(model=Model(name="x", config=fields), sequence_length=64)
    why = "MFU is unknown: palm-1 assumes that all layers attend to all tokens, but some layers of x do not"
    assert notes(case) == (() if is_known else (why,))


EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 24},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 48,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 24,
        "v_head_dim": 16,
    },
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_formula_counts_the_experts_of_a_token(kind: str) -> None:
    """torch's count is the same, no matter which experts the router chooses."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 101}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4 if kind == "deepseek_v3" else 2}
    model = Model(name="x", config={"model_type": kind, **sizes, **heads, **ids, **EXPERTS[kind]})
    counted = known(count_known(make_case(model=model, sequence_length=16)))
    config = transformers_config(model)
    config._experts_implementation = "eager"  # torch does not count grouped products
    built = transformers_model(config, attention="eager")
    assert sum(by_torch(built, 3, 16).values()) == counted.per_token * 3 * 16


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "llama", "hidden_sise": 5}, "x: LlamaConfig has no hidden_sise. Correct the spell"),
        ({"model_type": "gemma3"}, "x is more than a language model"),
        ({"model_type": "dbrx"}, "the configuration of x does not say how many experts a token passes"),
    ],
)
def test_unfit_configuration_costs_only_the_mfu(config: dict[str, Any], why: str) -> None:
    case = make_case(model=Model(name="x", config=config))
    assert count_known(case) is None
    (note,) = notes(case)
    assert note.startswith(f"MFU is unknown: {why}")


@pytest.mark.parametrize(
    "lora", [LoRA(rank=4, alpha=8), LoRA(rank=3, alpha=8, targets=("q_proj", "k_proj", "v_proj"))]
)
def test_frozen_weights_and_adapters_match_torch(lora: LoRA) -> None:
    """The counts agree exactly except for the gradient of the first block's input, which is not needed."""
    case = TINY_CASE.replace(model="llama-tiny", lora=lora, sequence_length=16, attention="eager")
    built: Any = build_model(case, torch.device("cpu"))
    counted = count(case.model, 16, lora)
    first = [getattr(built.model.layers[0].self_attn, f"{name}_proj") for name in "qkv"]
    unneeded = sum(2 * (q.base_layer.weight.numel() + q.lora_A.default.weight.numel()) for q in first)
    assert sum(by_torch(built, 2, 16).values()) == (counted.per_token - unneeded) * 2 * 16
    assert counted.trained_parameters == sum(p.numel() for p in built.parameters() if p.requires_grad)
    assert unneeded / counted.per_token < 0.02
    assert counted.parameters == parameters_in(built)


def test_script_freezing_removes_gradient_flops() -> None:
    """The formula must not change: stored baselines refuse another formula."""
    full = count(MODELS["llama-tiny"], 32)
    half = count(MODELS["llama-tiny"], 32, frozen_share=0.5)
    assert (full.formula, full.per_token, full.trained_parameters) == ("palm-1", 5_308_416, None)
    assert half.per_token == full.per_token - 2 * full.matmul_parameters / 2
    assert half.trained_parameters == full.matmul_parameters / 2
    assert count(MODELS["llama-3.1-8b"], 4096).per_token == 51_470_401_536
