"""Fake tensors on the GPU are made directly, because torch would look for a GPU."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from perfsuite.dry.operators import Operators
from perfsuite.dry.values import NoValues
from perfsuite.frameworks.common.private import FakeTensor, FakeTensorMode
from perfsuite.results.device_log import (
    CollectiveWait,
    Communicate,
    DeviceLog,
    Entry,
    HostCall,
    Kernel,
)
from perfsuite.worker.counting.counter import OperatorCall, StepCounter
from tests.fake_group import fake_group

GPU = torch.device("cuda", 0)
Make = Callable[..., Any]


@pytest.fixture
def floats(log: DeviceLog) -> Iterator[Make]:
    """Return a function that makes a fake tensor. The log sees the operators on the tensor."""
    with FakeTensorMode() as mode, NoValues():

        def make(*shape: int, device: torch.device = GPU, dtype: torch.dtype = torch.float32) -> Any:
            before = len(log.entries)
            made = FakeTensor(mode, torch.empty(*shape, device="meta", dtype=dtype), device)
            del log.entries[before:]
            return made

        weight = torch.nn.Parameter(make(2))
        with StepCounter([torch.optim.SGD([weight])], listener=Operators(log)) as counter:
            yield make
        assert counter.error is None


def kernels(log: DeviceLog) -> list[Kernel]:
    return [entry for entry in log.entries if isinstance(entry, Kernel)]


def without_kernels(log: DeviceLog) -> list[Entry]:
    return [entry for entry in log.entries if not isinstance(entry, Kernel)]


def test_a_product_has_its_sizes(log: DeviceLog, floats: Make) -> None:
    left = floats(3, 5)
    right = floats(5, 7)
    log.stream = 2
    _ = left @ right
    assert log.entries == [
        Kernel(
            stream=2,
            phase="forward",
            operator="aten.mm",
            read_bytes=4 * (15 + 35),
            written_bytes=4 * 21,
            tensors=2,
            dtype="float32",
            flops=2 * 3 * 5 * 7,
            sizes=(1, 3, 7, 5, 0),
            is_strided=False,
        )
    ]


def test_sums_and_batches_have_the_sizes_of_products(log: DeviceLog, floats: Make) -> None:
    torch.addmm(floats(7), floats(3, 5), floats(5, 7))
    torch.bmm(floats(4, 3, 5), floats(4, 5, 7))
    torch.mm(floats(5, 3).t(), floats(5, 7))
    assert [kernel.sizes for kernel in kernels(log)] == [(1, 3, 7, 5, 0), (4, 3, 7, 5, 0), (1, 3, 7, 5, 1)]


def test_attention_has_its_lengths_and_mask(log: DeviceLog, floats: Make) -> None:
    query = floats(2, 4, 16, 64, dtype=torch.bfloat16)
    key = floats(2, 4, 32, 64, dtype=torch.bfloat16)
    torch.ops.aten._scaled_dot_product_flash_attention(query, key, key, 0.0, True)
    (attention,) = kernels(log)
    assert attention.sizes == (16, 32, 64, 1)
    assert attention.flops == 2 * 2 * 4 * 16 * 32 * (64 + 64)
    assert attention.dtype == "bfloat16"


def test_changes_in_place_are_read_and_written(log: DeviceLog, floats: Make) -> None:
    floats(4).add_(floats(4))
    (kernel,) = kernels(log)
    assert (kernel.read_bytes, kernel.written_bytes, kernel.tensors) == (32, 16, 2)


def test_expanded_dimensions_take_no_bytes(log: DeviceLog, floats: Make) -> None:
    _ = floats(1, 4).expand(8, 4) + floats(8, 4)
    (kernel,) = kernels(log)
    assert (kernel.read_bytes, kernel.written_bytes) == (16 + 128, 128)


def test_only_large_tensors_are_strided(log: DeviceLog, floats: Make) -> None:
    for size in (64, 65):
        _ = floats(size, 64).t() + 1
    assert [kernel.is_strided for kernel in kernels(log)] == [False, True]


def test_other_calls_cost_the_host(log: DeviceLog, floats: Make) -> None:
    floats(4).view(2, 2)
    _ = floats(4, device=torch.device("cpu")) + 1
    assert log.entries == [HostCall("view"), HostCall("host")]


def test_wrappers_are_recorded_before_their_tensors(log: DeviceLog) -> None:
    with fake_group(rank=0, world_size=2):
        whole = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0, 1]), [Shard(0)])
        with StepCounter([torch.optim.SGD([torch.ones(2)])], listener=Operators(log)):
            _ = whole + 1
    assert log.entries == [HostCall("wrapper"), HostCall("host")]


def test_a_synchronous_collective_needs_no_wait(log: DeviceLog, floats: Make) -> None:
    with fake_group(rank=0, world_size=4):
        dist.all_reduce(floats(8))
    call = Communicate(1, 0, "forward", "all_reduce", 4, 1, 32, is_async=False)
    assert without_kernels(log) == [call]


def test_work_is_awaited_in_order(log: DeviceLog, floats: Make) -> None:
    with fake_group(rank=0, world_size=4):
        works = [dist.all_reduce(floats(8), async_op=True) for _ in range(2)]
        log.stream = 1
        for work in works:
            work.wait()
    calls = [Communicate(number, 0, "forward", "all_reduce", 4, 1, 32, is_async=True) for number in (1, 2)]
    assert without_kernels(log) == [*calls, CollectiveWait(1, 1), CollectiveWait(1, 2)]


def test_functional_results_are_awaited_by_name(log: DeviceLog, floats: Make) -> None:
    with fake_group(rank=0, world_size=4):
        name = dist.distributed_c10d._get_default_group().group_name
        first = torch.ops._c10d_functional.all_reduce(floats(8), "sum", name)
        second = torch.ops._c10d_functional.all_reduce(floats(8), "sum", name)
        functional.wait_tensor(second)
        functional.wait_tensor(first)
    assert [entry for entry in log.entries if isinstance(entry, CollectiveWait)] == [
        CollectiveWait(0, 2),
        CollectiveWait(0, 1),
    ]


def test_the_end_of_backward_awaits_collectives(log: DeviceLog, floats: Make) -> None:
    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Any) -> Any:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            dist.all_reduce(gradient, async_op=True)
            return gradient

    on_host = torch.device("cpu")  # autograd has no thread for a GPU that does not exist
    leaf = floats(8, device=on_host).requires_grad_()
    later = floats(8)
    with fake_group(rank=0, world_size=4):
        Reduced.apply(leaf).sum().backward()  # type: ignore[no-untyped-call]
        assert not any(isinstance(entry, CollectiveWait) for entry in log.entries)
        later.add_(1)
    assert isinstance(log.entries[-1], Kernel)
    assert log.entries[-2] == CollectiveWait(0, 1)


def test_an_error_ends_the_record_of_operators(log: DeviceLog, floats: Make) -> None:
    operators = Operators(log)
    product = floats(2, 2)
    broken = OperatorCall(
        torch.ops.aten.mm.default, "aten.mm", "forward", (), {}, [product], [product], 16, None
    )
    operators.see_call(broken)
    assert isinstance(operators.error, IndexError)
    operators.see_call(broken._replace(args=(product, product)))
    assert log.entries == []
