from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from perfsuite.dry import attention
from perfsuite.dry.attention import _composed, chosen
from perfsuite.dry.machine import pretended_gpu
from tests.samples import make_case

V100 = (7, 0)
T4 = (7, 5)
A100 = (8, 0)
L40S = (8, 9)
H100 = (9, 0)
B200 = (10, 0)


class OnGpu:
    """Has those attributes of a query that the choice of a kernel depends on."""

    device = torch.device("cuda")

    def __init__(self, dtype: torch.dtype, size: int, *, batch: tuple[int, ...] = (1, 8)) -> None:
        self.dtype = dtype
        self.shape = (*batch, 128, size)


def kernel_of(capability: tuple[int, int], query: Any, value: Any) -> str:
    return chosen(capability, query, value, is_masked=False, shares_heads=False)


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
        (V100, torch.bfloat16, 64, False, False, "plain"),
        (T4, torch.bfloat16, 64, True, False, "plain"),
        (T4, torch.float32, 64, False, False, "efficient"),
        (H100, torch.float32, 64, False, False, "efficient"),
        (H100, torch.float32, 64, False, True, "plain"),
        (A100, torch.bfloat16, 128, True, False, "efficient"),
    ],
)
def test_chooses_the_kernel_that_a_gpu_would_run(
    capability: tuple[int, int], dtype: torch.dtype, size: int, masked: bool, grouped: bool, kernel: str
) -> None:
    query: torch.Tensor = OnGpu(dtype, size)  # type: ignore[assignment]
    assert chosen(capability, query, query, is_masked=masked, shares_heads=grouped) == kernel


@pytest.mark.parametrize(
    ("capability", "size", "of_value", "kernel"),
    [
        (A100, 192, 128, "efficient"),
        (H100, 192, 128, "efficient"),
        (B200, 192, 128, "cudnn"),
        (A100, 128, 64, "efficient"),
        (H100, 128, 64, "cudnn"),
        (H100, 64, 192, "efficient"),
        (H100, 64, 100, "efficient"),
    ],
)
def test_values_may_have_heads_of_another_size(
    capability: tuple[int, int], size: int, of_value: int, kernel: str
) -> None:
    query = OnGpu(torch.bfloat16, size)
    value = OnGpu(torch.bfloat16, of_value)
    assert kernel_of(capability, query, value) == kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch", [(8,), (2, 1, 8)], ids=["three", "five"])
def test_no_kernel_without_four_dimensions(dtype: torch.dtype, batch: tuple[int, ...]) -> None:
    query = OnGpu(dtype, 64, batch=batch)
    assert kernel_of(H100, query, query) == "plain"


def test_a_kernel_that_is_taken_away_is_not_run() -> None:
    """torchtitan takes kernels away like this, so that in fp32 it has only plain attention."""
    single: torch.Tensor = OnGpu(torch.float32, 64)  # type: ignore[assignment]
    half: torch.Tensor = OnGpu(torch.bfloat16, 64)  # type: ignore[assignment]
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        assert chosen(A100, single, single, is_masked=False, shares_heads=False) == "plain"
        assert chosen(H100, half, half, is_masked=False, shares_heads=False) == "flash"
    assert chosen(H100, half, half, is_masked=False, shares_heads=False) == "cudnn"


def test_a_cpu_chooses_by_itself() -> None:
    query = torch.ones(1, 8, 128, 64, dtype=torch.bfloat16)
    assert chosen(H100, query, query, is_masked=False, shares_heads=False) == "plain"


class Operators(TorchDispatchMode):
    """Records the names of the operators that run inside this mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "mask", [None, torch.ones(8, 8, dtype=torch.bool), torch.ones(8, 8)], ids=["none", "bool", "float"]
)
@pytest.mark.parametrize("shares_heads", [False, True])
def test_composed_attention_is_torchs_own(mask: torch.Tensor | None, shares_heads: bool) -> None:
    query = torch.ones(2, 4, 8, 16)
    key = query[:, :2] if shares_heads else query
    options: dict[str, Any] = {"scale": 0.5, "enable_gqa": shares_heads}
    with sdpa_kernel(SDPBackend.MATH), Operators() as chosen_by_torch:
        plain = functional.scaled_dot_product_attention(query, key, key, mask, 0.1, mask is None, **options)
    with Operators() as composed:
        ours = _composed(query, key, key, mask, 0.1, mask is None, **options)
    assert composed.names == chosen_by_torch.names
    assert ours.shape == plain.shape


@pytest.mark.usefixtures("compiling")
def test_compiled_attention_stays_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own function also is one operator.

    If Dynamo looked into our function, the graph would break.
    """
    monkeypatch.setattr(functional, "scaled_dot_product_attention", functional.scaled_dot_product_attention)
    attention.pretend(pretended_gpu("NVIDIA H100 80GB HBM3", make_case().topology))
    attention.keep_from_dynamo()
    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    query = torch.ones(2, 4, 8, 16)

    def attend(x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x)

    torch.compile(attend, backend=note, fullgraph=True)(query)
    targets = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert targets == [functional.scaled_dot_product_attention]


def test_torchs_own_attention_is_left_to_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "allow_in_graph", pytest.fail)
    attention.keep_from_dynamo()
