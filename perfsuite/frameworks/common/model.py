"""Model, optimizer, data and training loop that the torch frameworks share. Worker side; imports torch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from perfsuite.errors import MismatchError
from perfsuite.frameworks.base import Workload
from perfsuite.frameworks.common import finetuning
from perfsuite.frameworks.common.weights import initialise, parameters_on_meta

if TYPE_CHECKING:
    from perfsuite.case.case import Case
    from perfsuite.case.model import Model
    from perfsuite.frameworks.base import Ranks

DTYPES = {
    "fp32": torch.float32,
    "bf16-mixed": torch.float32,
    "fp16-mixed": torch.float32,
    "bf16": torch.bfloat16,
}
"""The dtype that parameters are kept in, by a case's precision."""
COMPUTE_DTYPES = {**DTYPES, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
"""The dtype of matrix products, by a case's precision."""
LOSS_SCALE = 1024.0
"""Of fp16-mixed. Torch begins at 65536, and lets the first steps fail to find a lower one."""

DISTINCT_BATCHES = 16
"""Batches made before the clock starts; the loop goes round them."""
ALPHABET = 64
"""Tokens that the synthetic text uses."""


_NOT_OF_THE_MODEL = frozenset(
    "architectures auto_map _name_or_path torch_dtype dtype transformers_version use_cache".split()  # noqa: SIM905
)
"""Keys of a `config.json` that say where it comes from and not what the model is."""


def transformers_config(model: Model) -> Any:
    """The transformers configuration object of `model`. Raises `MismatchError` for an unknown key.

    transformers keeps unknown keys and builds the default model: a misspelt `hidden_size` would go unseen.
    """
    from transformers import AutoConfig

    # A deep copy: transformers fills in nested parts (rope_parameters) in place.
    settings: dict[str, Any] = copy.deepcopy(dict(model.config))
    settings["use_cache"] = False
    model_type = settings.pop("model_type")
    try:
        usual = AutoConfig.for_model(model_type)
    except ValueError as error:
        raise MismatchError(f"{model.name}: transformers has no model_type {model_type!r}") from error
    known = {*usual.to_dict(), *usual.attribute_map, *_NOT_OF_THE_MODEL, "head_dim"}
    if unknown := sorted(set(settings) - known):
        raise MismatchError(f"{model.name}: {type(usual).__name__} has no {', '.join(unknown)}")
    return AutoConfig.for_model(model_type, **settings)


def transformers_model(config: Any, *, attention: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A randomly initialised model on the current default device.

    transformers takes nothing but eager for a model without attention.
    """
    from transformers import AutoModelForCausalLM

    attention = attention if has_attention(config) else "eager"
    built: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return built.train()


def has_attention(config: Any) -> bool:
    """Whether a transformers configuration is of a model with attention; Mamba's has none."""
    return hasattr(config.get_text_config(), "num_attention_heads")


def build_model(case: Case, device: torch.device) -> nn.Module:
    """The case's model in training mode, the same weights on every rank, with checkpointing and compilation.

    Both are applied to the blocks' `forward`, so that wrappers may be put around the blocks afterwards.
    """
    model = model_without_weights(case, device)
    initialise(model, blocks(model), seed=case.seed, device=device)
    return model


def model_without_weights(case: Case, device: torch.device) -> nn.Module:
    """As `build_model`, but the parameters are on the meta device, to be sharded before `initialise`."""
    dtype, compute = DTYPES[case.precision], COMPUTE_DTYPES[case.precision]
    with device, parameters_on_meta():
        config = transformers_config(case.model)
        model = transformers_model(config, attention=case.attention, dtype=dtype)
        if case.quantization != "none":
            finetuning.quantise_layers(case.quantization, blocks(model), dtype, compute)
        if case.lora is not None:
            finetuning.add_adapters(case.lora, model, blocks(model), dtype, case.quantization)
    for index, block in enumerate(blocks(model)):
        if is_checkpointed(case.activation_checkpointing, index):
            _checkpoint(block, by_op=case.activation_checkpointing == "selective-op")
        if case.compile:
            block.compile()
    return model


def blocks(model: nn.Module) -> list[Any]:
    """The transformer blocks: the outermost modules that transformers says must not be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise MismatchError(f"{type(model).__name__} names no transformer blocks (_no_split_modules)")
    inner = {id(part) for block in found for part in block.modules() if part is not block}
    return [block for block in found if id(block) not in inner]


def is_checkpointed(mode: str, index: int) -> bool:
    """Whether the block of that index is recomputed in backward, by a case's `activation_checkpointing`."""
    if mode.startswith("every-"):
        return index % int(mode.removeprefix("every-")) == 0
    return mode != "none"


def expected_recomputing_blocks(mode: str, blocks: int) -> int:
    """How many of so many blocks must be seen to run their forward twice a step."""
    return sum(is_checkpointed(mode, index) for index in range(blocks))


def _checkpoint(block: Any, *, by_op: bool) -> None:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    context: dict[str, Any] = {}
    if by_op:
        context = {"context_fn": lambda: create_selective_checkpoint_contexts(_save_expensive_ops())}
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, **context)


def _save_expensive_ops() -> Callable[..., Any]:
    """torchtitan's policy: keep attention, reductions and every second matrix product, recompute the rest."""
    from torch.utils.checkpoint import CheckpointPolicy

    aten = torch.ops.aten
    expensive = {
        aten.mm.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
    matmuls = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in expensive
        if op is aten.mm.default:
            phase = "recompute" if context.is_recompute else "forward"
            matmuls[phase] += 1
            keep = matmuls[phase] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def build_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, fused on a GPU, of all that is not frozen. Call it after the model is wrapped."""
    fused = next(model.parameters()).device.type == "cuda"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=case.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)


def _grad_scaler(case: Case, model: nn.Module, device: str) -> Any:
    """For fp16-mixed torch's scaler; else one that does nothing."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    kind = ShardedGradScaler if isinstance(model, FullyShardedDataParallel) else torch.amp.GradScaler
    return fixed_scaler(kind, device, enabled=case.precision == "fp16-mixed")


def fixed_scaler(kind: Any, device: str, *, enabled: bool = True) -> Any:
    """A gradient scaler of this class at `LOSS_SCALE`, which never grows."""
    return kind(device, init_scale=LOSS_SCALE, growth_interval=2**31 - 1, enabled=enabled)


def synthetic_batches(case: Case, data_rank: int, device: torch.device) -> list[Tensor]:
    """Learnable tokens: `DISTINCT_BATCHES` of shape [micro_batch, sequence_length], int64, on `device`.

    A fixed Markov chain over `ALPHABET` tokens: the successor is one fixed permutation of the token nine
    times of ten, else any. A model that learns at all brings its loss from ln(vocabulary) below
    ln(ALPHABET) within some dozen steps.
    """
    size = min(ALPHABET, int(str(case.model.config.get("vocab_size", ALPHABET))))
    chain = torch.Generator().manual_seed(0)
    successor = torch.randperm(size, generator=chain)
    shape = (DISTINCT_BATCHES * case.micro_batch, case.sample_length)
    # A generator for each, so that the first sequences are the same whatever the micro-batch.
    seed = 1_000_003 * (case.seed + 1) + 2 * data_rank
    random = torch.randint(size, shape, generator=torch.Generator().manual_seed(seed))
    follow = torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.9
    tokens = random.clone()
    for position in range(1, case.sample_length):
        tokens[:, position] = torch.where(
            follow[:, position], successor[tokens[:, position - 1]], random[:, position]
        )
    return list(tokens.to(device).split(case.micro_batch))


def check_scale(case: Case, scaler: Any) -> None:
    """Raises `MismatchError` if a gradient scaler at `LOSS_SCALE` made the optimizer skip steps."""
    if scaler.is_enabled() and scaler.get_scale() < LOSS_SCALE:
        raise MismatchError(
            f"{case.precision}: gradients were not finite at a loss scale of {LOSS_SCALE:g}, and the "
            "optimizer skipped those steps: give a lower learning_rate, or bf16-mixed"
        )


def data_parallel_workload(
    case: Case,
    ranks: Ranks,
    model: nn.Module,
    *,
    autocast: bool = False,
    no_sync: Callable[[], AbstractContextManager[None]] | None = None,
    tensor_parallel: int = 1,
) -> Workload:
    """AdamW, data and training loop around a wrapped model.

    `autocast`: a mixed precision is torch's autocast, not the wrapper's work. `no_sync`, if given, is entered
    around each micro-batch but the last: gradients are not reduced there. So many neighbouring ranks as
    `tensor_parallel` says see the same data.
    """
    optimizer = build_optimizer(case, model)
    scaler = _grad_scaler(case, model, ranks.device.type)
    dtype = COMPUTE_DTYPES[case.precision]
    data = itertools.cycle(synthetic_batches(case, ranks.rank // tensor_parallel, ranks.device))
    device = ranks.device.type
    share = 1 / case.gradient_accumulation

    def step() -> Tensor:
        """One optimizer step; returns its mean loss, still on the device."""
        total = torch.zeros((), device=device)
        for micro in range(case.gradient_accumulation):
            tokens = next(data)
            is_last = micro == case.gradient_accumulation - 1
            with nullcontext() if is_last or no_sync is None else no_sync():
                with torch.autocast(device, dtype, enabled=autocast and dtype != DTYPES[case.precision]):
                    loss = model(input_ids=tokens, labels=tokens).loss * share
                scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)  # of its own, so that ranks that shard agree on an overflow
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return total

    def run(steps: int) -> list[Tensor]:
        losses = [step() for _ in range(steps)]
        check_scale(case, scaler)
        return losses

    return Workload(
        run=run,
        data_parallel=ranks.world_size // tensor_parallel,
        model=model,
    )
