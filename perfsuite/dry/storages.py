"""Record in the log of a simulated GPU when storages are allocated, used and freed. Imports torch."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from perfsuite.frameworks.common.patches import replace, wrap
from perfsuite.frameworks.common.private import (
    FakeTensor,
    HigherOrderOperator,
    TorchDispatchMode,
    active_fake_mode,
    cdata,
    is_wrapper_subclass_type,
    overloadpacket,
    tree_leaves,
)
from perfsuite.results.device_log import Allocate, DeviceLog, Free, UseIn, Workspace
from perfsuite.worker.counting.counter import COPIES, DEVICE, read_by_the_host
from perfsuite.worker.counting.live_memory import storage_of

USES_CUBLAS = frozenset({
    "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addmv", "aten.dot", "aten.vdot",
    "aten._scaled_mm", "aten._scaled_mm_v2", "aten._addmm_activation",
})  # fmt: skip
"""Operators that run in cuBLAS or cuBLASLt, which share their workspaces."""


class Storages(TorchDispatchMode):
    """Records the storages of fake tensors on the GPU.

    The record of a storage begins with the first operator that returns or takes a tensor of this storage.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, because dynamo would otherwise run compiled code eagerly while the mode is active."""
        return True

    def __init__(self, log: DeviceLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log
        self._fake_mode = active_fake_mode()
        # Address of a living storage -> its number, and a weak reference that reports the storage's end.
        self._living: dict[int, tuple[int, Any]] = {}
        self._bytes: list[int] = []  # current size in bytes, by storage number
        # Threads and streams that have multiplied matrices. Each thread has a cuBLAS handle of its own, and
        # each handle has a workspace for each stream.
        self._multiplied: set[tuple[int, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        if not self.log.is_open or func is DEVICE:
            return func(*args, **kwargs)
        # A wrapper, such as a DTensor, calls the operator again on the tensors inside.
        if any(is_wrapper_subclass_type(kind) and not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented
        out = func(*args, **kwargs)
        if active_fake_mode() is self._fake_mode:  # DTensor also runs operators in modes of its own
            self._see_call(func, args, kwargs, out)
        return out

    def _see_call(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        given: list[Any] = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        made: list[Any] = [leaf for leaf in tree_leaves(out) if isinstance(leaf, FakeTensor)]
        for tensor in (*given, *made):
            self._see(tensor)
        if isinstance(func, HigherOrderOperator):
            return
        operator = str(overloadpacket(func))
        if operator in USES_CUBLAS and any(map(_is_on_gpu, made)):
            self._multiply()
        is_read = any(map(_is_on_gpu, read_by_the_host(operator, args, kwargs, given)))
        if is_read or (operator in COPIES and _blocks(args, kwargs, given, made)):
            self.log.read_on_host()

    def _multiply(self) -> None:
        """Record a workspace. A kernel requests its workspace after its result is allocated."""
        user = (get_ident(), self.log.stream)
        if user not in self._multiplied:
            self._multiplied.add(user)
            self.log.add(Workspace(self.log.stream))

    def _see(self, tensor: Any) -> None:
        storage = storage_of(tensor)
        if storage is None or not _is_on_gpu(tensor):
            return
        number = self._number_of(storage)
        if number is None:
            number = self._begin(storage)
        size = storage.nbytes()
        # The storage is new, or an operator has enlarged an `out=` tensor that was too small.
        if size != self._bytes[number]:
            self._change(number, size)

    def _begin(self, storage: Any) -> int:
        """Watch a new storage, and return its number."""
        address = cdata(storage)
        number = len(self._bytes)
        self._bytes.append(0)
        self._living[address] = number, weakref.ref(storage, lambda _: self._died(address))
        return number

    def _change(self, number: int, size: int) -> None:
        self._bytes[number] = size
        self.log.add(Allocate(number, size, self.log.stream) if size else Free(number))

    def resized(self, storage: Any, size: int) -> None:
        """Record that a storage is about to be resized to `size` bytes."""
        number = self._number_of(storage)
        if number is not None and self._bytes[number] != size:
            self._change(number, size)

    def used_in(self, tensor: Tensor, stream: Any) -> None:
        """Record that a stream uses a tensor (`Tensor.record_stream`)."""
        number = self._number_of(tensor.untyped_storage())
        if number is not None:
            self.log.add(UseIn(number, stream.number))

    def _number_of(self, storage: Any) -> int | None:
        """Return the number of a storage; None if no operator has returned or taken it on the GPU."""
        return self._living.get(cdata(storage), (None, None))[0]

    def _died(self, address: int) -> None:
        number, _ = self._living.pop(address)
        if self._bytes[number]:
            self._change(number, 0)


@contextlib.contextmanager
def recorded(log: DeviceLog) -> Iterator[None]:
    """Record storages in the `with` block. Enter it once in a process, inside of the fake tensor mode.

    `resize_` and `record_stream` are replaced with functions that record, because no dispatch mode sees calls
    of these two for fake tensors.
    """
    storages = Storages(log)

    def resizing(resize: Any) -> Any:
        @functools.wraps(resize)
        def resized(storage: Any, size: int) -> Any:
            storages.resized(storage, size)
            return resize(storage, size)

        return resized

    wrap(torch.UntypedStorage, "resize_", resizing)
    replace(Tensor, "record_stream", lambda tensor, stream: storages.used_in(tensor, stream))
    with storages:
        yield


def _is_on_gpu(tensor: Any) -> bool:
    return bool(tensor.fake_device.type == "cuda")


def _blocks(args: Any, kwargs: Any, given: list[Any], made: list[Any]) -> bool:
    """Return whether a copy from or to the GPU waits for the GPU, as `memcpy_and_sync` of torch does."""
    if kwargs.get("non_blocking", any(args[2:])):
        return False
    return bool(given and made) and _is_on_gpu(given[-1]) != _is_on_gpu(made[0])
