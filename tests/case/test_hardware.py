import pytest

from perfsuite.case.hardware import (
    ACCELERATORS,
    ARCHITECTURES,
    PRODUCTS,
    Accelerator,
    Allocation,
    Machine,
    hardware_error,
)
from perfsuite.node.machine import gpu_machine
from tests.samples import make_gpu_machine, make_machine

GIB = 2**30


@pytest.mark.parametrize(("name", "product"), PRODUCTS.items(), ids=list(PRODUCTS))
def test_every_product_has_a_source_and_numbers(name: str, product: Accelerator) -> None:
    assert product.family in ARCHITECTURES
    assert len(product.source) > 10
    assert product.form_factor in ("sxm", "sxm3", "pcie", "nvl", "superchip")
    assert "-" not in product.family, "in a case's hardware, the name of the family ends at a dash"
    if product.peak_16bit is None or product.peak_fp32 is None:
        assert (product.peak_16bit, product.peak_fp32) == (None, None)
    else:
        assert 0 < product.peak_fp32 < product.peak_16bit < 10_000
    if product.link_gb_s is not None:
        assert (product.link_gb_s >= 150) == (product.form_factor != "pcie"), "either NVLink or PCIe"


@pytest.mark.parametrize(("name", "product"), PRODUCTS.items(), ids=list(PRODUCTS))
def test_usable_memory_is_slightly_below_nominal(name: str, product: Accelerator) -> None:
    if product.usable_gib is None:
        assert product.usable_source is None
        assert product.memory_bytes == product.memory_gb * GIB
        return
    assert 0.88 * product.memory_gb <= product.usable_gib < product.memory_gb
    assert product.memory_bytes == pytest.approx(product.usable_gib * GIB, abs=1)
    source = product.usable_source or ""
    assert "https://" in source or "'" in source, "an address, or the text of a public log"


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=list(PRODUCTS))
def test_products_of_one_class_are_alike(product: Accelerator) -> None:
    alike = [other for other in PRODUCTS.values() if other.hardware_class == product.hardware_class]
    assert {(other.peak_16bit, other.peak_fp32, other.link_gb_s) for other in alike} == {
        (product.peak_16bit, product.peak_fp32, product.link_gb_s)
    }


@pytest.mark.parametrize(
    ("name", "hardware_class", "peak", "architecture"),
    [
        ("NVIDIA GB300", "gb300-279gb-superchip", 2500e12, "sm103"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000-96gb-pcie", 503.8e12, "sm120"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000server-96gb-pcie", None, "sm120"),
        (
            *("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtxpro6000maxq-96gb-pcie"),
            *(None, "sm120"),
        ),
        ("NVIDIA GH200 144G HBM3e", "gh200-144gb-superchip", 989.5e12, "sm90"),
        ("NVIDIA H20-3e", "h20-141gb-sxm", 148e12, "sm90"),
        ("NVIDIA A16", "a16-16gb-pcie", 17.9e12, "sm86"),
        ("NVIDIA GB10", "gb10-128gb-superchip", None, "sm121"),
        ("Tesla V100-SXM3-32GB", "v100-32gb-sxm3", None, "sm70"),
    ],
)
def test_less_common_gpus_have_a_class(
    name: str, hardware_class: str, peak: float | None, architecture: str
) -> None:
    machine = make_gpu_machine(name)
    assert (machine.hardware_class, machine.architecture) == (hardware_class, architecture)
    assert machine.peak_flops("bf16") == peak
    assert (machine.note is None) == (peak is not None)


EMULATES_BF16 = pytest.mark.parametrize(
    ("name", "fp16"),
    [("Tesla V100-SXM2-32GB", 125e12), ("Tesla V100S-PCIE-32GB", 130e12), ("Tesla T4", 65e12)],
)


@EMULATES_BF16
def test_emulated_bf16_has_no_peak(name: str, fp16: float) -> None:
    machine = make_gpu_machine(name)
    assert [machine.peak_flops(precision) for precision in ("bf16", "bf16-mixed")] == [None, None]
    assert machine.peak_flops("fp16-mixed") == fp16


@EMULATES_BF16
def test_an_older_gpu_emulates_only_bf16(name: str, fp16: float) -> None:
    machine = make_gpu_machine(name)
    assert machine.emulates("bf16-mixed")
    assert not any(machine.emulates(precision) for precision in ("fp16-mixed", "fp32"))


