"""Observe blocks, dtypes, attention kernel and tokens with hooks, in the second step.

This step is not measured.
"""

import contextlib
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from perfsuite.frameworks.common import adapters, finetuning, private
from perfsuite.frameworks.common.model import dtype_name

NOT_OBSERVED = "not observed (compiled)"
NO_LINEAR = "not observed (no linear layer)"
NO_FORWARD = "not observed (no forward call)"
"""The value for a step that replays CUDA graphs, in which no Python code of the model runs."""
NO_KERNEL = "none seen"  # used if no autograd node of the blocks looks like an attention kernel
UNFUSED = "math"  # torch's name for attention by matmuls and a softmax
NODES_NEAR = 300  # maximum number of autograd nodes to search. Attention is a few nodes before a linear layer

current_graph_task: Callable[[], int] | None = private.or_none("current_graph_task")
"""A function that returns the number of the running backward pass, or -1 if none is running. None if this
version of torch does not have this function."""


class SecondStep:
    """Hooks for one step. They are on the outermost module and, with `inside`, also on the modules in it.

    `inside` must be False for a compiled model. `graph_task` is None if this version of torch does not report
    that a backward pass is running.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        inside: bool,
        graph_task: Callable[[], int] | None = current_graph_task,
    ) -> None:
        self.compute_dtype = NO_LINEAR if inside else NOT_OBSERVED
        self.inside = inside
        self._graph_task = graph_task
        self.tokens = TokenCount()
        self._handles: list[Any] = []
        self._errors: list[Exception] = []
        # Number of a block -> its attention kernel, if one was seen.
        self._kernels: dict[int, str] = {}
        self._layers: dict[int, tuple[str, int]] = {}  # id of a layer -> dtype and number of weights
        # For each block: number of forward calls of its first linear layer outside of backward.
        self.forwards: list[int] = []
        # For each block: number of forward calls of this layer in backward, where activations are recomputed.
        self.recomputed: list[int] = []
        try:
            self._count_tokens(model)
            if inside:
                self._look_inside(model)
        except Exception as error:
            self._errors.append(error)
            self.finish()

    def _count_tokens(self, model: nn.Module) -> None:
        parents = [m for m in model.modules() if next(m.children(), None) is not None] if self.inside else []
        # Use the modules in a ModuleList, because a ModuleList itself is never called.
        outermost = model if isinstance(model, nn.ModuleList) else [model]
        for module in dict.fromkeys([*outermost, *parents]):
            if not isinstance(module, torch.jit.ScriptModule):  # such modules do not support hooks
                self._hook(module.register_forward_pre_hook, self.tokens.enter, with_kwargs=True)
                self._hook(module.register_forward_hook, self.tokens.leave, always_call=True)

    def _look_inside(self, model: nn.Module) -> None:
        blocks = [block for block in layers(model) if _linears(block)]
        self.forwards = [0] * len(blocks)
        self.recomputed = [0] * len(blocks)
        for index, block in enumerate(blocks):
            self._hook(_linears(block)[0].register_forward_pre_hook, partial(self._count, index))
        plain = [linear for linear in _linears(model) if finetuning.quantization_of(linear) is None]
        for module in plain[:1]:  # a quantised layer returns the dtype of its input
            self._hook(module.register_forward_hook, self._see_dtype)
        for module in plain:
            self._hook(module.register_forward_hook, self._see_layer)
        # Look for attention in all blocks, because a model might not call all of them.
        for index, block in enumerate(blocks):
            for module in _linears(block):
                self._hook(module.register_forward_pre_hook, partial(self._see_attention, index))

    def _hook(self, register: Callable[..., Any], hook: Callable[..., None], **how: bool) -> None:
        """Register a hook. If the hook fails, its error is stored, so that the model does not fail."""
        self._handles.append(register(_Hook(hook, self._errors), **how))

    def _count(self, index: int, module: nn.Module, args: Any) -> None:
        (self.recomputed if in_backward(self._graph_task) else self.forwards)[index] += 1

    def _see_dtype(self, module: nn.Module, args: Any, output: Any) -> None:
        made = _first_tensor(output)
        if made is not None:
            self.compute_dtype = dtype_name(made.dtype)

    def _see_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        given = _first_tensor(args)
        made = _first_tensor(output)
        if given is not None and made is not None:
            # Do not read the weight here, because ZeRO-3 would take this for a use of the weight in forward.
            self._layers[id(module)] = (dtype_name(made.dtype), given.shape[-1] * made.shape[-1])

    def linear_layers(self) -> dict[str, int]:
        """Return, for each dtype, the number of weights of linear layers that computed in it.

        Quantised layers are left out.
        """
        elements = Counter[str]()
        for dtype, count in self._layers.values():
            elements[dtype] += count
        return dict(sorted(elements.items()))

    def _see_attention(self, index: int, module: nn.Module, args: Any) -> None:
        # If only a softmax was found, it might be a router's and not part of attention. Then search again,
        # but only in the last block, because a search takes time.
        is_last = index == len(self.forwards) - 1
        is_open = index not in self._kernels or (is_last and self._kernels[index] == UNFUSED)
        if is_open and args and isinstance(args[0], Tensor):
            kernel = attention_kernel(args[0])
            if kernel is not None:
                self._kernels[index] = kernel

    @property
    def attention_kernel(self) -> str:
        """The attention kernel of the last block in which a kernel was seen."""
        if not self.inside:
            return NOT_OBSERVED
        return self._kernels[max(self._kernels)] if self._kernels else NO_KERNEL

    def finish(self) -> None:
        """Remove the hooks. If hooks have stored errors, raise the first one."""
        for handle in self._handles:
            handle.remove()
        if self._errors:
            raise self._errors[0]

    @property
    def lacks_forward(self) -> bool:
        """Whether the step called no block, although there are blocks with linear layers."""
        return self.inside and bool(self.forwards) and not any([*self.forwards, *self.recomputed])

    def computing(self) -> str:
        """Return the dtype in which the first linear layer computed."""
        return NO_FORWARD if self.lacks_forward else self.compute_dtype

    def recomputing(self) -> str:
        """Return how many blocks ran their forward again in backward, such as `2 of 4`."""
        if not self.inside or self._graph_task is None:
            return NOT_OBSERVED
        if self.lacks_forward:
            return NO_FORWARD
        return f"{sum(count > 0 for count in self.recomputed)} of {len(self.recomputed)}"


class _Hook:
    """A hook of a module. Its errors are stored, so that the model does not fail."""

    def __init__(self, hook: Callable[..., None], errors: list[Exception]) -> None:
        self._hook = hook
        self._errors = errors

    def __call__(self, *args: Any) -> None:
        try:
            self._hook(*args)
        except Exception as error:
            self._errors.append(error)

    def __reduce__(self) -> Any:
        """Let a training pickle or copy its model in this step.

        The hook of the copy does nothing, and can be loaded without perfsuite.
        """
        return getattr, (contextlib.nullcontext(), "__exit__")


def _first_tensor(values: Any) -> Tensor | None:
    first = values[0] if isinstance(values, list | tuple) and values else values
    return first if isinstance(first, Tensor) else None


class TokenCount:
    """Counts the tokens passed to a model: the elements of all `input_ids`, or else those of the first input.

    Elements are tokens only if they are integers. For any dtype, the first dimension of the first input is
    the number of samples. If the call of a module is inside the call of another module, only the outer call
    counts. The outermost call is not always that of the wrapper, because a script can call the wrapped module
    directly.
    """

    def __init__(self) -> None:
        self._depth = 0
        self.forget()

    def forget(self) -> None:
        """Forget all calls so far."""
        self.tokens = self.forwards = self.samples = 0
        self._padding: list[Tensor] = []

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Record a call before it runs."""
        self._depth += 1
        if self._depth > 1 or not torch.is_grad_enabled() or in_backward():
            return
        given = [*_tensors(args, kwargs)]
        # A model can get several inputs at once, for example pairs of sentences.
        inputs = _named("input_ids", given) or [tensor for _, tensor in given[:1]]
        if not inputs:
            return
        self.samples += inputs[0].shape[0] if inputs[0].dim() else 0
        if inputs[0].dtype not in (torch.int32, torch.int64):
            return
        self.tokens += sum(tokens.numel() for tokens in inputs)
        self.forwards += 1
        for tokens, mask in zip(inputs, _named("attention_mask", given), strict=False):
            if mask.shape == tokens.shape:
                self._padding.append((mask == 0).sum())

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record the end of a call, even if it failed."""
        self._depth -= 1

    def padding(self) -> int:
        """Return the number of tokens that attention masks exclude. This waits for the device."""
        return sum(int(count) for count in self._padding)


def _named(name: str, tensors: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
    """Return the tensors with this name, each of them once."""
    return [*{id(tensor): tensor for its_name, tensor in tensors if its_name == name}.values()]


def _tensors(args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors among the arguments of a call, including tensors in a batch.

    Labels are left out, because they are not input of the model.
    """
    for key, value in [*enumerate(args), *kwargs.items()]:
        name = str(key)
        if name.startswith(("label", "target")):
            continue
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _tensors((), value)
        elif isinstance(value, list | tuple):
            yield from _tensors(value, {})


