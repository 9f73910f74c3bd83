"""Provide values that fake tensors lack, and simulate the other ranks. Worker side; imports torch."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.library import Library

from perfsuite.dry import decisions, generation, imports
from perfsuite.frameworks.common import model, private, weights
from perfsuite.frameworks.common.patches import module, nothing, replace, replace_everywhere, wrap
from perfsuite.frameworks.common.private import (
    FakeStore,
    FakeTensor,
    FakeWork,
    HigherOrderOperator,
    TorchDispatchMode,
    cdata,
    changes_in_place,
    disable_current_modes,
    fake_collectives,  # noqa: F401  the collectives of fake tensors
    is_param,
    is_wrapper_subclass,
    overloadpacket,
    own_parameters,
    parse_to,
    swap_tensor_impl,
    tree_leaves,
)
from perfsuite.worker.counting.counter import DEVICE

if TYPE_CHECKING:
    from perfsuite.case.case import Case


class NoValues(TorchDispatchMode):
    """Returns a value when the host reads a fake tensor: True for a bool and 1 for a number.

    True means that no token is masked, and 1 is a valid step counter. Tests for NaNs or infinities find only
    finite numbers, and a gradient scaler's flag for infinities is 0. So no step is skipped.

    An operator that is called with the device `cpu:0` uses `cpu`, as for real tensors. Fake tensors would
    keep the index, and `cpu:0` would differ from `cpu`.
    """

    # Compiled code runs some operators through higher-order operators, such as `run_and_save_rng_state`.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, because dynamo would otherwise run compiled code eagerly while the mode is active."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A shortcut: the fake tensor mode returns the same device, but needs much more time.
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        aten = torch.ops.aten
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        device = kwargs.get("device")
        if device is not None and device.type == "cpu":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if kwargs.get("pin_memory"):
            return _pinned(func, args, kwargs)
        if func is aten.is_pinned.default and type(args[0]) is Tensor:
            with disable_current_modes():
                return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return _answer(args[0])
        if func is aten.equal.default:
            return True
        # This operator subtracts found_inf, which has the shape (1,), from a scalar step counter. Only the
        # kernel of a GPU accepts these two shapes, so the operator is skipped.
        if func is aten._foreach_sub_.List:
            return None
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            args[1].found_inf = True
        out = func(*args, **kwargs)
        if overloadpacket(func) in _TESTS:
            _answer_test(overloadpacket(func), args, out)
        return out


def _pinned(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return a new tensor in pinned memory.

    An uninitialised tensor of integers is real, because DDP's reducer copies the map of used parameters
    through such a tensor, and asserts in C++ that the tensor is pinned and has an address. Other tensors are
    fake.
    """
    out = func(*args, **{**kwargs, "pin_memory": False})
    if overloadpacket(func) not in _NOT_FILLED or not _is_whole(out.dtype) or not torch.cuda.is_available():
        return out
    with disable_current_modes():
        return torch.ones(out.shape, dtype=out.dtype, pin_memory=True)


