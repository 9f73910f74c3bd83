"""Count the work of an optimizer step by intercepting every operator that the step calls. Imports torch.

torch calls a `TorchDispatchMode` for each operator of any framework, also in backward, and also if C++ code
calls the operator. The mode is entered between two steps and left between two later steps
(`perfsuite.worker.counting.steps`).

Torch's own modes are not sufficient, and one mode is cheaper than several:

- `CommDebugMode` reports calls without bytes, groups or dtypes, and does not report send, recv and barrier.
- `FSDPMemTracker` follows modules from the start, cannot be entered between two steps, and supports only
  FSDP2.
- `FlopCounterMode` does not count attention on a CPU, and does not distinguish phases.
"""

import contextlib
import functools
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch
from torch.utils.flop_counter import flop_registry

from perfsuite.frameworks.common.private import (
    FakeTensor,
    HigherOrderOperator,
    TorchDispatchMode,
    active_fake_mode,
    call_kernel,
    current_dispatch_mode_stack,
    exclude_key,
    fake_tensor,
    has_kernel,
    is_wrapper_subclass_type,
    overloadpacket,
    schema,
    tree_leaves,
)
from perfsuite.results.counts import COUNTED_STEP, Collective, Counts, Phase
from perfsuite.worker.counting import gradients, python_calls
from perfsuite.worker.counting.collectives import OPERATORS, call_of
from perfsuite.worker.counting.gradients import makes_a_graph
from perfsuite.worker.counting.live_memory import COMMUNICATION, KEPT, LiveMemory, entered
from perfsuite.worker.counting.python_calls import OURS, PythonCounter
from perfsuite.worker.hooks import calls
from perfsuite.worker.observation.optimizers import parameters_of
from perfsuite.worker.observation.replicas import local
from perfsuite.worker.observation.second_step import in_backward

aten = torch.ops.aten


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of the attention scores and of their product with the values, ignoring masks.

    Shapes are (batch, heads, positions, head size). Keys and values can have fewer heads than queries.
    """
    return 2 * query.shape[:3].numel() * key.shape[2] * (query.shape[3] + value.shape[3])


def _attention_backward_flops(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    """Return the FLOPs of attention's backward.

    Backward computes the scores again, and the gradients of scores, values, queries and keys.
    """
    return 2 * query.shape[:3].numel() * key.shape[2] * (3 * query.shape[3] + 2 * value.shape[3])


def _product_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a matrix product, a batched matrix product or a grouped matrix product.

    In a grouped product, the groups split the rows, the columns or the summed dimension. The total FLOPs do
    not depend on the sizes of the groups. If the groups split T rows and each group's matrix is d x f, the
    total is 2 T d f.
    """
    batch = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return int(2 * batch * a.shape[-2] * a.shape[-1] * b.shape[-1])


