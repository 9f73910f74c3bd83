"""A machine as data, and a table of the known accelerators.

A baseline belongs to a hardware class: accelerator, memory and form factor (`h100-80gb-sxm`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from perfsuite.documents import Data, did_you_mean


class Speed(NamedTuple):
    """Speeds of kernels and collectives on a healthy device, used to predict the time of a step."""

    multiprocessors: int
    memory_gb_s: float  # bandwidth of the memory according to the datasheet
    cache_mb: float  # size of the L2 cache
    matmul_share: float  # share of the 16-bit peak that a large matrix product reaches
    matmul_share_fp32: float  # share of the fp32 peak that a large product in fp32 reaches
    attention_share: float  # share of the 16-bit peak that fused attention reaches with long sequences
    attention_backward_share: float
    memory_share: float  # share of the memory's bandwidth that a large elementwise kernel reaches
    shortest_kernel_us: float  # time from the start of an empty kernel to the start of the next kernel
    collective_gb_s: float  # NCCL's bus bandwidth between the devices of one machine
    source: str
    published: tuple[float, float] | None = None
    """Lowest and highest ratio of the published speed of a step to its predicted speed. None: too few steps
    are published."""
    # Median ratio of published to predicted step times. None: too few steps are published.
    factor: float | None = None
    published_source: str | None = None


class Accelerator(NamedTuple):
    """One product.

    Peaks are dense (no sparsity), in TFLOP/s per device. A peak is None if no datasheet gives it.
    """

    family: str
    memory_gb: int  # nominal, as in the product's name or datasheet
    usable_gib: float | None
    """Total memory that CUDA reports, in GiB. It is less than the nominal memory, and usually slightly less
    than the total that NVML reports. None if no source gives it."""
    form_factor: str
    peak_16bit: float | None  # bf16 and fp16, with fp32 accumulation; on Volta and Turing only fp16
    peak_fp32: float | None  # outside the tensor cores, because torch leaves TF32 off by default
    link_gb_s: float | None
    """One-way bandwidth in GB/s between a device and the other devices of its machine. The link is NVLink if
    the form factor has NVLink (`sxm`, `nvl`, NVL72), and otherwise PCIe with 16 lanes. Bridges between pairs
    of devices are not included. None if no datasheet gives the bandwidth."""
    capability: int  # compute capability times ten, from developer.nvidia.com/cuda-gpus
    # The source of the peaks and of `link_gb_s`. Datasheets give the link's bandwidth in both directions
    # together, which is twice `link_gb_s`.
    source: str
    usable_source: str | None  # the source of `usable_gib`
    speed: Speed | None = None  # None if the times of kernels on the device are unknown

    @property
    def memory_bytes(self) -> int:
        """The usable memory of one device in bytes, or the nominal memory if the usable memory is unknown."""
        return round((self.memory_gb if self.usable_gib is None else self.usable_gib) * 2**30)

    @property
    def hardware_class(self) -> str:
        """The hardware class: family, memory and form factor, such as `h100-80gb-sxm`."""
        return f"{self.family}-{self.memory_gb}gb-{self.form_factor}"


def _accelerator(fields: dict[str, Any]) -> Accelerator:
    speed = fields.pop("speed", None)
    if speed is None:
        return Accelerator(**fields)
    low_high = speed.pop("published", None)
    return Accelerator(
        **fields, speed=Speed(**speed, published=None if low_high is None else (low_high[0], low_high[1]))
    )


_TABLE = Path(__file__).with_name("accelerators.json").read_text(encoding="utf-8")
PRODUCTS: Mapping[str, Accelerator] = {  # the known accelerators, by NVML's name
    name: _accelerator(fields) for name, fields in json.loads(_TABLE).items()
}

ACCELERATORS: tuple[str, ...] = ("cpu", "gpu", *sorted({product.family for product in PRODUCTS.values()}))
"""The families that a case's `hardware` can name. They are also the names of the hardware markers. `gpu` is
any GPU, known or not."""

ARCHITECTURES: Mapping[str, int] = {product.family: product.capability for product in PRODUCTS.values()}
"""Family -> its compute capability times ten, which determines the kernels that libraries choose."""


def hardware_error(name: str) -> str | None:
    """Return why no machine can match this entry of a case's `hardware`. None if some machine can."""
    family = name.split("-")[0]
    classes = [product.hardware_class for product in PRODUCTS.values() if product.family == family]
    lower = name.lower()
    question = "did you mean {!r}? "
    right = [lower] if name != lower and hardware_error(lower) is None else []
    hint = did_you_mean(lower, right, question)
    if family not in ACCELERATORS:
        hint = (
            hint or did_you_mean(name, ACCELERATORS, question) or did_you_mean(family, ACCELERATORS, question)
        )
        return f"{hint}begin with one of {', '.join(ACCELERATORS)}"
    if family == "cpu" or name == "gpu" or any(f"{kind}-".startswith(f"{name}-") for kind in classes):
        return None
    return f"{hint}the known {family} hardware is {', '.join(sorted(set(classes))) or 'only gpu'}"


