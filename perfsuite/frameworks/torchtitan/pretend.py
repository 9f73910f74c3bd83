"""Prepare torchtitan for a dry run: replace FlexAttention, and code that needs values or other ranks."""

import functools
from collections.abc import Mapping
from dataclasses import replace as replaced
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from perfsuite.frameworks.common import private
from perfsuite.frameworks.common.patches import module, nothing, replace, wrap
from perfsuite.frameworks.common.private import fsdp_policy, fsdp_state, inference_mode, stage_meta

ROUTING = "expert routing is assumed to be balanced: every expert gets its share of the tokens"
FUSED = "attention is counted as one fused kernel without a mask, instead of torchtitan's own kernel"


def pretend(expected: Mapping[str, str]) -> None:
    """Make torchtitan train with fake tensors for the rest of this process. Import torchtitan before this.

    FlexAttention (which torchtitan compiles) and varlen attention are replaced with cuDNN's operator. No
    other operator accepts values and queries of different sizes. cuDNN's operator needs about as much memory
    as the operators that it replaces, and masks nothing.
    """
    attention = module("torchtitan.models.common.attention")
    pretended = dict.fromkeys((attention.FlexAttention, attention.VarlenAttention), FUSED)
    for kind in pretended:
        replace(kind, "forward", _one_kernel)
    decoder = module("torchtitan.models.common.decoder").Decoder
    for kind in (decoder, *decoder.__subclasses__()):
        replace(kind, "get_attention_masks", nothing)
    # torchtitan's own function would call another package.
    replace(module("torchtitan.tools.utils"), "get_cuda_flash_attention_impl", nothing)
    dispatcher = module("torchtitan.models.common.token_dispatcher")
    wrap(dispatcher.AllToAllTokenDispatcher, "_dispatch_token_exchange", _balanced)
    # The stages of a pipeline exchange shapes, but a dry run has only one rank.
    if expected.get("pipeline", "none") != "none":
        replace(*private.place("warmup_p2p"), _each_time)
        replace(*private.place("send_meta"), nothing)
        replace(*private.place("recv_meta"), _shape)
        wrap(*private.place("metadata_inference"), _knows_positions)
    pretended = {module("torchtitan.models.common.moe").GroupedExperts: ROUTING, **pretended}
    replace(module("perfsuite.frameworks.torchtitan.trainer"), "PRETENDED", pretended)


def _one_kernel(
    self: Any,
    q_BLNH: Tensor,  # torchtitan shards arguments by their names
    k_BLNH: Tensor,
    v_BLNH: Tensor,
    *,
    scale: Any = None,
    out_transform: Any = None,
    **_: Any,
) -> Any:
    """Replace attention on tensors of shape (batch, positions, heads, size)."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, sums, *_others = cudnn(query, key, value, None, True, 0.0, True, False, scale=scale)
    out = out.transpose(1, 2)
    return out if out_transform is None else out_transform(out, sums.squeeze(-1).transpose(1, 2))


def _each_time(schedule: Any, stages: Any, *args: Any) -> None:
    """Make stages always exchange shapes.

    Otherwise all stages would vote on whether to exchange them, but a dry run has only one stage.
    """
    for stage in stages:
        setattr(stage, inference_mode.name, private.InferenceMode.DYNAMIC)


def _knows_positions(infer: Any) -> Any:
    """Wrap `infer` so that the stage keeps the positions.

    `_shape` reads the batch size and the sequence length from the shape of the positions.
    """

    @functools.wraps(infer)
    def knows(self: Any, args: Any, kwargs: Any, *others: Any, **options: Any) -> Any:
        self.positions = kwargs["positions"]
        return infer(self, args, kwargs, *others, **options)

    return knows


def _shape(self: Any, source: int) -> Any:
    """Return the shapes of input activations or of output gradients, as another stage would send them."""
    if source > self.stage_index:
        gradients = tuple(replaced(output, requires_grad=False) for output in stage_meta(self).outputs)
        return private.StageBackwardMeta(backward_metas=gradients)
    dtype = fsdp_policy(fsdp_state(self.submod)()).param_dtype
    batch, length = self.positions.shape
    mesh = next(self.submod.parameters()).device_mesh
    parts = mesh["tp"].size() if "tp" in mesh.mesh_dim_names else 1
    sizes = (batch, length // parts, self.submod.config.dim)
    activations = torch.empty(sizes, dtype=dtype, device=self.device, requires_grad=True)
    if parts > 1:  # with sequence parallelism
        activations = DTensor.from_local(activations, mesh["tp"], [Shard(1)])
    meta_of = module("torch.distributed.pipelining.stage").extract_tensor_meta
    return private.StageForwardMeta(forward_metas=(meta_of(activations),))


def _balanced(exchange: Any) -> Any:
    """Wrap `exchange` so that each rank sends the same number of tokens to every rank."""

    @functools.wraps(exchange)
    def balanced(self: Any, tokens: Tensor, group: Any, received: list[int], sent: list[int]) -> Any:
        share, more = divmod(len(tokens), len(sent))
        received[:] = sent[:] = [share + (rank < more) for rank in range(len(sent))]
        return exchange(self, tokens, group, received, sent)

    return balanced