FROM_TORCH = (
    aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_mm,
    aten.convolution, aten._convolution, aten.cudnn_convolution, aten._slow_conv2d_forward,
    aten.convolution_overrideable, aten.convolution_backward,
    aten._efficient_attention_forward, aten._efficient_attention_backward,
    aten._flash_attention_forward, aten._flash_attention_backward,
)  # fmt: skip
"""Operators for which torch's formula is used. The list is fixed, because a newer torch with more formulas
would otherwise count FLOPs that an older torch does not count. If you add an operator, change `METHOD`."""
FLOPS: dict[Any, Callable[..., int]] = {
    operator: flop_registry[operator] for operator in FROM_TORCH if operator in flop_registry
}
"""Operator without its overload -> the formula for its FLOPs. Some formulas come from torch (`FROM_TORCH`).
All others are our own. Torch's formulas for fused attention reject grouped-query attention (seen in 2.11).
Torch has no formula for the fused attention operator of CPUs, for grouped products or for newer scaled
products."""
for _name in ("_grouped_mm", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"):
    if hasattr(aten, _name):
        FLOPS[getattr(aten, _name)] = _product_flops
for _name in ("cudnn_attention", "efficient_attention", "flash_attention", "flash_attention_for_cpu"):
    FLOPS[getattr(aten, f"_scaled_dot_product_{_name}")] = _attention_flops
    FLOPS[getattr(aten, f"_scaled_dot_product_{_name}_backward")] = _attention_backward_flops
PRODUCTS = re.compile(  # names of operators that multiply matrices. Those without a formula are reported
    r"(^|[._])(mm|addmm|bmm|addbmm|matmul|gemm|mv|gemv|addmv|(tri)?linear(?!\d)|euclidean|cdist|encoder"
    r"|attention|attn|fmha|rnn|lstm|gru|conv|convolution)(?![a-z])"
)
HOST_READS = frozenset({
    "aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.bincount",
    "aten.unique_dim", "aten._unique2", "aten.unique_consecutive",
})  # fmt: skip
"""Operators that make the host wait for a value of a device tensor, or for the shape of a result."""
BY_A_MASK = frozenset({"aten.index", "aten.index_put", "aten.index_put_"})
"""Operators that make the host wait if an index is a mask. The host does not wait if a single value is
written to the masked elements, because torch then calls `masked_fill_`, which does not need the number of
masked elements."""
MOST_OPERATORS = 5000
"""In a counted step, garbage is collected each time this many operators have run, for example in rollouts."""
DEVICE = torch.ops.prim.device.default
"""The operator that returns the device of a fake tensor. It is called when C++ code reads `device`."""
COMPOSITE = "CompositeImplicitAutograd"
"""The dispatch key of the kernels that only call other operators."""
AUTOCAST = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}  # type of a device -> the dispatch key of autocast
COPIES = frozenset({"aten._to_copy", "aten.copy_"})
LOOKUPS = frozenset({"aten.embedding", "aten._embedding_bag", "aten._embedding_bag_forward_only"})
"""Operators that look up tokens. Their second argument is the tokens."""
NO_KERNEL = frozenset({
    "_c10d_functional._wrap_tensor_autograd", "_c10d_functional.wait_tensor",
    "aten._local_scalar_dense", "aten._unsafe_view", "aten.empty", "aten.empty_like", "aten.empty_strided",
    "aten.is_same_size", "aten.lift_fresh", "aten.new_empty", "aten.new_empty_strided", "aten.record_stream",
    "aten.set_", "fsdp.record_grad_output_stream", "prim.device", "profiler._record_function_enter_new",
    "profiler._record_function_exit",
})  # fmt: skip
"""Operators that give the device no work, although torch does not mark them as views."""
ALLOCATIONS = ("aten.empty", "aten.new_empty")  # prefixes of names of operators that do not fill their result

OF_A_DRY_RUN = (str(Path(fake_tensor.__file__).parent), str(Path(OURS) / "dry"), weakref.__file__)
"""Files of Python code that only a dry run calls: fake tensors, the simulated GPU, and weak references, whose
callbacks run when tensors are freed."""


class OperatorCall(NamedTuple):
    """A call of an operator in a counted step."""

    function: Any  # with its overload
    operator: str  # without overload, such as `aten.mm`
    phase: Phase
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    given: list[Tensor]
    made: list[Tensor]
    flops: int  # 0 if there is no formula for the operator
    collective: Collective | None


class Listener(Protocol):
    """An object that is notified of the calls in counted steps."""

    def see_call(self, call: OperatorCall) -> None:
        """Process a call of an operator, after the operator has run."""

    def see_wrapper(self) -> None:
        """Process a call on wrappers of tensors, before the operator is called on the wrapped tensors."""

    def see_wait(self) -> None:
        """Process a call of `Work.wait`."""


