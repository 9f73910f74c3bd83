"""FLOPs of a training step by a versioned formula. Imports torch only inside functions.

`palm-1`, after Chowdhery et al. 2022 (PaLM), appendix B: per token

    6 N + 12 L H Q S

N: parameters that take part in a matmul: every linear layer and the language-model head, tied to the
embedding or not. The embedding look-up, norms, biases and positions are not in N. L layers, H heads of size Q
(the mean of keys' and values' where they differ, as in DeepSeek's latent attention), S tokens in a sequence.
A multiplication and its addition are two FLOPs; backward costs twice the forward; activation recomputation is
not counted (model FLOPs, not hardware FLOPs); attention is counted in full, not halved for causality. Others
count embeddings, or half the attention, and get another MFU for the same speed.

For a mixture of experts, N includes the router and the experts that a token passes through: the activated
parameters of DeepSeek-V3 (2024).

A Mamba has no attention term. Its scan and its convolution over 4 tokens are not in N: their products would
add 0.3% to `mamba-1.6b` and 6% to `mamba-tiny`.

Frozen weights have no gradient of their own: they count 4 FLOPs per parameter instead of 6. Adapters are
trained weights. Layers before the first adapter need no activation gradient; we count it all the same, which
overcounts by at most one block. Quantised weights count as the weights that they encode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perfsuite.errors import MismatchError
from perfsuite.frameworks.base import missing_package
from perfsuite.results.rank_report import Flops

if TYPE_CHECKING:
    from perfsuite.case.case import Case, LoRA
    from perfsuite.case.model import Model

FORMULA = "palm-1"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The names that configurations of transformers use for the number of experts."""
CHOSEN = ("num_experts_per_tok", "moe_k")  # and for how many of them a token passes through


def count_known(case: Case, *, frozen_share: float = 0.0) -> Flops | None:
    """Return `count` of a case's model, or None if its configuration or sequence length is unknown.

    It is also None where `notes` gives a reason.
    """
    if not case.model.config or case.sequence_length is None or notes(case):
        return None
    return count(case.model, case.sequence_length, case.lora, frozen_share=frozen_share)


def notes(case: Case) -> tuple[str, ...]:
    """Return why FLOPs are unknown although the model is known.

    A script may train without transformers. A configuration may not say how many experts a token passes
    through. Some parts of the model may not see every token. A layer may have no attention, or attend to a
    window. The formula covers none of these. An adapter may be in a layer that the configuration does not
    build.
    """
    why = _unknown(case) if case.model.config else None
    return () if why is None else (f"MFU is unknown: {why}",)


def _unknown(case: Case) -> str | None:
    from perfsuite.frameworks.common.model import transformers_config

    model = case.model
    sequence_length = case.sequence_length or 0
    missing = missing_package("transformers")
    if missing is not None:
        return f"to count the FLOPs of {model.name} {missing}"
    try:
        config = transformers_config(model)
    except MismatchError as error:  # the script has built another model; nothing else needs this one
        return str(error)
    if config.get_text_config() is not config:
        return f"{model.name} is more than a language model, and {FORMULA} counts no other"
    nested = [value for value in vars(config).values() if hasattr(value, "get_text_config")]
    if any(_first(each, EXPERTS) > 1 for each in (config, *nested)) and not _first(config, CHOSEN):
        return f"the configuration of {model.name} does not say how many experts a token passes"
    kinds = set(getattr(config, "layer_types", None) or ("sliding_attention",))
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    if window is None or sequence_length <= window:
        kinds.discard("sliding_attention")
    if getattr(config, "num_attention_heads", 0) and not kinds <= {"full_attention"}:  # a Mamba has no heads
        return f"not all layers of {model.name} attend to all tokens, as {FORMULA} has it"
    if case.lora is not None and not case.framework.promises.builds_model:
        try:
            _built(config, case.lora)
        except MismatchError as error:
            return str(error)
    return None


def count(
    model: Model, sequence_length: int, lora: LoRA | None = None, *, frozen_share: float = 0.0
) -> Flops:
    """Count the FLOPs of a model built on the meta device, which takes no memory at any size.

    `frozen_share` is the observed share of frozen matmul weights, 0 to 1, for a script that trains only some
    of them. With `lora` the adapters determine it.
    """
    from perfsuite.frameworks.common.adapters import is_linear
    from perfsuite.frameworks.common.model import transformers_config

    config = transformers_config(model)
    built = _built(config, lora)
    weights: list[Any] = [module.weight for module in built.modules() if is_linear(module)]
    matmul = sum(weight.numel() for weight in weights) + _active_in_experts(built, config)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    if lora is None:
        trained = round(matmul * (1 - frozen_share))
    heads = getattr(config, "num_attention_heads", 0)
    head_size: float = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    if getattr(config, "kv_lora_rank", None):
        head_size = (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    attention = 12.0 * config.num_hidden_layers * heads * head_size * sequence_length
    return Flops(
        formula=FORMULA,
        per_token=6.0 * matmul - 2.0 * (matmul - trained) + attention,
        parameters=sum(parameter.numel() for parameter in built.parameters()),
        matmul_parameters=matmul,
        trained_parameters=None if trained == matmul else trained,  # adapters consist of matmuls only
    )


def _built(config: Any, lora: LoRA | None) -> Any:
    """Return the model, with its adapters, on the meta device."""
    import torch

    from perfsuite.frameworks.common.finetuning import add_adapters
    from perfsuite.frameworks.common.model import blocks, transformers_model

    with torch.device("meta"):
        built = transformers_model(config, attention="eager")
        if lora is not None:
            add_adapters(lora, built, blocks(built), torch.float32)
    return built


def _active_in_experts(built: Any, config: Any) -> int:
    """Return how many weights of experts and routers, outside of linear layers, a token is multiplied by."""
    experts = _first(config, EXPERTS)
    chosen = _first(config, CHOSEN)
    active = 0
    for module in built.modules():
        kind = type(module).__name__
        own = module.parameters(recurse=False)
        # Transformers 5 keeps all experts of a layer in one tensor, with their number first.
        if kind.endswith("Experts"):
            active += sum(each.numel() for each in own if each.dim() == 3) * chosen // experts
        elif kind.lower().endswith("router") and hasattr(module, "weight"):
            active += module.weight.numel()
    return active


def _first(config: Any, names: tuple[str, ...]) -> int:
    """Return the first of these fields that a configuration sets; 0 if it sets none."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value), 0)
