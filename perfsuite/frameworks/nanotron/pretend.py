"""nanotron on fake tensors. For a dry run; imports torch, and nanotron when used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from perfsuite.frameworks.common import pretend as wrappers
from perfsuite.frameworks.common.patches import module, replace
from perfsuite.frameworks.nanotron import trainer


def pretend() -> None:
    """Let nanotron, which is imported already, train fake tensors, for the rest of this process."""
    wrappers.ddp()
    _keep_parameters()
    replace(module("nanotron.models.base"), "init_on_device_and_dtype", _on_device)
    replace(trainer, "_writes", lambda ranks: True)  # nobody else does
    replace(module("nanotron.helpers"), "get_synced_random_state", lambda random_state, pg: random_state)


def _keep_parameters() -> None:
    """Make `NanotronParameter(fake tensor)` a fake tensor that is a NanotronParameter, too."""
    real = module("nanotron.parallel.parameters").NanotronParameter
    own = ("__new__", "__dict__", "__weakref__")
    kept = {name: value for name, value in vars(real).items() if name not in own}
    fake = type("FakeNanotronParameter", (FakeTensor,), kept)
    metadata = real.NANOTRON_PARAMETER_METADATA_ATTRIBUTE_NAME
    make = real.__new__
    is_instance: Any = type(real).__instancecheck__

    def new(cls: Any, tensor: Any, requires_grad: bool = True) -> Any:
        if not isinstance(tensor, FakeTensor):
            return make(cls, tensor, requires_grad)
        parameter: Any = nn.Parameter(tensor.data.detach(), requires_grad=requires_grad)
        parameter.__class__ = fake
        setattr(parameter, metadata, dict(getattr(tensor, metadata, {})))
        return parameter

    def check(kind: Any, instance: Any) -> bool:
        return is_instance(kind, instance) or (kind is real and isinstance(instance, fake))

    replace(real, "__new__", new)
    replace(type(real), "__instancecheck__", check)


@contextmanager
def _on_device(device: Any = None, dtype: torch.dtype = torch.float) -> Iterator[None]:
    """Stand in for nanotron's own, which replaces `torch.empty`: torch's rules for fake tensors call that."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        yield
    torch.set_default_dtype(before)