@pytest.mark.parametrize("name", ["NVIDIA A10", "NVIDIA Z9000"])
def test_other_and_unknown_gpus_emulate_nothing(name: str) -> None:
    assert not make_gpu_machine(name).emulates("bf16")


def test_a_v100_has_its_class_and_its_link() -> None:
    machine = make_gpu_machine("Tesla V100-SXM2-32GB")
    assert machine.hardware_class == "v100-32gb-sxm"
    assert machine.peak_flops("fp32") == pytest.approx(15.7e12, rel=1e-14)
    assert machine.link_bytes_per_s == 150e9


@pytest.mark.parametrize(
    ("machine", "architecture"),
    [
        (make_machine(), "cpu"),
        (make_gpu_machine(), "sm90"),
        (make_gpu_machine("NVIDIA H200"), "sm90"),
        (make_gpu_machine("Tesla V100-SXM2-16GB"), "sm70"),
        (make_gpu_machine("NVIDIA B300 SXM6 AC"), "sm103"),
        (make_gpu_machine("NVIDIA Z9000"), "z9000-80gb"),
    ],
)
def test_one_architecture_runs_the_same_kernels(machine: Machine, architecture: str) -> None:
    assert machine.architecture == architecture


def test_several_nodes_form_a_class_of_their_own() -> None:
    nodes = make_gpu_machine().replace(
        nodes=4, interconnect="8xib400", allocation=Allocation(job_id="7", nodes=())
    )
    assert nodes.for_nodes(1) == make_gpu_machine()
    of_two = nodes.for_nodes(2)
    assert (of_two.hardware_class, of_two.nodes) == ("h100-80gb-sxm-8xib400", 4)
    assert (of_two.interconnect, of_two.allocation) == ("8xib400", None)
    assert nodes.replace(interconnect=None).for_nodes(2).hardware_class == "h100-80gb-sxm"


ANY = f"begin with one of {', '.join(ACCELERATORS)}"
H200 = "the known h200 hardware is h200-141gb-nvl, h200-141gb-sxm"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("cpu", None),
        ("cpu-of-any-name", None),
        ("gpu", None),
        ("gpu-80gb", "the known gpu hardware is only gpu"),
        ("h200", None),
        ("h200-141gb", None),
        ("h200-141gb-nvl", None),
        ("h200-141gb-pcie", H200),
        ("h200-141gb-nvl-x", H200),
        ("h200-80gb", H200),
        ("h200-sxm", H200),
        ("h200-141GB-sxm", f"did you mean 'h200-141gb-sxm'? {H200}"),
        ("h200-80GB", H200),
        ("H200-141GB-SXM", f"did you mean 'h200-141gb-sxm'? {ANY}"),
        ("H200-80GB", f"did you mean 'h200'? {ANY}"),
        ("x100", f"did you mean 'v100'? {ANY}"),
        ("quantum", ANY),
    ],
)
def test_unknown_hardware_lists_what_exists(name: str, error: str | None) -> None:
    assert hardware_error(name) == error


@pytest.mark.parametrize(
    ("name", "hardware_class", "peak_16bit", "peak_fp32", "link"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb-sxm", 989.5e12, 67e12, 450e9),
        ("NVIDIA H200", "h200-141gb-sxm", 989.5e12, 67e12, 450e9),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb-sxm", 312e12, 19.5e12, 300e9),
        ("NVIDIA GH200 480GB", "gh200-96gb-superchip", 989.5e12, 67e12, None),
    ],
)
def test_known_gpu_has_a_class_peak_and_link(
    name: str, hardware_class: str, peak_16bit: float, peak_fp32: float, link: float | None
) -> None:
    machine = gpu_machine([name], count=8, memory_bytes=80 * GIB, driver="580.1")
    assert (machine.device, machine.devices, machine.driver) == ("cuda", 8, "580.1")
    assert (machine.hardware_class, machine.note) == (hardware_class, None)
    peaks = {precision: machine.peak_flops(precision) for precision in ("bf16", "bf16-mixed", "fp16-mixed")}
    assert peaks == pytest.approx(dict.fromkeys(peaks, peak_16bit), rel=1e-14)
    assert machine.peak_flops("fp32") == pytest.approx(peak_fp32, rel=1e-14)
    assert machine.link_bytes_per_s == link