class StepCounter(TorchDispatchMode):
    """Counts the work between one `end_step` and the next, while the mode is entered.

    `parameters` are the parameters of the model, including frozen ones. The `optimizers` can also have other
    parameters. `listener` is notified of each call.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, because dynamo would otherwise run compiled code eagerly while the mode is active."""
        return True

    def __init__(
        self,
        optimizers: Sequence[Any],
        parameters: Sequence[Tensor] = (),
        listener: Listener | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listener = listener
        self.memory = LiveMemory(self._phase)
        # The first error in counting. It is kept here, because it must not reach the training.
        self.error: Exception | None = None
        # Whether the mode has been entered and not exited. Calls are counted only while this is True. The
        # check is needed because autograd can reactivate the mode after it was exited.
        self.is_entered = False
        self.collectives: set[str] = set()  # operators of collectives called since the mode was entered
        self._has_gpu = torch.cuda.is_available()
        # The ids of the step counters that torch's optimizers keep on the host.
        self._step_counters: set[int] = set()
        # The ids (`LiveMemory.number`) of storages that were allocated since the mode was entered, and not
        # written yet.
        self._unfilled: set[int | None] = set()
        # The ids of storages that were computed from other storages since the mode was entered.
        self._computed: set[int | None] = set()
        self._optimizers = optimizers
        self._parameters = tuple(parameters)
        self.memory.counts_host = all(each.device.type == "cpu" for each in self._all_parameters())
        self._in_optimizer = False
        self._in_other_optimizer = False
        self._uncollected = 0  # number of operators since garbage was collected
        # Whether the optimizer's step runs forward and backward in a closure, as in Lightning's `fit`.
        self._runs_closure = False
        self._closure_has_begun = False
        self._closure_had_backward = False
        self._fake_mode = active_fake_mode()
        self.python = PythonCounter(self._phase, OF_A_DRY_RUN if self._fake_mode is not None else ())
        _keep_from_dynamo()
        self._begin()
        self._note_state()

    def _begin(self) -> None:
        self._calls: list[Collective] = []
        self._first_convolved = ""  # dtype and shape of the input of the first convolution in forward
        self._totals: defaultdict[str, Counter[str]] = defaultdict(Counter)  # field of `Counts` -> its totals

    def __enter__(self) -> Any:
        self._watching = contextlib.ExitStack()
        for owner, name, context in self._unseen():
            self._watching.enter_context(entered(owner, name, context))
        self.is_entered = True
        self._stalls_before = calls.stalls.copy()
        self._computed.clear()
        self._unfilled.clear()
        self.collectives.clear()
        super().__enter__()  # type: ignore[no-untyped-call]
        self.python.start()
        return self

    def _unseen(self) -> Iterator[tuple[Any, str, Callable[..., contextlib.AbstractContextManager[Any]]]]:
        """Yield the owner and name of each method that dispatch modes do not see, and a callback for it."""

        def resize(storage: Any, size: int) -> contextlib.AbstractContextManager[None]:
            self._guarded(self._note_resize, storage, size)  # FSDP frees and allocates memory this way
            return contextlib.nullcontext()

        def read(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
            # Count only in the thread that has entered this mode. Only this thread's stack contains the mode.
            is_ours = any(mode is self for mode in current_dispatch_mode_stack())
            if is_ours and self._is_waited_for(tensor):
                self._totals["host_reads"][self._phase()] += 1
            return contextlib.nullcontext()

        def listen(*_: Any) -> contextlib.AbstractContextManager[None]:
            assert self._listener is not None
            self._guarded(self._listener.see_wait)
            return contextlib.nullcontext()

        yield torch.UntypedStorage, "resize_", resize
        yield torch.Tensor, "tolist", read
        if "tolist" in vars(FakeTensor):  # in a dry run
            yield FakeTensor, "tolist", read
        yield dist.Work, "wait", lambda *_, **__: self.memory.waiting()
        if self._listener is not None:  # in a dry run, in which collectives return subclasses of `Work`
            for kind in dist.Work.__subclasses__():
                if "wait" in vars(kind):
                    yield kind, "wait", listen

    def __exit__(self, *error: Any) -> Any:
        self.python.stop()
        self._watching.close()
        self._stalls = calls.stalls - self._stalls_before
        self.is_entered = False
        return super().__exit__(*error)  # type: ignore[no-untyped-call]

    def before_other_optimizer(self, optimizer: Any) -> None:
        """Record the start of an optimizer's step that does not end the training step."""
        self._guarded(self._note_optimizer, optimizer)
        self._in_other_optimizer = True

    def after_other_optimizer(self) -> None:
        """Record the end of such a step."""
        self._in_other_optimizer = False

    def before_optimizer(self, *, runs_closure: bool = False) -> None:
        """Record that the optimizer is about to step.

        The gradients exist at this point, unless the optimizer first runs a closure that computes them.
        """
        self._guarded(self._note_gradients)
        self._in_optimizer = True
        self._runs_closure = runs_closure
        self._closure_has_begun = False
        self._closure_had_backward = False

    def end_step(self, step: int = COUNTED_STEP) -> Counts:
        """Return the counts of the step that ends here, and begin the next step."""
        self._in_optimizer = False
        self._in_other_optimizer = False
        self._guarded(self._note_state)
        alike = defaultdict[tuple[str, int, int, str, str, bool], list[Collective]](list)
        for call in self._calls:
            of_none = call.bytes == 0
            alike[call.kind, call.ranks, call.apart, call.dtype, call.phase, of_none].append(call)
        totals: dict[str, Any] = {name: dict(sorted(total.items())) for name, total in self._totals.items()}
        totals.setdefault("blocking_copies", {})
        totals.setdefault("inputs", {self._first_convolved: 1} if self._first_convolved else None)
        counts = Counts(
            step=step,
            collectives=tuple(
                rows[0].replace(
                    count=sum(each.count for each in rows), bytes=sum(each.bytes for each in rows)
                )
                for _, rows in sorted(alike.items())
            ),
            stalls=dict(sorted(self._stalls.items())),
            memory=self.memory.end_step(),
            python=self.python.result(),
            **totals,
        )
        self._begin()
        return counts

    def skip_step(self) -> None:
        """Forget the work since the last `end_step`. Call this while the mode is not entered."""
        self._in_optimizer = False
        self.memory.end_step()
        self.python.forget_last()
        self._begin()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE:
            return func(*args, **kwargs)
        is_inferring = self.is_entered and torch.is_inference_mode_enabled()
        if is_inferring and _consists_of_others(func, types, args, kwargs):
            return self._call_parts(func, args, kwargs)
        counted, its_args, its_kwargs = _without_random_state(func, args, kwargs)
        given = self._guarded(self._before, counted, types, its_args, its_kwargs) if self.is_entered else None
        if given is NotImplemented:
            return NotImplemented
        out = func(*args, **kwargs)
        if given is not None:
            result = out[1] if _saves_random_state(func) else out
            self._guarded(self._count, counted, its_args, its_kwargs, given, result)
        return out

    def _call_parts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator that consists of other operators, so that those are dispatched to this mode.

        Usually, torch itself takes such an operator apart before it calls a mode. In `torch.inference_mode`,
        torch does not.
        """
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            with contextlib.ExitStack() as seen:
                for key in _autocast_keys(func):
                    seen.enter_context(exclude_key(getattr(torch.DispatchKey, key), False))
                return call_kernel(func)(COMPOSITE, *args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _before(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the tensors passed to an operator, or None if the call is not to be counted.

        For wrappers of tensors, return NotImplemented, because wrappers call the operator again on the
        tensors that they wrap.
        """
        wrappers = filter(is_wrapper_subclass_type, types)
        # A DTensor calls the operator again on its shards.
        if not all(issubclass(kind, FakeTensor) for kind in wrappers):
            if self._listener is not None:
                self._guarded(self._listener.see_wrapper)
            return NotImplemented
        if not self._is_real():
            return None
        # Operators inside a higher-order operator, such as flex_attention, are not seen.
        if isinstance(func, HigherOrderOperator):
            if PRODUCTS.search(func.name()) is not None:
                self._totals["without_flops"][func.name()] += 1
            return None
        given = _tensors((args, kwargs))
        for tensor in given:
            self.memory.see(tensor, KEPT)
        return None if any(map(_is_meta, given)) else given

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that counts. If it fails, keep the error, and count nothing from then on."""
        if self.error is None:
            try:
                return function(*args)
            except Exception as error:
                self.error = error
        return None

    def _is_real(self) -> bool:
        """Return whether this call is work of the step. DTensor's calls on fake tensors are not work."""
        return active_fake_mode() is self._fake_mode

    def _phase(self) -> Phase:
        backward = in_backward()
        # 1. Work from the optimizer's pre-hook to the end of the training step belongs to the optimizer. The
        # exception is a closure in which the optimizer runs forward and backward.
        if self._in_optimizer and not self._is_in_closure(backward):
            return "optimizer"
        if backward:
            self._in_other_optimizer = False  # its step has ended, perhaps with an error
        elif self._in_other_optimizer and not torch.is_grad_enabled():
            return "optimizer"
        # 2. All other work outside of backward is forward, including batches, logging, and work between
        # steps.
        if not backward:
            return "forward"
        # 3. Autograd disables gradients in backward. Checkpointing enables them again when it recomputes.
        return "recompute" if torch.is_grad_enabled() and not makes_a_graph() else "backward"

    def _is_in_closure(self, backward: bool) -> bool:
        """Return whether the current work belongs to a closure of the optimizer.

        A closure begins with the first operator for which gradients are enabled, and ends with backward. In
        between, gradients are disabled for some operators, such as collectives of FSDP before a forward.
        Operators before the first one with gradients, such as the first all-gather of FSDP, cannot be
        distinguished from those of the optimizer.
        """
        is_open = self._closure_has_begun and not self._closure_had_backward
        return self._runs_closure and (backward or is_open or torch.is_grad_enabled())

    def _count(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: list[Tensor], out: Any
    ) -> None:
        packet = overloadpacket(func)
        operator = str(packet)
        is_work = does_work(func)
        if self._runs_closure and is_work:
            self._closure_has_begun |= torch.is_grad_enabled()
            self._closure_had_backward |= in_backward()
        phase = self._phase()
        self._uncollected += 1
        if self._uncollected >= MOST_OPERATORS and gradients.after_backward is not None:
            self._uncollected = 0
            gradients.after_backward()
        made = _tensors(out)
        collective = None
        if operator in OPERATORS:
            self.collectives.add(operator)
            collective = call_of(operator, args, kwargs, made, phase)
            self._calls.append(collective)
            for tensor in given:
                self.memory.communicated(tensor)
        elif is_work:
            self._totals["kernels"][phase] += 1
            self._totals["ops"][operator] += 1
        if phase == "forward":
            self._note_input(operator, args)
        for tensor in made:
            self.memory.see(tensor, COMMUNICATION if operator in OPERATORS else phase, born=True)
        if any(map(self._is_waited_for, read_by_the_host(operator, args, kwargs, given))):
            self._totals["host_reads"][phase] += 1
        if operator in COPIES:
            source = given[-1].device.type
            target = made[0].device.type
            if source != target:
                self._totals["device_copies"][f"{source} to {target}"] += 1
                if not kwargs.get("non_blocking", any(args[2:])):
                    self._totals["blocking_copies"][f"{source} to {target}"] += 1
        flops = 0
        formula = FLOPS.get(packet)
        if formula is not None:
            # Leave out the argument for the result's dtype, because the formulas do not accept it.
            operands = [each for each in args if not isinstance(each, torch.dtype)]
            flops = int(formula(*operands, **kwargs, out_val=out))
            self._totals["flops"][phase] += flops
        elif PRODUCTS.search(operator) is not None and operator in self._totals["ops"]:
            self._totals["without_flops"][operator] += 1
        if operator.startswith(ALLOCATIONS):
            self._unfilled |= self._storages(made)
        elif phase != "optimizer" and is_work:
            self._note_origin(made or written(func, args), given)
        if self._listener is not None:
            self._listener.see_call(
                OperatorCall(func, operator, phase, args, kwargs, given, made, flops, collective)
            )

    def _note_input(self, operator: str, args: Sequence[Any]) -> None:
        if operator in LOOKUPS:
            self._totals["inputs"][_dtype_and_shape(args[1])] += 1
        elif operator == "aten.convolution" and not self._first_convolved:
            self._first_convolved = _dtype_and_shape(args[0])

    def _note_origin(self, results: list[Tensor], given: list[Tensor]) -> None:
        """Record results that were computed from other tensors.

        Zeros and tensors that are only scaled do not count as computed from other tensors. If no operator has
        filled a tensor, its data come from unseen work. A result is then not regarded as computed from that
        tensor.
        """
        filled = self._storages(results)
        if self._storages(tensor for tensor in given if tensor.numel() > 1) - filled - self._unfilled:
            self._computed |= filled
        # A collective that receives data returns no tensor, but fills the tensors that it was given.
        self._unfilled -= filled or self._storages(given)

    def _is_waited_for(self, tensor: Tensor) -> bool:
        """Return whether the host waits when it reads this tensor.

        The host need not wait for tensors on the host. On a machine without a GPU, however, all tensors
        except the step counters of optimizers are regarded as tensors on a GPU. A launch on CPUs then shows
        where the host would wait for a GPU. Tensors that the script would keep on the host even with a GPU
        are also regarded as tensors on a GPU.
        """
        if tensor.device.type != "cpu":
            return True
        return not self._has_gpu and id(tensor) not in self._step_counters

    def _storages(self, tensors: Iterable[Tensor]) -> set[int | None]:
        return {self.memory.number(tensor) for tensor in tensors}

    def computed(self, tensor: Tensor) -> bool:
        """Return whether an operator of this step has computed this tensor outside of the optimizer."""
        return self.memory.number(local(tensor)) in self._computed

    def _note_resize(self, storage: Any, size: int) -> None:
        if self._is_real():
            self.memory.resized(storage, size)

    def _note_gradients(self) -> None:
        for parameter in self._all_parameters():
            if parameter.grad is not None:
                self.memory.assign(parameter.grad, "gradient")

    def _note_state(self) -> None:
        self._note_gradients()
        self._step_counters = set()
        for parameter in self._all_parameters():
            self.memory.assign(parameter, "parameter")
        for optimizer in self._optimizers:
            self._note_optimizer(optimizer)

    def _note_optimizer(self, optimizer: Any) -> None:
        for value in tree_leaves(list(optimizer.state.values())):
            if isinstance(value, Tensor):
                self.memory.assign(value, "optimizer state")
        if _is_of_torch(optimizer):
            steps = (state.get("step") for state in optimizer.state.values() if isinstance(state, dict))
            self._step_counters |= {id(step) for step in steps if isinstance(step, Tensor)}

    def _all_parameters(self) -> list[Tensor]:
        return [*parameters_of(*self._optimizers), *self._parameters]


_dispatch = StepCounter.__torch_dispatch__


def _unseen_dispatch(
    self: StepCounter, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Dispatch without counting the Python calls of perfsuite and of torch's wrapper around this method."""
    # In a dry run, most calls only read the device of a tensor. All modes below this one would return the
    # same device.
    if func is DEVICE and isinstance(args[0], FakeTensor):
        return args[0].device
    return self.python.unseen(_dispatch, self, func, types, args, kwargs)


StepCounter.__torch_dispatch__ = _unseen_dispatch  # type: ignore[method-assign]


@functools.cache
def _keep_from_dynamo() -> None:
    """Prevent dynamo from compiling our hooks, which run on every Python call, even in compiled code."""
    # Do not import this at the top, because it loads dynamo, which takes a second.
    from perfsuite.frameworks.common.private import skip_code

    for function in (_unseen_dispatch, StepCounter._phase, in_backward, makes_a_graph, *python_calls.HOOKS):
        skip_code(function.__code__)


def _saves_random_state(func: Any) -> bool:
    """Return whether this operator runs another operator, and returns a random state with the result."""
    return isinstance(func, HigherOrderOperator) and func.name() == "run_and_save_rng_state"


def _without_random_state(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """If a higher-order operator runs another operator with a random state, return the inner call.

    Any other call is returned unchanged. Compiled code runs operators such as dropout and attention in this
    way, so that it can recompute them with the same random numbers.
    """
    if not isinstance(func, HigherOrderOperator):
        return func, args, kwargs
    match func.name():
        case "run_and_save_rng_state":
            return args[0], args[1:], kwargs
        case "run_with_rng_state":
            return args[1], args[2:], kwargs
        case "graphsafe_run_with_rng_state":
            return args[0], args[1:], {name: value for name, value in kwargs.items() if name != "rng_state"}
    return func, args, kwargs


def written(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """Return the tensors in `args` that an operator changes in place."""
    pairs = zip(schema(func).arguments, args, strict=False)
    return _tensors(
        [value for argument, value in pairs if argument.alias_info and argument.alias_info.is_write]
    )


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _dtype_and_shape(tensor: Tensor) -> str:
    """Return the dtype and the shape of a tensor, such as `int64[4, 1024]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _is_meta(tensor: Tensor) -> bool:
    """Return `Tensor.is_meta`. Reading it directly from a fake tensor would dispatch an operator."""
    return tensor.device.type == "meta" if isinstance(tensor, FakeTensor) else tensor.is_meta


def _is_of_torch(optimizer: Any) -> bool:
    """Return whether the optimizer's class is one of torch's optimizers, or derives from one.

    These optimizers count their steps on the host, unless they are fused.
    """
    kinds = (kind for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer)
    return any(kind.__module__.startswith("torch.optim.") for kind in kinds)


def read_by_the_host(
    operator: str, args: Sequence[Any], kwargs: Mapping[str, Any], given: list[Tensor]
) -> list[Tensor]:
    """Return the tensors that the host must read before it knows a result, its shape, or where to write."""
    if operator in BY_A_MASK:
        if operator != "aten.index" and args[2].numel() == 1:
            return []
        return [index for index in _tensors(args[1]) if index.dtype in (torch.bool, torch.uint8)]
    by_a_size = operator == "aten.repeat_interleave" and kwargs.get("output_size") is None
    return given if operator in HOST_READS or by_a_size else []


def _consists_of_others(func: Any, types: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator only calls other operators for these tensors, as `aten.linear` does.

    Special kinds of tensors, such as nested ones, can have kernels of their own.
    """
    if types or not _is_composite(func):
        return False
    return all(
        each.layout is torch.strided and not (each.is_quantized or each.is_nested)
        for each in _tensors((args, kwargs))
    )


def _autocast_keys(func: Any) -> list[str]:
    """Return autocast's dispatch keys to activate, so that autocast sees the operators that `func` calls.

    torch excludes these keys while it calls a dispatch mode. Without a mode, torch excludes them only inside
    of an operator for which autocast itself has chosen the dtype.
    """
    with enable_reentrant_dispatch():  # without this, autocast would seem to be disabled
        devices = [device for device in AUTOCAST if torch.is_autocast_enabled(device)]
    keys = [AUTOCAST[device] for device in devices]
    return [key for key in keys if not has_kernel(func.name(), key)]


@functools.cache
def _is_composite(func: Any) -> bool:
    """Return whether an operator has a kernel that calls other operators, but none for CPU or CUDA."""
    if isinstance(func, HigherOrderOperator) or not has_kernel(func.name(), COMPOSITE):
        return False
    return not any(has_kernel(func.name(), key) for key in ("CPU", "CUDA"))


@functools.cache
def does_work(func: Any) -> bool:
    """Return whether an operator gives the device something to do."""
    return str(overloadpacket(func)) not in NO_KERNEL and not _is_view(func)


def _is_view(func: Any) -> bool:
    return any(each.alias_info and not each.alias_info.is_write for each in schema(func).returns)
