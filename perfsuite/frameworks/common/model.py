"""Model, optimizer and data for frameworks that do not bring their own. For the worker; imports torch."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from perfsuite.case.case import Case
from perfsuite.case.model import Model
from perfsuite.errors import MismatchError
from perfsuite.frameworks.common import finetuning
from perfsuite.frameworks.common.private import no_split_modules
from perfsuite.frameworks.common.weights import initialise, parameters_on_meta

DTYPES = {**dict.fromkeys(("fp32", "bf16-mixed", "fp16-mixed"), torch.float32), "bf16": torch.bfloat16}
"""A case's precision -> dtype of the parameters."""
COMPUTE_DTYPES = {**DTYPES, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
"""A case's precision -> dtype of the matmuls."""
DISTINCT_BATCHES = 16  # number of batches that are created before the clock starts. Training repeats them
ALPHABET = 64  # number of distinct tokens in the synthetic text

_NOT_OF_THE_MODEL = frozenset(  # keys of a `config.json` that do not change the model
    "architectures auto_map _name_or_path torch_dtype dtype transformers_version use_cache".split()  # noqa: SIM905
)
_ROPE = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
"""Keys of older `config.json` files. transformers 5 converts these keys to `rope_parameters`."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def transformers_config(model: Model) -> Any:
    """Return the transformers configuration object of `model`. Raises `MismatchError` for an unknown key.

    transformers ignores unknown keys. So it would build a model of the default size if `hidden_size` were
    misspelt.
    """
    from transformers import AutoConfig

    # Make a deep copy, because transformers changes nested parts (rope_parameters) in place.
    settings: dict[str, Any] = {**copy.deepcopy(dict(model.config)), "use_cache": False}
    model_type = settings.pop("model_type")
    try:
        usual = AutoConfig.for_model(model_type)
    except ValueError as error:
        raise MismatchError(f"{model.name}: transformers has no model_type {model_type!r}") from error
    keys = {*usual.to_dict(), *usual.attribute_map, *_NOT_OF_THE_MODEL, "head_dim"}
    if "rope_parameters" in keys:
        keys |= _ROPE
    unknown = sorted(set(settings) - keys)
    if unknown:
        raise MismatchError(
            f"{model.name}: {type(usual).__name__} has no {', '.join(unknown)}. Correct the spelling, or "
            "remove the key from the configuration"
        )
    return AutoConfig.for_model(model_type, **settings)


def transformers_model(config: Any, *, attention: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build a model with random weights on the default device.

    For a model without attention, `attention` is ignored.
    """
    from transformers import AutoModelForCausalLM

    attention = attention if has_attention(config) else "eager"
    built: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return built.train()


def has_attention(config: Any) -> bool:
    """Return whether a transformers configuration is for a model with attention. A Mamba has none."""
    # A script can use a version of transformers before 4.45, which has no `get_text_config`.
    text = getattr(config, "get_text_config", lambda: config)()
    return hasattr(text, "num_attention_heads")


def build_model(case: Case, device: torch.device) -> nn.Module:
    """Build the case's model in training mode, with the same weights on every rank.

    Blocks are checkpointed and compiled if the case says so. Checkpointing and compilation change only a
    block's `forward`, so the blocks can still be wrapped.
    """
    model = model_without_weights(case, device)
    initialise(model, blocks(model), seed=case.seed, device=device)
    return model


def model_without_weights(case: Case, device: torch.device) -> nn.Module:
    """Build the case's model with its parameters on the meta device.

    If the model is to be sharded, shard it before `initialise`.
    """
    dtype = DTYPES[case.precision]
    compute = COMPUTE_DTYPES[case.precision]
    with device, parameters_on_meta():
        config = transformers_config(case.model)
        model = transformers_model(config, attention=case.attention, dtype=dtype)
        if case.quantization != "none":
            finetuning.quantise_layers(case.quantization, blocks(model), dtype, compute)
        if case.lora is not None:
            finetuning.add_adapters(case.lora, model, blocks(model), dtype, case.quantization)
    mode = case.activation_checkpointing
    context: dict[str, Any] = {"context_fn": _save_expensive_ops} if mode == "selective-op" else {}
    for index, block in enumerate(blocks(model)):
        if is_checkpointed(mode, index):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **context)
        if case.compile:
            block.compile()
    return model


def blocks(model: nn.Module) -> list[Any]:
    """Return the transformer blocks: the outermost modules that transformers declares as unsplittable."""
    names = set(getattr(model, no_split_modules.name, None) or ())
    candidates = [module for module in model.modules() if type(module).__name__ in names]
    if not candidates:
        raise MismatchError(f"{type(model).__name__} has no transformer blocks ({no_split_modules.name})")
    inner = {id(part) for block in candidates for part in block.modules() if part is not block}
    return [block for block in candidates if id(block) not in inner]


def is_checkpointed(mode: str, index: int) -> bool:
    """Return whether backward recomputes block `index`. `mode` is the case's `activation_checkpointing`."""
    if mode.startswith("every-"):
        return index % int(mode.removeprefix("every-")) == 0
    return mode != "none"


def _save_expensive_ops() -> Any:
    """Apply torchtitan's policy: save attention, reductions and every second matmul; recompute the rest."""
    aten = torch.ops.aten
    expensive = {
        aten.mm.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
    matmuls = {False: 0, True: 0}  # number of matmuls so far in forward (False) and recomputation (True)

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in expensive
        if op is aten.mm.default:
            matmuls[context.is_recompute] += 1
            keep = matmuls[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def build_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW optimizer for all parameters that are not frozen.

    Wrap the model before you call this function. On a GPU, the optimizer is fused.
    """
    fused = next(model.parameters()).device.type == "cuda"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=case.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)


def synthetic_batches(case: Case, data_rank: int, device: torch.device) -> list[Tensor]:
    """Return `DISTINCT_BATCHES` batches of learnable tokens: [micro_batch, sequence_length], int64.

    The text is a Markov chain over `ALPHABET` tokens. With probability 0.9, a fixed permutation of the tokens
    determines the next token. With probability 0.1, the next token is random. A model that learns at all
    reduces its loss from ln(vocabulary) to below ln(ALPHABET) within a few dozen steps.
    """
    return list(_markov_chain(case, data_rank).to(device).split(case.micro_batch))


def _markov_chain(case: Case, data_rank: int) -> Tensor:
    """Return the tokens of all batches: [DISTINCT_BATCHES * micro_batch, sequence_length], int64."""
    size = min(ALPHABET, int(str(case.model.text_config.get("vocab_size", ALPHABET))))
    chain = torch.Generator().manual_seed(0)
    successor = torch.randperm(size, generator=chain)
    shape = (DISTINCT_BATCHES * case.micro_batch, case.sample_length)
    # `random` and `follow` have separate generators, so that the first sequences are the same for every
    # micro-batch size. With a shared generator, `follow` would depend on the size of `random`.
    seed = 1_000_003 * (case.seed + 1) + 2 * data_rank
    random = torch.randint(size, shape, generator=torch.Generator().manual_seed(seed))
    follow = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.9
    tokens = random.clone()
    for position in range(1, case.sample_length):
        tokens[:, position] = torch.where(
            follow[:, position], successor[tokens[:, position - 1]], random[:, position]
        )
    return tokens
