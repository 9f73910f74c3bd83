"""Predict how long the kernels of an operator run. Pure.

All constants here are estimates that were fixed before any published step was predicted. None of them was
changed afterwards. The constants of each accelerator are in `accelerators.json`.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

from perfsuite.case.hardware import Accelerator, Speed
from perfsuite.errors import PredictionError
from perfsuite.results.device_log import Kernel
from perfsuite.results.dry_facts import SCALED

KernelKind = Literal["matmul", "attention", "memory"]

TILES = (
    (256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (256, 64, 0.88), (64, 256, 0.88),
    (128, 64, 0.80), (64, 128, 0.80), (64, 64, 0.62),
)  # fmt: skip
"""Rows and columns of a tile (the part of a product that one multiprocessor computes), and its relative
speed.

With these tiles and the constants below, the predicted times of 183 products have a median error of 1.4%.
SimuMax measured these products on an A100 (configs/system/a100_pcie.json)."""
SPLITS = (1, 2, 3, 4, 6, 8)  # numbers of parts into which the inner dimension of a product can be split
SHORTEST_SPLIT = 512
SPLIT_SPEED = 0.93  # relative speed of a product whose parts must be added
RAMP = 128  # the begin and the end of a tile take as long as this many elements of the inner dimension
TRANSPOSED_SPEED = 0.95  # for a product whose first operand is transposed, as in gradients of weights

SMALL_HEAD = 64
SMALL_HEAD_SPEED = 0.8  # relative speed of attention with heads of 64 instead of 128
SHORT_SEQUENCE = 512  # length at which attention reaches about half of its speed
LONG_SEQUENCE = 8192  # length at which attention reaches the shares of the peak in accelerators.json
UNFUSED_SPEED = 0.5  # relative speed of attention in fp32 or with the memory-efficient kernel
ATTENTION_KERNELS = 3
FP32_ON_TENSOR_CORES = 1 / 6
"""The largest share of the 16-bit peak that attention in fp32 reaches. Since compute capability 8.0, the
kernels of this attention replace each product with three products in TF32 (`OpMultiplyAddFastF32` in torch's
gemm_kernel_utils.h). The peak in TF32 is half of the 16-bit peak."""

STRIDED_SPEED = 0.75  # relative speed of a kernel on a tensor that is not contiguous
CACHED_SPEED = 1.6  # relative speed if the tensors were just written and are in the cache
CACHED_UP_TO = 0.6  # share of the cache that can hold such tensors
COPIES = frozenset({"aten.copy_", "aten.clone", "aten._to_copy", "aten.mul", "aten.add", "aten.cat"})


class Access(NamedTuple):
    """How an operator without FLOPs uses the memory."""

    speed: float = 1.0  # relative to a large elementwise kernel
    kernels: int = 1
    reads: float = 1.0  # number of times that the input tensors are read
    writes: float = 1.0


ELEMENTWISE = Access()
# A gather does not read its whole input, but only as many elements as it writes. `writes` counts both.
GATHER = Access(speed=0.7, reads=0.0, writes=2.0)
SCATTER = Access(speed=0.5, kernels=3)
REDUCTION = Access(speed=0.88)
NORM_BACKWARD = Access(speed=0.6, kernels=2)
ACCESS = {
    **dict.fromkeys(("aten.embedding", "aten.index", "aten.gather", "aten.index_select"), GATHER),
    **dict.fromkeys(("aten.index_put", "aten.index_put_", "aten._index_put_impl_"), SCATTER),
    **dict.fromkeys(("aten.index_add_", "aten.scatter_add_"), SCATTER),
    **dict.fromkeys(("aten.sum", "aten.mean", "aten._softmax", "aten._log_softmax"), REDUCTION),
    **dict.fromkeys(("aten._softmax_backward_data", "aten._log_softmax_backward_data"), REDUCTION),
    **dict.fromkeys(("aten.native_layer_norm", "aten._fused_rms_norm"), REDUCTION),
    **dict.fromkeys(("aten.native_layer_norm_backward", "aten._fused_rms_norm_backward"), NORM_BACKWARD),
    "aten.embedding_dense_backward": Access(speed=0.5, kernels=6, reads=4.0, writes=2.0),
    # The loss reads one element of each row, and its gradient writes zeros before it writes one element.
    "aten.nll_loss_forward": Access(reads=0.02),
    "aten.nll_loss_backward": Access(kernels=2, reads=0.0, writes=1.02),
    "aten.slice_backward": Access(kernels=2, writes=2.0),
    "aten.sort": Access(speed=0.3, kernels=4),
    "aten.topk": Access(speed=0.3, kernels=4),
}
"""How operators that are not elementwise use the memory."""
TENSORS_OF_A_KERNEL = {"aten._foreach": 60, "aten._fused_adam": 120}
"""Number of tensors for which one kernel is launched, by prefix of the operator's name."""


