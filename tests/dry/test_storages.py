"""Fake tensors on the GPU are made directly, because torch would look for a GPU."""

from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from perfsuite.dry.storages import Storages, _blocks, recorded
from perfsuite.dry.streams import stand_ins
from perfsuite.dry.values import NoValues
from perfsuite.frameworks.common.private import FakeTensor, FakeTensorMode
from perfsuite.results.device_log import (
    Allocate,
    DeviceLog,
    EndOfStep,
    Free,
    HostWait,
    RecordEvent,
    UseIn,
    Workspace,
)

GPU = torch.device("cuda", 0)
Make = Callable[..., Any]


@pytest.fixture
def floats(log: DeviceLog, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return a function that makes a fake tensor. The log sees the tensor once an operator uses it."""
    monkeypatch.setattr(torch.UntypedStorage, "resize_", torch.UntypedStorage.resize_)
    monkeypatch.setattr(Tensor, "record_stream", Tensor.record_stream)
    with FakeTensorMode() as mode, NoValues(), recorded(log):

        def make(*shape: int, device: torch.device = GPU, layout: torch.layout = torch.strided) -> Any:
            return FakeTensor(mode, torch.empty(*shape, device="meta", layout=layout), device)

        yield make


def test_results_get_memory_until_they_die(log: DeviceLog, floats: Make) -> None:
    first = floats(4)
    second = first + 1
    del second
    third = first * 2
    assert log.entries == [Allocate(0, 16, 0), Allocate(1, 16, 0), Free(1), Allocate(2, 16, 0)]
    del first, third
    assert log.entries[4:] == [Free(0), Free(2)]


def test_views_have_no_memory_of_their_own(log: DeviceLog, floats: Make) -> None:
    whole = floats(4)
    view = whole.narrow(0, 2, 2).view(2, 1)
    view.add_(1)
    assert log.entries == [Allocate(0, 16, 0)]
    del whole
    assert Free(0) not in log.entries


def test_host_tensors_have_no_device_memory(log: DeviceLog, floats: Make) -> None:
    on_host = floats(4, device=torch.device("cpu"))
    assert (on_host + 1).device.type == "cpu"
    assert log.entries == []


def test_memory_belongs_to_the_current_stream(log: DeviceLog, floats: Make) -> None:
    side = stand_ins(log)["Stream"]()
    given = floats(4)
    with side:
        made = given + 1
    assert log.entries == [Allocate(0, 16, 1), Allocate(1, 16, 1)]
    assert made.device == GPU


def test_resizes_are_logged(log: DeviceLog, floats: Make) -> None:
    flat = floats(4)
    flat.add_(1)
    flat.untyped_storage().resize_(0)
    flat.untyped_storage().resize_(0)
    flat.untyped_storage().resize_(32)
    assert log.entries == [Allocate(0, 16, 0), Free(0), Allocate(0, 32, 0)]


def test_record_stream_is_logged(log: DeviceLog, floats: Make) -> None:
    side = stand_ins(log)["Stream"]()
    tensor = floats(4)
    tensor.record_stream(side)  # before an operator has used it
    tensor.add_(1)
    tensor.narrow(0, 1, 3).record_stream(side)
    assert log.entries == [Allocate(0, 16, 0), UseIn(0, 1)]


def test_reads_and_copies_to_the_host_wait(log: DeviceLog, floats: Make) -> None:
    tensor = floats(1)
    tensor.add_(1)
    tensor.item()
    tensor.to("cpu")
    waits = [RecordEvent(1, 0), HostWait(1), RecordEvent(2, 0), HostWait(2)]
    assert log.entries[1:] == waits
    tensor.to("cpu", non_blocking=True)
    (tensor.to("cpu", non_blocking=True) + 1).item()
    assert log.entries[1:] == waits


@pytest.mark.parametrize("to_gpu", [False, True])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_only_blocking_copies_between_devices_wait(floats: Make, non_blocking: bool, to_gpu: bool) -> None:
    """The operators themselves would look for a GPU."""
    on_gpu = floats(1)
    on_host = floats(1, device=torch.device("cpu"))
    target, source = (on_gpu, on_host) if to_gpu else (on_host, on_gpu)
    given = {"non_blocking": non_blocking}
    assert _blocks((target, source), given, [target, source], [target]) is not non_blocking


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_on_one_device_do_not_wait(floats: Make, non_blocking: bool) -> None:
    on_gpu = floats(1)
    assert not _blocks((on_gpu, on_gpu), {"non_blocking": non_blocking}, [on_gpu, on_gpu], [on_gpu])


def workspaces(log: DeviceLog) -> list[int]:
    """Return the streams in which workspaces were allocated, in order."""
    return [entry.stream for entry in log.entries if isinstance(entry, Workspace)]


def test_each_stream_gets_a_workspace(log: DeviceLog, floats: Make) -> None:
    side = stand_ins(log)["Stream"]()
    matrix = floats(2, 2)
    product = matrix @ matrix
    product = product @ matrix
    assert log.entries[:3] == [Allocate(0, 16, 0), Allocate(1, 16, 0), Workspace(0)], "the result is first"
    with side:
        product = product @ matrix
    assert workspaces(log) == [0, 1]


def test_each_thread_gets_a_workspace(log: DeviceLog) -> None:
    """Autograd multiplies in a thread of its own."""
    with FakeTensorMode() as mode:
        storages = Storages(log)
    matrix = FakeTensor(mode, torch.empty(2, 2, device="meta"), GPU)

    def multiply_twice() -> None:
        with mode, NoValues(), storages:
            product = matrix @ matrix
            torch.mm(product, matrix)

    multiply_twice()
    thread = Thread(target=multiply_twice)
    thread.start()
    thread.join()
    assert workspaces(log) == [0, 0]


def test_products_on_the_host_get_no_workspace(log: DeviceLog, floats: Make) -> None:
    matrix = floats(2, 2, device=torch.device("cpu"))
    assert (matrix @ matrix).shape == (2, 2)
    assert log.entries == []


def test_tensors_without_a_storage_are_ignored(log: DeviceLog, floats: Make) -> None:
    sparse = floats(4, layout=torch.sparse_coo)
    assert (sparse + sparse).shape == (4,)
    assert log.entries == []


def test_nothing_is_recorded_in_a_closed_log(log: DeviceLog, floats: Make) -> None:
    first = floats(4)
    first.add_(1)
    log.add(EndOfStep(1))
    log.close()
    second = first + 1
    del first
    assert second.numel() == 4
    assert log.entries == [Allocate(0, 16, 0), EndOfStep(1)]