class AllocatedNode(Data):
    """One node of an allocation."""

    name: str
    # The network interface with the address of the node's host name. gloo uses this interface by default.
    interface: str | None = None
    cores: int | None = None  # number of cores that a launch may use; None if unknown
    cores_of_machine: int | None = None  # number of all its cores


class Allocation(Data):
    """The nodes that a scheduler has allocated to a session."""

    job_id: str
    nodes: tuple[AllocatedNode, ...]  # in rank order
    # Environment variables for NCCL and gloo, which ranks inherit.
    variables: dict[str, str] = Field(default_factory=dict)


AND = " + "  # separates the names of different devices in `Machine.device_name`


class Machine(Data):
    """A machine as seen by the process that launches cases on it."""

    device: Literal["cpu", "cuda"]
    device_name: str
    hardware_class: str  # class of the accelerator; without a GPU, the processor and the number of its cores
    devices: int  # number of GPUs; on a CPU, number of cores that this process may use
    memory_bytes: int  # memory of one GPU, or of the machine, in bytes
    driver: str | None = None  # version of the GPU driver
    note: str | None = None  # explains what could not be determined, and why
    nodes: int = Field(default=1, ge=1)  # number of machines like this one that a case may use
    interconnect: str | None = None  # ports and Gbit/s: `8xib400`, `eth100`; None if unknown
    # The nodes that a scheduler has allocated. None without a scheduler, and in the result of `for_nodes`.
    allocation: Allocation | None = None

    def for_nodes(self, nodes: int) -> Machine:
        """Return the machine on which a case with this number of nodes is measured.

        Several nodes have a hardware class of their own, which includes their interconnect.
        """
        if nodes == 1:
            return self.replace(nodes=1, interconnect=None, allocation=None)
        name = "-".join(filter(None, [self.hardware_class, self.interconnect]))
        return self.replace(hardware_class=name, allocation=None)

    @property
    def product(self) -> Accelerator | None:
        """The accelerator's entry in `PRODUCTS`, or None."""
        return PRODUCTS.get(self.device_name) if self.device == "cuda" else None

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Compute capability of the GPUs, such as `(9, 0)`. None for a CPU, or a GPU not in `PRODUCTS`."""
        return None if self.product is None else divmod(ARCHITECTURES[self.product.family], 10)

    @property
    def architecture(self) -> str:
        """The architecture that determines the kernels: `cpu`, `sm90`, or an unknown GPU's hardware class."""
        if self.device == "cpu":
            return "cpu"
        capability = ARCHITECTURES.get(self.hardware_class.split("-")[0])
        return self.hardware_class if capability is None else f"sm{capability}"

    def peak_flops(self, precision: str) -> float | None:
        """Return the dense peak FLOP/s of one device at a case's precision. None if unknown; never guessed.

        For `float8`, with or without block scales, this is twice the 16-bit peak. The datasheets of all
        `PRODUCTS` with float8 (compute capability 8.9 or more) also give twice the 16-bit peak. The only
        exception is the L40S, whose datasheet rounds this value up by 1%. On a GPU that emulates bf16, the
        peak of bf16 is unknown.
        """
        if self.emulates(precision):
            return None
        is_float8 = precision == "float8"
        # pragma: no mutate (0, 0): every known GPU has a higher capability
        if is_float8 and (self.compute_capability or (0, 0)) < (8, 9):
            return None
        peak = getattr(self.product, "peak_fp32" if precision == "fp32" else "peak_16bit", None)
        return None if peak is None else 1e12 * peak * (2 if is_float8 else 1)

    def emulates(self, precision: str) -> bool:
        """Return whether this GPU has no tensor cores for a precision. GPUs before Ampere have none for bf16.

        Matmuls in bf16 are then slower than in fp32 (10.7 instead of 14.5 TFLOP/s on a V100, according to
        https://github.com/zzc0721/torch-performance-test-data/issues/140), and no datasheet gives a peak.
        """
        capability = self.compute_capability
        return precision.startswith("bf16") and capability is not None and capability < (8, 0)

    @property
    def link_bytes_per_s(self) -> float | None:
        """One-way bandwidth in bytes/s between a device and the others of this machine. None if unknown."""
        link = None if self.product is None else self.product.link_gb_s
        return None if link is None else 1e9 * link

    def why_not(self, hardware: str) -> str | None:
        """Return why a case for `hardware` does not run here, or None. `a100` matches `a100-80gb-sxm`."""
        is_any_gpu = hardware == "gpu" and self.device == "cuda"
        if is_any_gpu or f"{self.hardware_class}-".startswith(f"{hardware}-"):
            return None
        return f"it is meant for {hardware}, but this machine is {self.hardware_class}"
