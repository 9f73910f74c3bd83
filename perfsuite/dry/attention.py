"""Choose the attention kernel that torch would choose on the simulated GPU. Worker side; imports torch.

The rules follow aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.13:

- On Hopper and Blackwell, cuDNN's kernel is preferred. This assumes a version of cuDNN after 9.15.
- From Ampere on, flash attention comes next. Both kernels need a dtype of 16 bits and no mask. Flash
  attention also needs heads of the same size in query and value.
- Otherwise, torch uses the memory-efficient kernel. This kernel does not support shared key-value heads, and
  supports bfloat16 only from Ampere on. If no kernel can be used, for example because the tensors have
  three dimensions, torch uses plain operations.
"""

from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from perfsuite.case.hardware import Machine
from perfsuite.frameworks.common.patches import replace

# Compute capabilities for which torch prefers cuDNN's kernel.
PREFER_CUDNN = frozenset({(9, 0), (10, 0), (10, 3)})
CUDNN_LARGEST_HEAD = 128
FLASH_LARGEST_HEAD = 256
MLA_HEADS = (192, 128)
"""Sizes of the heads of query and value in DeepSeek. On Blackwell, cuDNN's kernel supports them."""


def pretend(machine: Machine) -> None:
    """Make attention call the kernels that torch would choose on `machine`'s GPU, in this process."""
    capability = machine.compute_capability
    assert capability is not None
    plain: Any = functional.scaled_dot_product_attention

    # Context parallelism looks this function up by its name.
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if query.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
            # Autocast applies to the operator that this function replaces, but not to the kernels below.
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        shares_heads = enable_gqa and key.shape[-3] != query.shape[-3]
        kernel = chosen(capability, query, value, is_masked=attn_mask is not None, shares_heads=shares_heads)
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        if kernel == "plain" and query.device.type == "cuda":
            return _composed(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if kernel == "plain":
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **options)
        if kernel == "flash":
            return _flash(query, key, value, dropout_p, is_causal, scale)
        aten = torch.ops.aten
        keeps_sums = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        if kernel == "cudnn":
            cudnn = aten._scaled_dot_product_cudnn_attention
            return cudnn(query, key, value, None, keeps_sums, dropout_p, is_causal, False, scale=scale)[0]
        efficient = aten._scaled_dot_product_efficient_attention
        mask = None if attn_mask is None else _added(attn_mask, query, key)
        return efficient(query, key, value, mask, keeps_sums, dropout_p, is_causal, scale=scale)[0]

    replace(functional, "scaled_dot_product_attention", scaled_dot_product_attention)


def keep_from_dynamo() -> None:
    """Make torch.compile treat attention as one operator, as it treats torch's own function. Loads dynamo.

    If torch.compile traced the function that `pretend` sets, the choice of the kernel would break the graph.
    """
    attention: Any = functional.scaled_dot_product_attention
    if isinstance(attention, FunctionType):  # torch's own function is a builtin
        torch.compiler.allow_in_graph(attention)


def chosen(
    capability: tuple[int, int], query: Tensor, value: Tensor, *, is_masked: bool, shares_heads: bool
) -> str:
    """Return the kernel that torch would use: `cudnn`, `flash`, `efficient` or `plain`.

    Kernels that are disabled in `torch.backends.cuda` are not chosen.
    """
    allowed = torch.backends.cuda
    if query.device.type != "cuda" or len(query.shape) != 4:
        return "plain"
    size = query.shape[-1]
    in_16_bits = query.dtype in (torch.float16, torch.bfloat16) and not is_masked
    of_value = value.shape[-1]
    is_blackwell = capability[0] == 10
    fits_cudnn = max(size, of_value) <= CUDNN_LARGEST_HEAD or (is_blackwell and (size, of_value) == MLA_HEADS)
    cudnn_can = capability in PREFER_CUDNN and fits_cudnn and size % 8 == of_value % 8 == 0
    if in_16_bits and cudnn_can and allowed.cudnn_sdp_enabled():
        return "cudnn"
    flash_can = capability >= (8, 0) and of_value == size <= FLASH_LARGEST_HEAD
    if in_16_bits and flash_can and allowed.flash_sdp_enabled():
        return "flash"
    is_emulated = query.dtype == torch.bfloat16 and capability < (8, 0)
    can_be_efficient = allowed.mem_efficient_sdp_enabled() and not shares_heads and not is_emulated
    return "efficient" if can_be_efficient else "plain"


def _composed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    **options: Any,
) -> Any:
    """Compute attention without a fused kernel.

    Torch's own function is avoided. In a build for CUDA, it asks NVIDIA's driver which kernel to use.
    """
    if mask is not None and mask.dtype == torch.bool:
        zero = torch.scalar_tensor(0.0, dtype=query.dtype, device=mask.device)
        mask = torch.where(mask, zero, float("-inf"))
    plain = torch.ops.aten._scaled_dot_product_attention_math
    return plain(query, key, value, mask, dropout, causal, None, **options)[0]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None
) -> Any:
    size = query.shape[-1]
    scale = size**-0.5 if scale is None else scale
    padding = -size % 8
    if padding:
        query, key, value = (functional.pad(tensor, (0, padding)) for tensor in (query, key, value))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out = flash(query, key, value, dropout, causal, False, scale=scale)[0]
    return out[..., :size] if padding else out


def _added(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:3], key.shape[2])
