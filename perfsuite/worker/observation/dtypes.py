"""Count the elements of each dtype in the training state. Imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from perfsuite.frameworks.common.model import dtype_name
from perfsuite.frameworks.common.private import is_wrapper_subclass, tree_leaves
from perfsuite.results.rank_report import Dtypes
from perfsuite.worker.observation.optimizers import parameters_of
from perfsuite.worker.observation.replicas import local


def dtypes_of(model: Any, optimizer: Any, linear_layers: Mapping[str, int] | None = None) -> Dtypes:
    """Return how many elements of each dtype this rank holds, for parameters, gradients and so on.

    Call this just before a step of `optimizer`, but not before its first step. The weights that the
    optimizer updates are listed separately, because an optimizer can update its own fp32 copies instead of
    the model's parameters. Scalars, such as the number of steps, are left out. `linear_layers` gives, for
    each dtype, how many weights belong to linear layers that computed in this dtype during the step.
    """
    parameters = [parameter for parameter in model.parameters() if not is_lazy(parameter)]
    stepped = parameters_of(optimizer)
    gradients = _gradients(parameters) or _gradients(stepped)
    state = [leaf for leaf in tree_leaves(list(optimizer.state.values())) if isinstance(leaf, Tensor)]
    elements_by_role = {
        "parameters": _elements(parameters),
        "stepped weights": _elements(stepped),
        "gradients": _elements(gradients),
        "optimizer state": _elements(tensor for tensor in state if tensor.dim()),
        "linear layers": dict(linear_layers or {}),
    }
    return {what: elements for what, elements in elements_by_role.items() if elements}


def _gradients(parameters: Iterable[Any]) -> list[Any]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _elements(tensors: Iterable[Any]) -> dict[str, int]:
    counts = Counter[str]()
    for tensor in tensors:
        for part in _parts(local(tensor)):
            counts[dtype_name(part.dtype)] += part.numel()
    return {name: count for name, count in sorted(counts.items()) if count}


def _parts(tensor: Any) -> Iterator[Any]:
    """Yield the plain tensors that make up a tensor.

    For example, torchao's 8-bit state claims to be float32, but consists of codes and scales.
    """
    if not is_wrapper_subclass(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))