class Device(NamedTuple):
    """The speeds of one accelerator."""

    peak_16bit: float  # FLOP/s
    peak_fp32: float
    speed: Speed
    has_tf32: bool = True  # whether attention in fp32 uses the tensor cores

    @classmethod
    def of(cls, name: str, product: Accelerator | None) -> Device:
        """Return the speeds of an accelerator. Raises `PredictionError` if some are unknown."""
        if product is None or product.speed is None or not product.peak_16bit or not product.peak_fp32:
            raise PredictionError(
                f"the times of kernels on {name} are unknown (accelerators.json has no speeds of it)"
            )
        has_tf32 = product.capability >= 80
        return cls(1e12 * product.peak_16bit, 1e12 * product.peak_fp32, product.speed, has_tf32)

    def slower(self, factor: float) -> Device:
        """Return a device whose kernels take this many times as long."""
        speed = self.speed._replace(
            memory_gb_s=self.speed.memory_gb_s / factor,
            shortest_kernel_us=self.speed.shortest_kernel_us * factor,
        )
        return self._replace(
            peak_16bit=self.peak_16bit / factor, peak_fp32=self.peak_fp32 / factor, speed=speed
        )

    @property
    def peak_fp32_attention(self) -> float:
        """Largest FLOP/s of attention in fp32."""
        return self.peak_16bit * FP32_ON_TENSOR_CORES if self.has_tf32 else self.peak_fp32

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of a large elementwise kernel."""
        return 1e9 * self.speed.memory_gb_s * self.speed.memory_share

    @property
    def gap_s(self) -> float:
        """Seconds of the shortest kernel."""
        return 1e-6 * self.speed.shortest_kernel_us


def kernel_s(kernel: Kernel, device: Device) -> tuple[KernelKind, float]:
    """Return the kind of an operator, and the seconds that its kernels run alone on the device."""
    if not kernel.flops:
        return "memory", _memory_s(kernel, device)
    if "attention" in kernel.operator and kernel.sizes:
        return "attention", _attention_s(kernel, device)
    return "matmul", _matmul_s(kernel, device)


def _matmul_s(kernel: Kernel, device: Device) -> float:
    speed = device.speed
    is_fp32 = kernel.dtype == "float32"
    peak = (
        device.peak_fp32 if is_fp32 else device.peak_16bit * (2 if kernel.operator.startswith(SCALED) else 1)
    )
    share = speed.matmul_share_fp32 if is_fp32 else speed.matmul_share
    if kernel.sizes:  # a convolution has none
        batch, rows, columns, depth, is_transposed = kernel.sizes
        share *= product_speed(batch, rows, columns, depth, speed.multiprocessors)
        share *= TRANSPOSED_SPEED if is_transposed else 1
    moving_s = (kernel.read_bytes + kernel.written_bytes) / device.bytes_per_s
    return max(kernel.flops / (peak * share), moving_s) + device.gap_s


@functools.cache
def product_speed(batch: int, rows: int, columns: int, depth: int, multiprocessors: int) -> float:
    """Return the speed of a matrix product relative to a large one, with the best tiles.

    The tiles are computed in waves of one tile per multiprocessor. The last wave can leave some
    multiprocessors idle, and tiles can extend beyond the edge of the product.
    """
    best = 0.0
    for tile_rows, tile_columns, tile_speed in TILES:
        tiles = batch * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
        used = batch * rows * columns / (tiles * tile_rows * tile_columns)
        for split in SPLITS:
            if split > 1 and depth / split < SHORTEST_SPLIT:
                break
            waves = tiles * split / multiprocessors
            filled = waves / math.ceil(waves)
            ramp = depth / split / (depth / split + RAMP)
            speed = tile_speed * used * filled * ramp * (SPLIT_SPEED if split > 1 else 1)
            best = max(best, speed)
    return best


def _attention_s(kernel: Kernel, device: Device) -> float:
    queries, keys, head, is_causal = kernel.sizes
    speed = device.speed
    is_backward = "backward" in kernel.operator
    share = speed.attention_backward_share if is_backward else speed.attention_share
    share *= SMALL_HEAD_SPEED if head <= SMALL_HEAD else 1
    longest = LONG_SEQUENCE / (LONG_SEQUENCE + SHORT_SEQUENCE)
    share *= min(1.0, keys / (keys + SHORT_SEQUENCE) / longest)
    if kernel.dtype == "float32" or "efficient" in kernel.operator:
        share *= UNFUSED_SPEED
    # The kernels skip the pairs that a causal mask hides, but the counted FLOPs include these pairs.
    flops = kernel.flops / 2 if is_causal and queries == keys else kernel.flops
    rate = device.peak_16bit * share
    if kernel.dtype == "float32":
        rate = min(rate, device.peak_fp32_attention)
    return flops / rate + ATTENTION_KERNELS * device.gap_s


def _memory_s(kernel: Kernel, device: Device) -> float:
    access = ACCESS.get(kernel.operator, ELEMENTWISE)
    size = access.reads * kernel.read_bytes + access.writes * kernel.written_bytes
    speed = access.speed
    if kernel.is_strided and kernel.operator in COPIES:
        speed *= STRIDED_SPEED
    if size < CACHED_UP_TO * 1e6 * device.speed.cache_mb:
        speed *= CACHED_SPEED
    kernels = access.kernels
    for prefix, tensors in TENSORS_OF_A_KERNEL.items():
        if kernel.operator.startswith(prefix):
            kernels = max(1, kernel.tensors // tensors)
    return size / (device.bytes_per_s * speed) + kernels * device.gap_s
