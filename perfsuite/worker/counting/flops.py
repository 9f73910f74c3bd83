"""Count the FLOPs of a training step with a versioned formula. Imports torch only inside functions.

The formula `palm-1` follows Chowdhery et al. 2022 (PaLM), appendix B. The FLOPs per token are

    6 N + 12 L H Q S

- N is the number of parameters that take part in a matmul. These are the weights of all linear layers and of
  the language-model head, even if the head is tied to the embedding. The embedding look-up, norms, biases and
  positions are not in N.
- L is the number of layers, and H the number of heads per layer.
- Q is the size of a head. If keys and values have different sizes, as in DeepSeek's latent attention, Q is
  the mean of the two.
- S is the number of tokens in a sequence.

A multiplication and its addition are two FLOPs. Backward costs twice as much as forward. Recomputed
activations are not counted (model FLOPs, not hardware FLOPs). Attention is counted in full, although a causal
mask halves it. Other formulas count embeddings, or only half of the attention. For the same speed, they give
a different MFU.

For a mixture of experts, N includes the router and the experts that a token passes through. DeepSeek-V3
(2024) counts its activated parameters in the same way.

For a Mamba, there is no attention term. The scan and the convolution over 4 tokens are not in N. They would
add 0.3% to the FLOPs of `mamba-1.6b` and 6% to those of `mamba-tiny`.

A frozen weight has no gradient, so it counts 4 FLOPs per parameter instead of 6. Adapters count as trained
weights. Layers before the first adapter need no activation gradient, but the formula includes it. The FLOPs
are therefore too high, by at most the FLOPs of one block. Quantised weights count as the weights that they
encode.
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
"""Fields of transformers' configurations that give the number of experts."""
CHOSEN = ("num_experts_per_tok", "moe_k")  # fields that give how many experts a token passes through


def count_known(case: Case, *, frozen_share: float = 0.0) -> Flops | None:
    """Return the FLOPs of a case's model, or None if they are unknown.

    They are unknown without a configuration or a sequence length, or if `notes` gives another reason.
    """
    if not case.model.config or case.sequence_length is None or notes(case):
        return None
    return count(case.model, case.sequence_length, case.lora, frozen_share=frozen_share)


def notes(case: Case) -> tuple[str, ...]:
    """Return why the FLOPs are unknown although the model is known. The possible reasons are:

    - transformers is not installed, because a script trains without it
    - the configuration does not say how many experts a token passes through
    - some parts of the model do not see every token
    - a layer has no attention, or only attends to a window
    - an adapter is in a layer that the configuration does not build
    """
    why = _unknown(case) if case.model.config else None
    return () if why is None else (f"MFU is unknown: {why}",)


def _unknown(case: Case) -> str | None:
    from perfsuite.frameworks.common.model import transformers_config

    model = case.model
    sequence_length = case.sequence_length or 0
    missing = missing_package("transformers")
    if missing is not None:
        return f"perfsuite cannot count the FLOPs of {model.name}, because {missing}"
    try:
        config = transformers_config(model)
    except MismatchError as error:  # not a failure: a script builds its own model. Only FLOPs are unknown
        return str(error)
    if config.get_text_config() is not config:
        return f"{model.name} is more than a language model, and {FORMULA} only counts language models"
    nested = [value for value in vars(config).values() if hasattr(value, "get_text_config")]
    if any(_first(each, EXPERTS) > 1 for each in (config, *nested)) and not _first(config, CHOSEN):
        return f"the configuration of {model.name} does not say how many experts a token passes through"
    kinds = set(getattr(config, "layer_types", None) or ("sliding_attention",))
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    if window is None or sequence_length <= window:
        kinds.discard("sliding_attention")
    if getattr(config, "num_attention_heads", 0) and not kinds <= {"full_attention"}:  # a Mamba has no heads
        return (
            f"{FORMULA} assumes that all layers attend to all tokens, but some layers of {model.name} do not"
        )
    if case.lora is not None and not case.framework.promises.builds_model:
        try:
            _built(config, case.lora)
        except MismatchError as error:
            return str(error)
    return None


def count(
    model: Model, sequence_length: int, lora: LoRA | None = None, *, frozen_share: float = 0.0
) -> Flops:
    """Count the FLOPs of a model. The model is built on the meta device, which takes no memory.

    `frozen_share` is for a script that trains only some of its weights. It is the observed share of matmul
    weights that are frozen, from 0 to 1. With `lora`, `frozen_share` is ignored, because the adapters
    determine which weights are frozen.
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
    """Return the model with its adapters, built on the meta device."""
    import torch

    from perfsuite.frameworks.common.finetuning import add_adapters
    from perfsuite.frameworks.common.model import blocks, transformers_model

    with torch.device("meta"):
        built = transformers_model(config, attention="eager")
        if lora is not None:
            add_adapters(lora, built, blocks(built), torch.float32)
    return built


def _active_in_experts(built: Any, config: Any) -> int:
    """Return how many weights of experts and routers a token uses. `count` adds the linear layers."""
    experts = _first(config, EXPERTS)
    chosen = _first(config, CHOSEN)
    active = 0
    for module in built.modules():
        kind = type(module).__name__
        own = module.parameters(recurse=False)
        # In transformers 5, all experts of a layer are in one tensor, whose first dimension is the expert.
        if kind.endswith("Experts"):
            active += sum(each.numel() for each in own if each.dim() == 3) * chosen // experts
        elif kind.lower().endswith("router") and hasattr(module, "weight"):
            active += module.weight.numel()
    return active


def _first(config: Any, names: tuple[str, ...]) -> int:
    """Return the value of the first of these fields that a configuration sets, or 0 if it sets none."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value), 0)
