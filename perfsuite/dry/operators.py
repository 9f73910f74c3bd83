"""Record the work of the reported step's operators in the log of a simulated GPU. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from perfsuite.frameworks.common.private import FakeTensor, cdata, schema
from perfsuite.results.counts import Collective
from perfsuite.results.device_log import CollectiveWait, Communicate, DeviceLog, HostCall, Kernel
from perfsuite.worker.counting.counter import OperatorCall, does_work, written
from perfsuite.worker.counting.live_memory import storage_of

WITH_A_SUMMAND = frozenset({"aten.addmm", "aten.baddbmm"})  # their first operand is added to the product
PRODUCTS = frozenset({
    *WITH_A_SUMMAND, "aten.mm", "aten.bmm", "aten._scaled_mm", "aten._scaled_mm_v2", "aten._grouped_mm",
    "aten._scaled_grouped_mm", "aten._scaled_grouped_mm_v2",
})  # fmt: skip
WAIT = "_c10d_functional.wait_tensor"
FUNCTIONAL = (
    "_c10d_functional.",
    "_c10d_functional_autograd.",
    "_dtensor.",
)  # prefixes of collectives that `WAIT` waits for
IN_BACKWARD = ("backward", "recompute")
SMALL = 4096  # number of elements up to which the layout of a tensor does not matter


class Operators:
    """Records the operators of the counted steps (`Listener`).

    After an error, nothing more is recorded, but the counting of the steps goes on.
    """

    def __init__(self, log: DeviceLog) -> None:
        self.error: Exception | None = None  # the first error, after which the log has no more operators
        self._log = log
        self._running: list[int] = []  # asynchronous collectives that nothing has waited for, in order
        self._results: dict[int, int] = {}  # number of the collective, by address of its result's storage
        self._was_in_backward = False

    def see_wrapper(self) -> None:
        """Record a call on tensors that wrap other tensors."""
        self._log.add(HostCall("wrapper"))

    def see_call(self, call: OperatorCall) -> None:
        """Record a call of an operator."""
        if self.error is None and self._log.is_open:
            try:
                self._record(call)
            except Exception as error:
                self.error = error

    def _record(self, call: OperatorCall) -> None:
        is_in_backward = call.phase in IN_BACKWARD
        if self._was_in_backward and not is_in_backward:
            self._end_backward()
        self._was_in_backward = is_in_backward
        if call.collective is not None:
            self._communicate(call, call.collective)
        elif call.operator == WAIT:
            self._wait_for(self._results.get(cdata(storage_of(call.given[0]))))
        elif not does_work(call.function):
            self._log.add(HostCall("view"))
        elif any(map(_is_on_gpu, (*call.given, *call.made))):
            self._log.add(_kernel(call, self._log.stream))
        else:
            self._log.add(HostCall("host"))

    def see_wait(self) -> None:
        """Record a call of `Work.wait`, assuming that a program waits for collectives in call order."""
        last = self._log.entries[-1] if self._log.entries else None
        is_of_sync_call = isinstance(last, Communicate) and not last.is_async
        if self._running and not is_of_sync_call:
            self._wait_for(self._running[0])

    def _end_backward(self) -> None:
        """Wait for all collectives. C++ code does this, unseen by perfsuite, when gradients are complete."""
        for number in [*self._running]:
            self._wait_for(number)

    def _wait_for(self, number: int | None) -> None:
        if number in self._running:
            self._running.remove(number)
            self._log.add(CollectiveWait(self._log.stream, number))

    def _communicate(self, call: OperatorCall, collective: Collective) -> None:
        number = self._log.new_collective()
        is_functional = call.operator.startswith(FUNCTIONAL)
        is_async = is_functional or _is_async(call)
        if is_async:
            self._running.append(number)
        if is_functional:
            self._results.update((cdata(storage_of(tensor)), number) for tensor in call.made)
        self._log.add(
            Communicate(
                number=number,
                stream=self._log.stream,
                phase=collective.phase,
                kind=collective.kind,
                ranks=collective.ranks,
                apart=collective.apart,
                bytes=collective.bytes,
                is_async=is_async,
            )
        )


def _is_async(call: OperatorCall) -> bool:
    """Return the option `async_op` of a c10d operator. Torch leaves a default value out of `args`."""
    names = [argument.name for argument in schema(call.function).arguments]
    if "async_op" not in names:
        return True  # send and receive
    index = names.index("async_op")
    default = schema(call.function).arguments[index].default_value
    given = call.args[index] if index < len(call.args) else call.kwargs.get("async_op", default)
    return bool(given)


def _kernel(call: OperatorCall, stream: int) -> Kernel:
    given = _different(call.given)
    taken = {id(tensor) for tensor in given}
    made = [tensor for tensor in call.made if id(tensor) not in taken]
    changed = _different(written(call.function, call.args))
    return Kernel(
        stream=stream,
        phase=call.phase,
        operator=call.operator,
        read_bytes=_bytes(given),
        written_bytes=_bytes((*made, *changed)),
        tensors=len(given),
        dtype=str((given or made)[0].dtype).removeprefix("torch."),
        flops=call.flops,
        sizes=_sizes(call),
        is_strided=any(map(_is_strided, (*given, *made))),
    )


def _is_on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on the GPU. Reading a fake tensor's `device` would call an operator."""
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return bool(device.type == "cuda")


def _different(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return how many bytes the tensors occupy. Dimensions along which a tensor is expanded occupy none."""
    total = 0
    for tensor in tensors:
        elements = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            elements *= size if stride else min(size, 1)
        total += elements * tensor.element_size()
    return total


def _is_strided(tensor: Tensor) -> bool:
    is_large = tensor.dim() > 1 and tensor.numel() > SMALL
    return is_large and not tensor.is_contiguous() and 0 not in tensor.stride()


def _sizes(call: OperatorCall) -> tuple[int, ...]:
    if call.operator in PRODUCTS:
        first = 1 if call.operator in WITH_A_SUMMAND else 0
        return _product_sizes(call.args[first], call.args[first + 1])
    if call.flops and "attention" in call.operator:
        first = 1 if "backward" in call.operator else 0
        return _attention_sizes(call, call.args[first : first + 2])
    return ()


def _product_sizes(left: Tensor, right: Tensor) -> tuple[int, ...]:
    """Return the sizes of a product. In a grouped product, the groups are assumed to be equally large."""
    rows, depth = left.shape[-2:]
    columns = right.shape[-1]
    batch = 1
    if left.dim() == 3:
        batch = left.shape[0]
    elif right.dim() == 3:  # the groups split the rows
        batch = right.shape[0]
        rows = max(1, rows // batch)
    strides = left.stride()
    is_transposed = left.dim() == 2 and strides[0] == 1 and strides[1] > 1
    return batch, rows, columns, depth, int(is_transposed)


def _attention_sizes(call: OperatorCall, operands: Sequence[Tensor]) -> tuple[int, ...]:
    query, key = operands
    arguments = schema(call.function).arguments
    causal: Any = call.kwargs.get("is_causal", False)
    for argument, value in zip(arguments, call.args, strict=False):
        if argument.name == "is_causal":
            causal = value
    return query.shape[-2], key.shape[-2], query.shape[-1], int(causal)
