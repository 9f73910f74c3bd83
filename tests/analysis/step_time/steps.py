"""Helpers: handmade logs and machines, for which times can be worked out on paper."""

from perfsuite.analysis.step_time.kernels import Device
from perfsuite.analysis.step_time.links import Links
from perfsuite.analysis.step_time.prediction import StepTime
from perfsuite.analysis.step_time.streams import HostTimes, MachineSpeeds
from perfsuite.case.hardware import Speed
from perfsuite.errors import PredictionError
from perfsuite.results.device_log import Communicate, Entry, Kernel, RecordEvent, StreamWait

G = 10**9
PLAIN = Speed(
    multiprocessors=1,
    memory_gb_s=1,
    cache_mb=0,
    matmul_share=1,
    matmul_share_fp32=1,
    attention_share=1,
    attention_backward_share=1,
    memory_share=1,
    shortest_kernel_us=0,
    collective_gb_s=1,
    source="made up",
)
DEVICE = Device(peak_16bit=1e12, peak_fp32=1e11, speed=PLAIN)
"""A device that moves 1 GB and computes 1 TFLOP in a second."""
AHEAD = HostTimes(factor=0.0, launch_s=0.0)
"""A host that takes no time."""
MACHINE = MachineSpeeds(DEVICE, Links(inside=1e9, between=1e8, devices=8), AHEAD)


def kernel(seconds: float, stream: int = 0) -> Kernel:
    """Return a kernel that only moves bytes."""
    read = round(seconds * G)
    return Kernel(stream, "forward", "aten.add", read, 0, 1, "bfloat16", 0, (), is_strided=False)


def matmul(seconds: float, size: int = 1 << 20) -> Kernel:
    """Return a matrix product whose FLOPs take this long at the peak. Its rows and columns fill the tiles."""
    flops = round(seconds * 1e12)
    sizes = (1, size, size, size, 0)
    return Kernel(0, "forward", "aten.mm", 0, 0, 2, "bfloat16", flops, sizes, is_strided=False)


def gather(number: int, seconds: float, stream: int = 1, ranks: int = 8) -> Communicate:
    """Return an all-gather whose bytes take this long on a link of 1 GB/s. Its latency is additional."""
    size = round(seconds * G * ranks / (ranks - 1))
    return Communicate(number, stream, "forward", "all_gather", ranks, 1, size, is_async=False)


def prefetched(layers: int, compute_s: float, gather_s: float) -> list[Entry]:
    """Return a step that gathers each layer while it computes the previous one.

    Nothing hides the first gather.
    """
    end = 10**6
    step: list[Entry] = [StreamWait(1, end)]
    for layer in range(layers):
        step += [gather(layer, gather_s), RecordEvent(layer, 1)]
        if layer:
            step += [StreamWait(0, layer - 1), kernel(compute_s)]
    step += [StreamWait(0, layers - 1), kernel(compute_s), RecordEvent(end, 0)]
    return step


HOST_SETS_THE_PACE = 0.01  # if the device waits for the host for a larger share of a step, `of_layers` fails


def of_layers(few: StepTime, more: StepTime, few_layers: int, more_layers: int, layers: int) -> StepTime:
    """Extrapolate from the steps of a model with fewer layers to one with `layers`.

    Raises `PredictionError` if the host sets the pace of either step, because in a longer step the host can
    be further ahead.
    """
    for step, number in ((few, few_layers), (more, more_layers)):
        if step.host_s > HOST_SETS_THE_PACE * step.total_s:
            share = step.host_s / step.total_s
            raise PredictionError(
                f"with {number} layers, the device waits for the host for {share:.0%} of a step, and this "
                "wait is not proportional to the number of layers"
            )
    times = (layers - few_layers) / (more_layers - few_layers)
    return StepTime(*(first + times * (second - first) for first, second in zip(few, more, strict=True)))
