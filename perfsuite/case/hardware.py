"""A machine as data, and a table of the known accelerators.

A baseline belongs to a hardware class: accelerator, memory, form factor (`h100-80gb-sxm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Literal, NamedTuple

from pydantic import Field

from perfsuite.documents import Data


class Accelerator(NamedTuple):
    """One product. Peaks are dense (no sparsity), in TFLOP/s, per device; None if no datasheet gives them."""

    family: str
    memory_gb: int
    form_factor: str
    peak_16bit: float | None
    """The peak of bf16 with fp32 accumulation; of fp16 on Volta and Turing, which have no bf16."""
    peak_fp32: float | None
    """The peak of fp32 outside the tensor cores, because torch leaves TF32 off by default."""
    link_gb_s: float | None
    """The bandwidth of one device to the others of its machine in GB/s, in one direction: of NVLink where the
    form factor has it (`sxm`, `nvl`, NVL72), else of PCIe with 16 lanes, bridges between pairs left out. None
    if no datasheet gives it."""
    source: str
    """Where the peaks and the link are published; datasheets give the sum of both directions."""

    @property
    def hardware_class(self) -> str:
        """The class, as `h100-80gb-sxm`: family, memory, form factor."""
        return f"{self.family}-{self.memory_gb}gb-{self.form_factor}"


_V100 = "NVIDIA V100 datasheet, Jan 2020"
_A10G = "AWS G5 instance page; NVIDIA A10G datasheet"
_A100 = "NVIDIA A100 datasheet, Jun 2021"
_H100 = "NVIDIA H100 datasheet, 2023 (figures with sparsity halved)"
_H200 = "NVIDIA H200 datasheet, 2024 (figures with sparsity halved)"
_L40S = "NVIDIA L40S datasheet, 2023 (dense figures)"
_A800 = "NVIDIA A800 datasheet, 2022 (computes as the A100)"
_H20 = "NVIDIA H20's specification as server makers publish it, 2024 (dense figures)"
_H800 = "NVIDIA H800 datasheet, 2023 (sparsity halved)"
_GH200 = "NVIDIA GH200 datasheet, 2023 (sparsity halved)"
_GB200 = "NVIDIA GB200 NVL72 datasheet, 2024 (a 72nd; figures with sparsity halved)"
_B200 = "NVIDIA HGX B200 datasheet, 2024 (per GPU)"
_B300 = "NVIDIA HGX B300 datasheet, 2025 (an eighth; figures with sparsity halved)"
_GA102 = "NVIDIA Ampere GA102 whitepaper, 2020 (tensor cores with fp32 accumulation, dense)"
_AD102 = "NVIDIA Ada whitepaper, 2022 (tensor cores with fp32 accumulation, dense)"
_GB202 = "NVIDIA RTX Blackwell whitepaper, 2025 (tensor cores with fp32 accumulation, dense)"
_LEONARDO = "a chip of its own, with more cores than the A100's datasheet tells of"

PRODUCTS: Mapping[str, Accelerator] = {  # by the name that NVML gives
    "Tesla V100-SXM2-16GB": Accelerator("v100", 16, "sxm", 125, 15.7, 150, _V100),
    "Tesla V100-SXM2-32GB": Accelerator("v100", 32, "sxm", 125, 15.7, 150, _V100),
    "Tesla V100-PCIE-16GB": Accelerator("v100", 16, "pcie", 112, 14, 16, _V100),
    "Tesla V100-PCIE-32GB": Accelerator("v100", 32, "pcie", 112, 14, 16, _V100),
    "Tesla T4": Accelerator("t4", 16, "pcie", 65, 8.1, 16, "NVIDIA T4 datasheet, 2019"),
    "NVIDIA A10G": Accelerator("a10g", 24, "pcie", 70, 35, None, _A10G),
    "NVIDIA A100-SXM4-40GB": Accelerator("a100", 40, "sxm", 312, 19.5, 300, _A100),
    "NVIDIA A100-SXM4-80GB": Accelerator("a100", 80, "sxm", 312, 19.5, 300, _A100),
    "NVIDIA A100-SXM-64GB": Accelerator("a100", 64, "sxm", None, None, None, _LEONARDO),
    "NVIDIA A100-PCIE-40GB": Accelerator("a100", 40, "pcie", 312, 19.5, 32, _A100),
    "NVIDIA A100 80GB PCIe": Accelerator("a100", 80, "pcie", 312, 19.5, 32, _A100),
    "NVIDIA A800-SXM4-80GB": Accelerator("a800", 80, "sxm", 312, 19.5, 200, _A800),
    "NVIDIA A800 80GB PCIe": Accelerator("a800", 80, "pcie", 312, 19.5, 32, _A800),
    "NVIDIA A10": Accelerator("a10", 24, "pcie", 125, 31.2, 32, "NVIDIA A10 datasheet, 2021"),
    "NVIDIA A30": Accelerator("a30", 24, "pcie", 165, 10.3, 32, "NVIDIA A30 datasheet, 2021"),
    "NVIDIA A40": Accelerator("a40", 48, "pcie", 149.7, 37.4, 32, "NVIDIA A40 datasheet, 2021"),
    "NVIDIA RTX A6000": Accelerator("rtxa6000", 48, "pcie", 154.8, 38.7, 32, _GA102),
    "NVIDIA GeForce RTX 3090": Accelerator("rtx3090", 24, "pcie", 71, 35.6, 32, _GA102),
    "NVIDIA GeForce RTX 4090": Accelerator("rtx4090", 24, "pcie", 165.2, 82.6, 32, _AD102),
    "NVIDIA GeForce RTX 5090": Accelerator("rtx5090", 32, "pcie", 209.5, 104.8, 64, _GB202),
    "NVIDIA RTX 6000 Ada Generation": Accelerator("rtx6000ada", 48, "pcie", 364.2, 91.1, 32, _AD102),
    "NVIDIA L40": Accelerator("l40", 48, "pcie", 181.05, 90.5, 32, "NVIDIA L40 datasheet, 2022"),
    "NVIDIA L4": Accelerator("l4", 24, "pcie", 121, 30.3, 32, "NVIDIA L4 datasheet, 2023 (sparsity halved)"),
    "NVIDIA L40S": Accelerator("l40s", 48, "pcie", 362, 91.6, 32, _L40S),
    "NVIDIA H100 80GB HBM3": Accelerator("h100", 80, "sxm", 989.5, 67, 450, _H100),
    "NVIDIA H100 PCIe": Accelerator("h100", 80, "pcie", 756, 51, 64, _H100),
    "NVIDIA H100 NVL": Accelerator("h100", 94, "nvl", 835.5, 60, 300, _H100),
    "NVIDIA H200": Accelerator("h200", 141, "sxm", 989.5, 67, 450, _H200),
    "NVIDIA H200 NVL": Accelerator("h200", 141, "nvl", 835.5, 60, 450, _H200),
    "NVIDIA H800": Accelerator("h800", 80, "sxm", 989.5, 67, 200, _H800),
    "NVIDIA H20": Accelerator("h20", 96, "sxm", 148, 44, 450, _H20),
    "NVIDIA GH200 480GB": Accelerator("gh200", 96, "superchip", 989.5, 67, None, _GH200),
    "NVIDIA B200": Accelerator("b200", 180, "sxm", 2250, 75, 900, _B200),
    "NVIDIA B300 SXM6 AC": Accelerator("b300", 288, "sxm", 2250, 75, 900, _B300),
    "NVIDIA GB200": Accelerator("gb200", 186, "superchip", 2500, 80, 900, _GB200),
}

ACCELERATORS: tuple[str, ...] = ("cpu", "gpu", *sorted({product.family for product in PRODUCTS.values()}))
"""Every name that a case's `hardware` may begin with, and so every hardware marker. `gpu` is any GPU, in the
table or not."""

ARCHITECTURES: Mapping[str, int] = {
    "v100": 70,
    "t4": 75,
    **dict.fromkeys(("a100", "a30", "a800"), 80),
    **dict.fromkeys(("a10", "a10g", "a40", "rtx3090", "rtxa6000"), 86),
    **dict.fromkeys(("l4", "l40", "l40s", "rtx4090", "rtx6000ada"), 89),
    **dict.fromkeys(("gh200", "h100", "h20", "h200", "h800"), 90),
    **dict.fromkeys(("b200", "gb200"), 100),
    "b300": 103,
    "rtx5090": 120,
}
"""The compute capability of each family, times ten: libraries choose kernels by it. By NVIDIA's table,
developer.nvidia.com/cuda-gpus."""


def hardware_error(name: str) -> str | None:
    """Return why no machine can match an entry of a case's `hardware`, or None."""
    family = name.split("-")[0]
    classes = [product.hardware_class for product in PRODUCTS.values() if product.family == family]
    lower = name.lower()
    is_known = name != lower and hardware_error(lower) is None
    near = lower if is_known else next(iter(get_close_matches(family.lower(), ACCELERATORS)), family)
    hint = f"did you mean {near!r}? " if near != family else ""
    if family not in ACCELERATORS:
        return f"{hint}begin with one of {', '.join(ACCELERATORS)}"
    if family == "cpu" or name == "gpu" or any(f"{known}-".startswith(f"{name}-") for known in classes):
        return None
    return f"{hint}{family} is known as {', '.join(sorted(set(classes))) or 'just gpu'}"