class WholeNumbersAreReal(NoValues):
    """Lets integer tensors on the CPU keep their values: scripts draw samples and split batches with them.

    An operator is computed if all of its tensors are real integers. If one of the tensors is fake, so is the
    result. While data are loaded, operators on real floating-point tensors are computed as well. A few
    numbers also keep their values on the device and in collectives (`decisions`).
    """

    loads_data = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            return self._communicate(func, types, args, kwargs)
        if not _is_real(func, args, kwargs or {}, whole=not self.loads_data):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if func.namespace != "aten":
                return out
            generation.follow(func, args, out)
            return decisions.follow(func, args, kwargs or {}, out)
        # Do not pin memory, because the device does not exist.
        if overloadpacket(func) is torch.ops.aten._pin_memory:
            return args[0]
        with disable_current_modes():
            out = func(*args, **kwargs or {})
            return out.fill_(1) if overloadpacket(func) in _NOT_FILLED else out

    def _communicate(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run a collective, which does nothing, and update the numbers that it would have changed."""
        if _holds_fakes(args):
            out = super().__torch_dispatch__(func, types, args, kwargs)
        else:
            # The fake mode would create a fake tensor for each real one, and these would be counted as a leak
            # of the script.
            with disable_current_modes():
                out = func(*args, **kwargs or {})
        decisions.communicate(func, args)
        return out


def _holds_fakes(data: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(data))


_NOT_FILLED = (
    *(torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided),
    *(torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided, torch.ops.aten.empty_permuted),
)
"""Operators that return uninitialised memory. A collective of fake tensors does not fill this memory. The
tensors are filled with ones, the value that `_answer` returns."""
_MAKE_NUMBERS = (torch.ops.aten.randint, torch.ops.aten.randperm, torch.ops.aten.arange)


def _is_real(func: Any, args: Any, kwargs: dict[str, Any], *, whole: bool) -> bool:
    """Return whether an operator uses only real CPU tensors and, with `whole`, only integers."""
    device = kwargs.get("device")
    dtype = kwargs.get("dtype")
    if func.namespace != "aten" or (device is not None and device.type != "cpu"):
        return False
    given = tree_leaves((args, kwargs))
    tensors = [each for each in given if isinstance(each, Tensor)]
    if tensors:
        return all(
            type(each) is Tensor and each.device.type == "cpu" and (not whole or _is_whole(each.dtype))
            for each in tensors
        )
    if not whole:
        return True
    if dtype is not None:
        return _is_whole(dtype)
    return overloadpacket(func) in _MAKE_NUMBERS and not any(isinstance(each, float) for each in given)


def _is_whole(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


_ASK_FOR_NANS = frozenset({"isnan", "isinf", "isposinf", "isneginf"})
_KEEP_ANSWERS = frozenset(
    {
        *("any", "all", "max", "min", "amax", "amin", "mean", "sum", "_to_copy", "clone", "detach", "alias"),
        *(
            "view",
            "_unsafe_view",
            "unsqueeze",
            "squeeze",
            "expand",
            "permute",
            "select",
            "slice",
            "stack",
            "cat",
        ),
    }
)
"""If all elements of the input have the same value, the result of these operators has this value as well. For
a sum, this holds only if the value is 0."""
_COMBINE_ANSWERS = frozenset(
    {
        *("logical_not", "logical_and", "logical_or", "logical_xor", "bitwise_not", "bitwise_and"),
        *(
            "bitwise_or",
            "bitwise_xor",
            "mul",
            "add",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "maximum",
            "minimum",
        ),
    }
)
"""Operators that compute each element of the result from single elements of the input."""
_TESTS = {
    getattr(torch.ops.aten, name + suffix): name
    for name in _ASK_FOR_NANS | _KEEP_ANSWERS | _COMBINE_ANSWERS
    for suffix in ("", "_")
    if hasattr(torch.ops.aten, name + suffix)
}
"""Operators that test for NaNs and infinities or continue such a test, with their names. The name of
an operator that works in place is given without the final `_`."""


def _answer_test(operator: Any, args: Any, out: Any) -> None:
    """Let `out` remember its value if the value follows from the assumption that all numbers are finite.

    All elements of `out` then have this value.
    """
    if not isinstance(out, Tensor):
        return
    name = _TESTS[operator]
    answer: bool | int | float | None = False if name in _ASK_FOR_NANS else _compared(name, args)
    if answer is None:
        first = args[0][0] if isinstance(args[0], list | tuple) and args[0] else args[0]
        if _answer_of(first) is None:  # a shortcut: almost all operators return here
            return
        leaves = tree_leaves(args)
        answers = [_answer_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        if not answers or None in answers:
            return
        if name in _KEEP_ANSWERS:
            answer = answers[0] if len({*answers}) == 1 and (name != "sum" or not answers[0]) else None
        else:
            with disable_current_modes():
                numbers = [
                    torch.tensor(_answer_of(each)) if isinstance(each, Tensor) else each for each in args
                ]
                answer = getattr(torch.ops.aten, name)(*numbers).item()
    if answer is not None:
        # torch counts the change that an operator makes in place only after the operator has returned.
        changes = changes_in_place(out) + (out is args[0])
        out.finite_answer = (answer, changes)  # type: ignore[attr-defined]


def _compared(name: str, args: Any) -> bool | None:
    """Return the result of comparing a tensor with itself or with infinity; None for other operators."""
    if name not in ("eq", "ne") or not args[0].dtype.is_floating_point:
        return None
    first, second = args
    if first is second:
        return name == "eq"
    return name == "ne" if isinstance(second, float) and math.isinf(second) else None


def _answer_of(tensor: Any) -> bool | int | float | None:
    """Return the value of all elements of a tensor that is part of a test for NaNs or infinities."""
    answer, changes = getattr(tensor, "finite_answer", (None, 0))
    return answer if answer is not None and changes == changes_in_place(tensor) else None


on_invented_bool: Callable[[], object] = nothing
"""Called whenever the host reads a bool whose value is unknown. The host then gets True."""


def _answer(tensor: Any) -> bool | int | float:
    values = decisions.values_of(tensor) if isinstance(tensor, FakeTensor) else None
    if values is not None:
        with disable_current_modes():
            return values.item()
    answer = _answer_of(tensor)
    if answer is not None:
        return answer
    if tensor.dtype is torch.bool:
        if generation.go_on(tensor):
            return False
        on_invented_bool()
        return True
    if not tensor.dtype.is_floating_point:
        return 1
    return 0.0 if hasattr(tensor, "found_inf") else 1.0


def pretend() -> None:
    """Skip code that checks or computes values, for the rest of this process."""
    replace(weights, "_check_initialised", nothing)
    replace(model, "_markov_chain", _zeros)
    replace(torch.nn.Module, "to", cast)
    pretend_tensors()


def pretend_tensors() -> None:
    """Replace functions of tensors, both for models that perfsuite builds and for models of scripts."""
    # In evaluation, multi-head attention takes a fast path whose kernel does not support fake tensors.
    torch.backends.mha.set_fastpath_enabled(False)
    imports.when_imported("transformers", let_masks_be_skipped)
    # Accelerate identifies tensors by their addresses.
    replace(FakeTensor, "data_ptr", lambda self: cdata(self.untyped_storage()))
    replace(FakeTensor, "tolist", lambda self: _numpy(self).tolist())
    replace(torch.Tensor, "data", property(_DATA.__get__, _set_data))
    wrap(FakeTensor, "__new__", _parameter_of_its_class)
    # `trunc_normal_` would draw values again and again until they fit.
    for name in ("normal_", "trunc_normal_", "uniform_"):
        replace(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)


_DATA: Any = torch.Tensor.data  # a descriptor


def _set_data(self: Any, data: Any) -> None:
    """Let `tensor.data = data` move a tensor to the device of `data`, for example when FSDP2 moves a model.

    If the tensor has kept its values, such as integers in a buffer, and `data` is fake, the tensor becomes
    fake.
    """
    decisions.forget(self)
    if isinstance(data, FakeTensor) and not isinstance(self, FakeTensor):
        _swap(self, data.detach().requires_grad_(self.requires_grad))
        return
    _DATA.__set__(self, data)
    if isinstance(data, FakeTensor):
        self.fake_device = data.fake_device


def _parameter_of_its_class(new: Any) -> Any:
    """Let `type(parameter)(tensor, requires_grad=...)` create a parameter.

    Accelerate creates parameters with this call. The type of a fake parameter is `FakeTensor`, whose
    constructor has different arguments.
    """

    def made(cls: Any, first: Any = None, *args: Any, **kwargs: Any) -> Any:
        requires_grad = args[0] if args and isinstance(args[0], bool) else kwargs.get("requires_grad")
        if isinstance(first, FakeTensor) and (requires_grad is not None or kwargs.get(is_param.name)):
            return nn.Parameter(first, requires_grad=requires_grad is not False)
        return new(cls, first, *args, **kwargs)

    return made


def let_masks_be_skipped(transformers: Any) -> None:
    """Keep transformers from taking fake tensors as a sign of tracing.

    While tracing, transformers creates full masks, with which no fused attention runs. Since version 5,
    transformers uses `is_fake_tensor` as a test for tracing. Earlier versions (seen in 4.50 to 4.57) do not
    have this function, and skip masks for fake tensors too.
    """
    if Version(transformers.__version__).major >= 5:
        replace(module("transformers.utils.import_utils"), "is_fake_tensor", lambda tensor: False)


def cast(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `Module.to`: only cast the tensors, because they are on their device from the start."""
    _, dtype, *_ = parse_to(*args, **kwargs)
    new: dict[Any, nn.Parameter] = {}  # the new parameter for each old one, so that tied parameters stay tied
    for owner in self.modules() if dtype is not None else ():
        for name, before in own_parameters(owner).items():
            if before is not None and before.is_floating_point() and before.dtype is not dtype:
                if before not in new:
                    new[before] = nn.Parameter(before.detach().to(dtype), requires_grad=before.requires_grad)
                own_parameters(owner)[name] = new[before]
        for name, buffer in [*owner.named_buffers(recurse=False, remove_duplicate=False)]:
            if buffer.is_floating_point() and buffer.dtype is not dtype:
                setattr(owner, name, buffer.to(dtype))
    return self


def _zeros(case: Case, data_rank: int) -> Tensor:
    return torch.zeros(model.DISTINCT_BATCHES * case.micro_batch, case.sample_length, dtype=torch.int64)


def pretend_answers() -> None:
    """Replace the functions with which scripts read a tensor's values without an operator."""
    replace(torch.utils, "swap_tensors", _swap)
    replace(FakeTensor, "__format__", _format)
    replace(FakeTensor, "numpy", _numpy)
    replace(FakeTensor, "__deepcopy__", _deepcopy)
    wrap(torch, "tensor", _of_tensors)
    replace(torch, "inference_mode", _inference_mode)


def _inference_mode(mode: Any = True) -> Any:
    """Replace `torch.inference_mode`, in which dispatch modes would get operators that are not decomposed."""
    if callable(mode):
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else contextlib.nullcontext()


def _deepcopy(self: Any, memo: Any) -> Any:
    """Copy a tensor with an operator.

    Torch's own function copies the bytes at the address of the tensor. A fake tensor has no address.
    """
    if id(self) in memo:
        return memo[id(self)]
    copied = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
    for name in vars(self).keys() - vars(copied).keys():
        setattr(copied, name, copy.deepcopy(getattr(self, name), memo))
    if self.grad is not None:
        copied.grad = copy.deepcopy(self.grad, memo)
    return copied


def _of_tensors(tensor: Any) -> Any:
    """Let `torch.tensor` accept lists of fake tensors.

    Torch reads the values in such a list without an operator, so no dispatch mode could provide them.
    """

    def answered(data: Any) -> Any:
        if isinstance(data, list | tuple):
            return [answered(each) for each in data]
        return _answer(data) if isinstance(data, FakeTensor) and data.dim() == 0 else data

    def made(data: Any, **options: Any) -> Any:
        holds = isinstance(data, list | tuple) and _holds_fakes(data)
        return tensor(answered(data) if holds else data, **options)

    return made


def _numpy(self: Tensor, **options: Any) -> Any:
    values = decisions.values_of(self)
    if values is not None:
        with disable_current_modes():
            return (values.float() if values.dtype is torch.bfloat16 else values.clone()).numpy()
    dtype = torch.float32 if self.dtype is torch.bfloat16 else self.dtype
    name = str(dtype).removeprefix("torch.")
    # Imported here, because numpy is optional. Without it, `Tensor.numpy` does not work either.
    import numpy as np

    return np.ones(tuple(self.shape), dtype=name)


def _format(self: Any, spec: str) -> str:
    return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)


