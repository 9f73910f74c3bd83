import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from perfsuite.dry.attention import chosen

V100 = (7, 0)
A100 = (8, 0)
L40S = (8, 9)
H100 = (9, 0)
B200 = (10, 0)


class OnGpu:
    """What is asked of a query."""

    device = torch.device("cuda")

    def __init__(self, dtype: torch.dtype, size: int) -> None:
        self.dtype = dtype
        self.shape = (1, 8, 128, size)


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "masked", "grouped", "kernel"),
    [
        (A100, torch.bfloat16, 128, False, False, "flash"),
        (L40S, torch.float16, 64, False, True, "flash"),
        (H100, torch.bfloat16, 128, False, True, "cudnn"),
        (B200, torch.float16, 64, False, False, "cudnn"),
        (H100, torch.bfloat16, 256, False, False, "flash"),
        (H100, torch.bfloat16, 100, False, False, "flash"),
        (A100, torch.bfloat16, 512, False, False, "efficient"),
        (V100, torch.float16, 64, False, False, "efficient"),
        (H100, torch.float32, 64, False, False, "efficient"),
        (H100, torch.float32, 64, False, True, "plain"),
        (A100, torch.bfloat16, 128, True, False, "efficient"),
    ],
)
def test_the_kernel_that_a_gpu_would_run(
    capability: tuple[int, int], dtype: torch.dtype, size: int, masked: bool, grouped: bool, kernel: str
) -> None:
    query: torch.Tensor = OnGpu(dtype, size)  # type: ignore[assignment]
    assert chosen(capability, query, is_masked=masked, shares_heads=grouped) == kernel


def test_a_kernel_that_is_taken_away_is_not_run() -> None:
    """As torchtitan does it: its fp32 has plain attention alone."""
    single: torch.Tensor = OnGpu(torch.float32, 64)  # type: ignore[assignment]
    half: torch.Tensor = OnGpu(torch.bfloat16, 64)  # type: ignore[assignment]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert chosen(A100, single, is_masked=False, shares_heads=False) == "plain"
        assert chosen(H100, half, is_masked=False, shares_heads=False) == "flash"
    assert chosen(H100, half, is_masked=False, shares_heads=False) == "cudnn"


def test_a_cpu_chooses_by_itself() -> None:
    query = torch.ones(1, 8, 128, 64, dtype=torch.bfloat16)
    assert chosen(H100, query, is_masked=False, shares_heads=False) == "plain"
