import pytest

from perfsuite.analysis.step_time.kernels import Device, kernel_s, product_speed
from perfsuite.case.hardware import PRODUCTS
from perfsuite.errors import PredictionError
from perfsuite.results.device_log import Kernel
from tests.analysis.step_time.steps import DEVICE, PLAIN, kernel

A100 = "NVIDIA A100-SXM4-80GB"
H100 = "NVIDIA H100 80GB HBM3"
V100 = "Tesla V100-SXM2-16GB"


def product(
    rows: int, columns: int, depth: int, dtype: str = "bfloat16", operator: str = "aten.mm"
) -> Kernel:
    flops = 2 * rows * columns * depth
    sizes = (1, rows, columns, depth, 0)
    return Kernel(0, "forward", operator, 0, 0, 2, dtype, flops, sizes, is_strided=False)


def attention(queries: int, *, causal: bool, dtype: str = "bfloat16") -> Kernel:
    sizes = (queries, queries, 128, int(causal))
    return Kernel(0, "forward", FLASH, 0, 0, 3, dtype, 10**12, sizes, is_strided=False)


FLASH = "aten._scaled_dot_product_flash_attention"


def test_elementwise_kernels_take_bytes_over_bandwidth() -> None:
    assert kernel_s(kernel(2.0), DEVICE) == ("memory", 2.0)
    half = Device(1e12, 1e12, PLAIN._replace(memory_share=0.5, shortest_kernel_us=1e6))
    assert kernel_s(kernel(2.0), half) == ("memory", 2 / 0.5 + 1)


def test_an_embedding_reads_only_what_it_writes() -> None:
    lookup = kernel(0)._replace(operator="aten.embedding", read_bytes=10**12, written_bytes=10**9)
    assert kernel_s(lookup, DEVICE)[1] == pytest.approx(2 / 0.7)


def test_operators_on_lists_take_several_kernels() -> None:
    slow = Device(1e12, 1e12, PLAIN._replace(shortest_kernel_us=1e6))
    lists = kernel(0)._replace(operator="aten._foreach_mul_", tensors=180)
    assert kernel_s(lists, slow)[1] == 3
    assert kernel_s(lists._replace(tensors=1), slow)[1] == 1


def test_small_tensors_stay_in_the_cache() -> None:
    cached = Device(1e12, 1e12, PLAIN._replace(cache_mb=1000))
    assert kernel_s(kernel(0.5), cached)[1] == pytest.approx(0.5 / 1.6)
    assert kernel_s(kernel(0.7), cached)[1] == pytest.approx(0.7)


def test_copies_of_strided_tensors_are_slower() -> None:
    copy = kernel(1.0)._replace(operator="aten.copy_", is_strided=True)
    assert kernel_s(copy, DEVICE)[1] == pytest.approx(1 / 0.75)


def test_a_large_product_reaches_its_share() -> None:
    assert product_speed(1, 1 << 15, 1 << 15, 1 << 20, 1) == pytest.approx(1, abs=2e-3)


def test_a_wave_that_is_hardly_filled_takes_a_whole_one() -> None:
    one_wave = product_speed(1, 256 * 108, 128, 4096, 108)
    assert product_speed(1, 256 * 109, 128, 4096, 108) < 0.75 * one_wave


def test_short_sums_are_slower() -> None:
    speeds = [product_speed(1, 8192, 8192, depth, 108) for depth in (64, 128, 1024, 8192)]
    assert speeds == sorted(speeds)
    assert speeds[1] < 0.55


def test_the_dtype_chooses_the_peak() -> None:
    peaks = Device(peak_16bit=1e12, peak_fp32=1e11, speed=PLAIN._replace(matmul_share=0.5))
    times = {dtype: kernel_s(product(1024, 1024, 1024, dtype), peaks)[1] for dtype in ("bfloat16", "float32")}
    assert times["float32"] == pytest.approx(5 * times["bfloat16"])
    scaled = product(1024, 1024, 1024, operator="aten._scaled_mm")
    assert kernel_s(scaled, peaks)[1] == pytest.approx(times["bfloat16"] / 2)


def test_a_causal_mask_halves_the_work() -> None:
    whole = kernel_s(attention(8192, causal=False), DEVICE)
    assert whole[0] == "attention"
    assert whole[1] == pytest.approx(1)
    assert kernel_s(attention(8192, causal=True), DEVICE)[1] == pytest.approx(0.5)


def test_short_sequences_and_fp32_slow_attention() -> None:
    device = DEVICE._replace(speed=PLAIN._replace(attention_share=0.3))
    whole = kernel_s(attention(8192, causal=False), device)[1]
    assert kernel_s(attention(512, causal=False), device)[1] > 1.8 * whole
    assert kernel_s(attention(8192, causal=False, dtype="float32"), device)[1] == 2 * whole


@pytest.mark.parametrize(("name", "tflop_s"), [(A100, 312 / 6), (H100, 989.5 / 6), (V100, 15.7)])
@pytest.mark.parametrize("times", [1, 2])
def test_attention_in_fp32_has_its_own_peak(name: str, tflop_s: float, times: int) -> None:
    device = Device.of(name, PRODUCTS[name]).slower(times)
    work = attention(1 << 16, causal=False, dtype="float32")
    assert kernel_s(work, device)[1] == pytest.approx(times * work.flops / (1e12 * tflop_s), rel=1e-3)


@pytest.mark.parametrize("name", [A100, H100, V100])
@pytest.mark.parametrize("size", [64, 1000, 4096, 8192, 28672])
def test_no_product_beats_the_peak(name: str, size: int) -> None:
    device = Device.of(name, PRODUCTS[name])
    work = product(size, size, size)
    assert kernel_s(work, device)[1] > work.flops / device.peak_16bit


def test_an_unknown_card_gets_no_number() -> None:
    for name in ("NVIDIA L4", "Some GPU"):
        with pytest.raises(PredictionError, match=f"the times of kernels on {name} are unknown"):
            Device.of(name, PRODUCTS.get(name))