@pytest.mark.parametrize(
    ("name", "datasheet"),
    [
        ("NVIDIA H100 80GB HBM3", 3958 / 2),
        ("NVIDIA H100 PCIe", 3026 / 2),
        ("NVIDIA H200 NVL", 3341 / 2),
        ("NVIDIA L40S", 1466 / 2),
        ("NVIDIA L4", 485 / 2),
        ("NVIDIA B200", 72_000 / 8 / 2),
        ("NVIDIA A100-SXM4-80GB", None),
        ("NVIDIA A10G", None),
    ],
)
def test_some_gpus_have_a_peak_of_float8(name: str, datasheet: float | None) -> None:
    """The peaks in the table are TFLOP/s with sparsity, as in the datasheets.

    Without sparsity, they are half as high.
    """
    peak = make_gpu_machine(name).peak_flops("float8")
    assert peak == (None if datasheet is None else pytest.approx(datasheet * 1e12, rel=0.013))
    assert make_machine().peak_flops("float8") is None


@pytest.mark.parametrize(
    ("names", "hardware_class"),
    [
        (["NVIDIA GeForce RTX 2080 Ti"], "geforce-rtx-2080-ti-24gb"),
        (["NVIDIA H100 80GB HBM2e"], "h100-80gb-hbm2e-24gb"),
        (["NVIDIA A100-SXM4-80GB", "NVIDIA H200"], "a100-sxm4-80gb-h200-24gb"),
    ],
)
def test_unknown_gpu_has_a_class_and_a_note(names: list[str], hardware_class: str) -> None:
    machine = gpu_machine(names, count=2, memory_bytes=24 * GIB - 10**6, driver=None)
    assert machine.hardware_class == hardware_class
    assert (machine.product, machine.peak_flops("bf16"), machine.link_bytes_per_s) == (None, None, None)
    assert machine.note is not None
    assert " + ".join(names) in machine.note
    assert "MFU is left out" in machine.note
    assert "its datasheet to perfsuite/case/accelerators.json" in machine.note


@pytest.mark.parametrize(
    ("meant_for", "name", "here"),
    [
        ("a100", "NVIDIA A100-SXM4-80GB", True),
        ("a100-80gb", "NVIDIA A100-SXM4-80GB", True),
        ("a100-80gb-sxm", "NVIDIA A100-SXM4-80GB", True),
        ("a100-40gb", "NVIDIA A100-SXM4-80GB", False),
        ("a100-80gb-pcie", "NVIDIA A100-SXM4-80GB", False),
        ("a100-80gb-sxm-x", "NVIDIA A100-SXM4-80GB", False),
        ("a10", "NVIDIA A100-SXM4-80GB", False),
        ("h100", "NVIDIA H200", False),
        ("h200", "NVIDIA H100 80GB HBM3", False),
        ("l4", "NVIDIA L40S", False),
        ("cpu", "NVIDIA H200", False),
        ("h100", "NVIDIA H100 80GB HBM2e", True),
        ("gpu", "NVIDIA Imaginary X1", True),
        ("h100", "NVIDIA Imaginary X1", False),
        ("gpu", None, False),
        ("cpu", None, True),
        ("h100", None, False),
    ],
)
def test_hardware_matches_by_whole_words(meant_for: str, name: str | None, here: bool) -> None:
    machine = make_machine() if name is None else make_gpu_machine(name)
    reason = machine.why_not(meant_for)
    expected = f"it is meant for {meant_for}, but this machine is {machine.hardware_class}"
    assert reason == (None if here else expected)


def test_chip_without_datasheet_peak_has_no_mfu() -> None:
    machine = make_gpu_machine("NVIDIA A100-SXM-64GB")
    assert machine.hardware_class == "a100-64gb-sxm"
    assert (machine.peak_flops("bf16"), machine.peak_flops("fp32")) == (None, None)
    assert machine.note == (
        "the peak FLOP/s of NVIDIA A100-SXM-64GB is unknown (a chip of its own, with more cores than the "
        "A100's datasheet lists), so MFU is left out"
    )


def test_a_cpu_has_neither_peak_nor_link() -> None:
    machine = make_machine(device_name="NVIDIA H200")
    assert (machine.product, machine.peak_flops("bf16"), machine.link_bytes_per_s) == (None, None, None)
