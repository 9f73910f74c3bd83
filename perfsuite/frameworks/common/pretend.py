"""Make DDP, including its C++ reducer, and FSDP1 work with fake tensors in a dry run. Imports torch.

A dry run sees the reducer's work that goes through the dispatcher. Work that needs values or other ranks is
left out.
"""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perfsuite.frameworks.common import private
from perfsuite.frameworks.common.patches import attribute, nothing, replace, wrap
from perfsuite.frameworks.common.private import cdata, check_reducer_finalized


def fsdp1() -> None:
    """Make FSDP1 shard fake tensors, which have no addresses, for the rest of this process."""
    replace(*private.place("data_ptr_allocated"), lambda tensor: tensor.untyped_storage().nbytes() > 0)
    replace(
        *private.place("same_storage"),
        lambda a, b: cdata(a.untyped_storage()) == cdata(b.untyped_storage()),
    )


def ddp() -> None:
    """Make DDP wrap fake tensors for the rest of this process."""
    replace(*private.place("verify_shapes"), nothing)
    assign = attribute(*private.place("bucket_assignment"))
    first_bytes = attribute(*private.place("first_bucket_bytes"))

    def with_pretended_reducer(init: Any) -> Any:
        @functools.wraps(init)
        def pretended(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            asked = kwargs.get("bucket_cap_mb")  # if no size is given, the first bucket is small
            limits = [first_bytes, 25 << 20] if asked is None else [int(asked * 2**20)]
            as_rebuilt = functools.partial(_as_rebuilt, assign, limits)
            # A reducer for a static graph learns the graph in the first step. It cannot be replaced later.
            is_rebuilt = not (kwargs.get("static_graph") or kwargs.get("find_unused_parameters"))
            if not is_rebuilt:
                replace(*private.place("bucket_assignment"), functools.partial(_reversed, as_rebuilt))
            with _arguments_of(dist, "Reducer") as arguments:
                init(self, module, *args, **kwargs)
            replace(*private.place("bucket_assignment"), assign)
            replace(self, "logger", _NoLog())  # the real logger needs CUDA events
            rebuild = functools.partial(_rebuilt, arguments, as_rebuilt) if is_rebuilt else None
            replace(self, "reducer", _Reducer(self, rebuild))

        return pretended

    wrap(DistributedDataParallel, "__init__", with_pretended_reducer)
    wrap(DistributedDataParallel, "register_comm_hook", _with_hooks_of_scripts)


def _with_hooks_of_scripts(register: Any) -> Any:
    """Let a model's `_Reducer`, whose own hook is already registered, call a hook that a script registers."""

    @functools.wraps(register)
    def registered(self: Any, state: Any, hook: Any) -> None:
        if not isinstance(self.reducer, _Reducer):
            register(self, state, hook)
        elif self.reducer.hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        else:
            self.reducer.hook = functools.partial(hook, state)

    return registered


@contextlib.contextmanager
def _arguments_of(owner: Any, name: str) -> Iterator[list[Any]]:
    """Collect the positional arguments with which `owner.name` is called in the `with` block."""
    function = attribute(owner, name)
    arguments: list[Any] = []

    def called(*args: Any) -> Any:
        arguments.extend(args)
        return function(*args)

    replace(owner, name, called)
    try:
        yield arguments
    finally:
        replace(owner, name, function)


def _as_rebuilt(assign: Any, limits: Any, parameters: Any, at_first: Any, sparse: Any, *more: Any) -> Any:
    """Return the buckets that DDP creates in step 2, if gradients arrive in reverse order of parameters."""
    last = len(parameters) - 1
    buckets, sizes = assign(parameters[::-1], limits, sparse[::-1])
    in_order = [[last - index for index in bucket] for bucket in buckets]
    return in_order, sizes


def _reversed(as_rebuilt: Any, *args: Any) -> Any:
    """Return lists of rebuilt buckets in reverse order.

    `DistributedDataParallel.__init__` reverses the lists again, so the reducer gets the right order.
    """
    in_order, sizes = as_rebuilt(*args)
    return in_order[::-1], sizes[::-1]


def _rebuilt(arguments: list[Any], as_rebuilt: Callable[..., Any]) -> Any:
    """Return a reducer with rebuilt buckets. `arguments` are the arguments that created the old reducer."""
    parameters, at_first, _, group, sparse, *more = arguments
    buckets, sizes = as_rebuilt(parameters, at_first, sparse)
    return attribute(dist, "Reducer")(parameters, buckets, sizes, group, sparse, *more)


def _like_in_c(method: Callable[..., Any]) -> Any:
    """Return a method that torch.compile treats as if it were in C++: not traced, with a graph break."""
    make: Any = ctypes.pythonapi.PyInstanceMethod_New
    make.argtypes = [ctypes.py_object]
    make.restype = ctypes.py_object
    return make(method)


class _NoLog:
    def __getattr__(self, name: str) -> Any:
        return nothing


class _Reducer:
    """A wrapper around a DDP model's C++ reducer.

    When torch would rebuild the buckets, the wrapper replaces the C++ reducer with a new one. Torch rebuilds
    the buckets in the first forward after a backward that reduced gradients. Unlike this class, torch then
    keeps the same reducer, and sends the indices of the new buckets to the other ranks. `rebuild` returns the
    new reducer. `rebuild` itself is None if torch does not rebuild the buckets.
    """

    _rebuild_buckets: ClassVar[Any] = None

    def __init__(self, model: Any, rebuild: Callable[[], Any] | None) -> None:
        self.group = model.process_group
        self.has_reduced = False
        self.hook: Callable[[Any], Any] | None = None  # the hook of the script
        if _Reducer._rebuild_buckets is None:
            # In a launch, this is C++ code. If this Python code were compiled, it would add graph breaks that
            # a launch does not have. `disable` loads dynamo, so `torch.cuda` must already be replaced.
            _Reducer._rebuild_buckets = _like_in_c(torch.compiler.disable(_Reducer._start_step))
        self._model = model
        self._rebuild = rebuild
        self._reducer = model.reducer
        model.register_comm_hook(self, _all_reduce)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _start_step(self) -> bool:
        """Do the work of torch's `_rebuild_buckets`."""
        # As in torch, this raises an error if a parameter got no gradient in the last backward.
        check_reducer_finalized(self._reducer)()
        if self.has_reduced and self._rebuild is not None:
            self._replace_reducer(self._rebuild)
            self._rebuild = None
        return False

    def _replace_reducer(self, rebuild: Callable[[], Any]) -> None:
        self._reducer = None  # as in torch, the old buckets are freed before the new ones are allocated
        self._reducer = rebuild()
        replace(self._model, "reducer", self._reducer)
        self._model.register_comm_hook(self, _all_reduce)
        replace(self._model, "reducer", self)


def _all_reduce(reducer, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  DDP reads annotations
    """Do the reducer's default all-reduce, or call the script's hook.

    Return a filled future, because the future of a fake collective is never filled.
    """
    reducer.has_reduced = True
    if reducer.hook is not None:
        all_reduce = dist.all_reduce
        replace(dist, "all_reduce", functools.partial(_with_future, all_reduce))
        try:
            return reducer.hook(bucket)
        finally:
            replace(dist, "all_reduce", all_reduce)
    buffer = bucket.buffer()
    dist.all_reduce(buffer, group=reducer.group)
    return _filled(buffer)


def _with_future(all_reduce: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the work of an all-reduce. Its future is filled, as hooks expect."""
    work = all_reduce(tensor, *args, **kwargs)
    return None if work is None else _Work(work, tensor)


class _Work:
    """The work of a fake collective, with a filled future."""

    def __init__(self, work: Any, tensor: Any) -> None:
        self._work = work
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def get_future(self) -> Any:
        return _filled([self._tensor])


def _filled(value: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future