class AllocatedNode(Data):
    """One node of an allocation."""

    name: str
    interface: str | None = None
    """The network interface that its host name leads to: gloo's, unless GLOO_SOCKET_IFNAME names another."""


class Allocation(Data):
    """The nodes that a scheduler has given to a session, as it tells of them."""

    job_id: str
    nodes: tuple[AllocatedNode, ...]
    """In the order of the ranks."""
    variables: dict[str, str] = Field(default_factory=dict)
    """What is set for NCCL and gloo in the environment of the session, which its ranks have, too."""


AND = " + "  # between the names of unlike devices in `Machine.device_name`


class Machine(Data):
    """A machine as the driver sees it."""

    device: Literal["cpu", "cuda"]
    device_name: str
    hardware_class: str
    """The accelerator's class; on a machine without one the processor and the number of its cores."""
    devices: int
    """The number of GPUs, or of cores that this process may use."""
    memory_bytes: int
    """The memory of one GPU, or of the machine, in bytes."""
    driver: str | None = None
    """The version of the GPU driver."""
    note: str | None = None
    """What could not be found out, and why."""
    nodes: int = Field(default=1, ge=1)
    """How many machines like this one a case may use."""
    interconnect: str | None = None
    """How each is connected, with ports and Gbit/s: `8xib400`, `eth100`; None if it is not known."""
    allocation: Allocation | None = None
    """What a scheduler tells of them; None without one, and for a case."""

    def for_nodes(self, nodes: int) -> Machine:
        """Return the machine that a case of so many nodes is measured on.

        Several nodes are of a hardware class of their own, which names how they are connected.
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
        """Of its GPUs, as `(9, 0)`; None of a CPU and of a GPU that is not in `PRODUCTS`."""
        return None if self.product is None else divmod(ARCHITECTURES[self.product.family], 10)

    @property
    def architecture(self) -> str:
        """What decides which kernels run: `cpu`, `sm90`; the hardware class of a GPU that is not known."""
        if self.device == "cpu":
            return "cpu"
        capability = ARCHITECTURES.get(self.hardware_class.split("-")[0])
        return self.hardware_class if capability is None else f"sm{capability}"

    def peak_flops(self, precision: str) -> float | None:
        """The dense peak of one device at a case's precision in FLOP/s, or None: it is never guessed.

        Of `float8`, also with scales of blocks, the datasheets of all `PRODUCTS` that have it (compute
        capability 8.9 or more) give twice the peak of 16 bits; that of the L40S, which rounds, 1 % more.
        """
        is_float8 = precision == "float8"
        if is_float8 and (self.compute_capability or (0, 0)) < (8, 9):
            return None
        peak = getattr(self.product, "peak_fp32" if precision == "fp32" else "peak_16bit", None)
        return None if peak is None else 1e12 * peak * (2 if is_float8 else 1)

    @property
    def link_bytes_per_s(self) -> float | None:
        """The bandwidth of one device to the others of this machine in one direction, or None."""
        link = None if self.product is None else self.product.link_gb_s
        return None if link is None else 1e9 * link

    def why_not(self, hardware: str) -> str | None:
        """Return why a case for `hardware` does not run here, or None. `a100` matches `a100-80gb-sxm`."""
        is_any_gpu = hardware == "gpu" and self.device == "cuda"
        if is_any_gpu or f"{self.hardware_class}-".startswith(f"{hardware}-"):
            return None
        return f"it is meant for {hardware}, this machine is {self.hardware_class}"