def _swap(first: Any, second: Any) -> None:
    """Replace `torch.utils.swap_tensors`, which moves modules.

    Torch's version rejects tensors with weak references. `first` keeps the attributes that a script has set,
    such as Megatron's `allreduce` of experts. Torch moves a module of real tensors by setting their `data`,
    which keeps attributes. Torch swaps only fake tensors and wrappers, such as DTensors.
    """
    for tensor in (first, second):
        decisions.forget(tensor)
    is_wrapper = is_wrapper_subclass(first) or is_wrapper_subclass(second)
    own = set() if is_wrapper else vars(first).keys() - vars(second).keys()
    kept = {name: vars(first)[name] for name in own}
    swap_tensor_impl(first, second)
    slots: Any = copyreg._slotnames  # type: ignore[attr-defined]
    for name in ("__class__", "__dict__", *{*slots(type(first)), *slots(type(second))}):
        values = [(tensor, getattr(tensor, name)) for tensor in (first, second) if hasattr(tensor, name)]
        for tensor, _ in values:
            if name not in ("__class__", "__dict__"):
                delattr(tensor, name)
        for tensor, value in values:
            setattr(second if tensor is first else first, name, value)
    for name, value in kept.items():
        setattr(first, name, value)


# Collectives of several tensors. Fake tensors have no rule for these. Each returns a `Work`.
COALESCED = (
    "allreduce_coalesced_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced_",
)
MESH_METHODS = (
    (DeviceMesh, "__init__"),
    (DeviceMesh, "__getitem__"),
    *map(private.place, ("mesh_concatenate", "mesh_flatten", "mesh_unflatten")),
)
"""Methods that read the rank numbers in a `DeviceMesh`."""