def attention_kernel(value: Tensor) -> str | None:
    """Return the attention kernel that computed `value`, or None if none is found.

    The kernel is recognised by the names of nearby autograd nodes.
    """
    kernel = None
    for node in islice(nodes_of(value), NODES_NEAR):
        name = re.sub(r"(Backward)?\d*$", "", node.name())
        if re.search("attention|attn|mha", name, re.IGNORECASE):
            return name.removeprefix("ScaledDotProduct")
        if "softmax" in name.lower():
            kernel = UNFUSED  # continue, because the softmax might be a router's
    return kernel


def nodes_of(value: Tensor) -> Iterator[Any]:
    """Yield the autograd nodes from which `value` was computed, the nearest first."""
    ahead = deque[Any]([value.grad_fn])
    seen = set[Any]()
    while ahead:
        node = ahead.popleft()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            ahead.extend(following for following, _ in node.next_functions)


def knows_backward() -> bool:
    """Return whether this version of torch reports that a backward pass is running."""
    return current_graph_task is not None


def in_backward(graph_task: Callable[[], int] | None = current_graph_task) -> bool:
    """Return whether a backward pass is running. False if this is unknown.

    If a forward runs inside a backward pass, it recomputes activations.
    """
    return graph_task is not None and graph_task() != -1


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks of any model: the longest list of modules with linear layers."""
    return max(_containers(model), key=len, default=[])


def _containers(module: nn.Module) -> Iterator[list[nn.Module]]:
    for child in module.children():
        members = list(child.children())
        linear = [bool(_linears(member)) for member in members]
        # A list counts as blocks if any member has a linear layer, because a pipeline stage keeps
        # placeholders for the blocks of other stages. In a dictionary, all members must be blocks, because it
        # can also hold other modules.
        is_blocks = any(linear) if isinstance(child, nn.ModuleList) else all(linear)
        if is_blocks and isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield members
        else:
            yield from _containers(child)


def _linears(module: nn.Module) -> list[nn.Module]:
    return list(filter(adapters.is_linear, module.modules()))