# Keep this object, because its registrations end when it is deleted.
_LIBRARY = Library("c10d", "IMPL")


def pretend_ranks() -> None:
    """Simulate the other ranks with fake process groups. Call this after all imports."""
    init = dist.init_process_group
    new_group = dist.new_group
    get_backend = dist.get_backend
    backends: dict[
        Any, str
    ] = {}  # backend that the script has asked for, by group; None is the default group

    def init_process_group(
        backend: Any = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        *_: Any,
        **__: Any,
    ) -> None:
        if store is None:
            rank, world_size = _place_in_group(init_method or "env://", rank, world_size)
        backends[None] = backend or "undefined"
        with disable_current_modes():
            init("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kept = {name: kwargs[name] for name in ("group_desc", "use_local_synchronization") if name in kwargs}
        with disable_current_modes():
            made = new_group(ranks, backend="fake", **kept)
        backends[made] = backend or backends[None]
        return made

    def backend_of(group: Any = None) -> Any:
        get_backend(group)  # raises an error if there is no such group
        return dist.Backend(backends.get(group, backends[None]))

    def all_gather_object(results: list[Any], value: Any, *args: Any, **kwargs: Any) -> None:
        results[:] = [value] * len(results)

    replace_everywhere(dist, "init_process_group", init_process_group)
    replace_everywhere(dist, "new_group", group)
    # Only for scripts and libraries: torch itself needs to know that the groups are fake.
    replace(dist, "get_backend", backend_of)
    replace_everywhere(dist, "broadcast_object_list", nothing)
    replace_everywhere(dist, "all_gather_object", all_gather_object)
    for name in COALESCED:
        _LIBRARY.impl(name, lambda *args, **kwargs: FakeWork().boxed(), "Meta")
    # Let DTensor infer shapes in its own fake mode, so that the operators of this inference are not counted.
    replace(*private.place("detect_fake_mode"), lambda *args: None)
    for owner, name in MESH_METHODS:
        wrap(owner, name, _with_values)
    replace_everywhere(device_mesh, "init_device_mesh", _with_values(device_mesh.init_device_mesh))


def _place_in_group(method: str, rank: int, world_size: int) -> tuple[int, int]:
    """Return the rank and the world size of a script's process group, as `torch.distributed.rendezvous` does.

    Both numbers can differ from those of the case. Raises torch's `ValueError` if an environment variable is
    missing.
    """
    query = parse_qs(urlparse(method).query)
    given = {"rank": rank, "world_size": world_size}
    given |= {name: int(query[name][0]) for name, value in given.items() if value < 0 and name in query}
    if method.startswith("env://"):
        needed = [name.upper() for name, value in given.items() if value < 0]
        for name in (*needed, "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise ValueError(
                    "Error initializing torch.distributed using env:// rendezvous: "
                    f"environment variable {name} expected, but not set"
                )
        given |= {name.lower(): int(os.environ[name]) for name in needed}
    return given["rank"], given["world_size"]


def _with_values(function: Any) -> Callable[..., Any]:
    """Run `function` without dispatch modes, because rank numbers are tensors whose values matter."""

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        with disable_current_modes():
            return function(*args, **kwargs)

    return outside
