"""Test how many elements of a training have each dtype."""

from typing import Any

import torch
from torch import nn

from perfsuite.worker.observation.dtypes import dtypes_of


def stepped(model: nn.Module, **state: torch.dtype) -> torch.optim.Optimizer:
    """Return an optimizer that has made one step, with its state in these dtypes."""
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    for of_parameter in optimizer.state.values():
        for name, dtype in state.items():
            of_parameter[name] = of_parameter[name].to(dtype)
    return optimizer


def test_each_kind_is_counted_by_elements() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False, dtype=torch.bfloat16))
    optimizer = stepped(model, exp_avg=torch.bfloat16)
    assert dtypes_of(model, optimizer, {"bfloat16": 16}) == {
        "parameters": {"bfloat16": 16, "float32": 32},
        "stepped weights": {"bfloat16": 16, "float32": 32},
        "gradients": {"bfloat16": 16, "float32": 32},
        "optimizer state": {"bfloat16": 48 + 16, "float32": 32},
        "linear layers": {"bfloat16": 16},
    }


def test_omits_state_scalars_and_frozen_weights() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False).requires_grad_(False))
    optimizer = torch.optim.AdamW(model[0].parameters())
    model[0].weight.sum().backward()
    optimizer.step()
    dtypes = dtypes_of(model, optimizer)
    assert dtypes["parameters"] == {"float32": 48}
    assert dtypes["stepped weights"] == dtypes["gradients"] == {"float32": 32}
    assert dtypes["optimizer state"] == {"float32": 64}
    assert dtypes_of(model, torch.optim.SGD(model[0].parameters()))["stepped weights"] == {"float32": 32}


def test_recognizes_8_bit_state_posing_as_float32() -> None:
    """An example is torchao's state: a tensor that wraps codes and scales."""
    from torchao.optim.subclass_8bit import OptimState8bit

    model: Any = nn.Linear(64, 64, bias=False)
    optimizer = stepped(model)
    state = optimizer.state[model.weight]
    state["exp_avg"] = OptimState8bit.zeros((64, 64), signed=True, block_size=256)
    assert state["exp_avg"].dtype == torch.float32
    dtypes = dtypes_of(model, optimizer)["optimizer state"]
    assert dtypes["uint8"] == 64 * 64
    assert 64 * 64 < dtypes["float32"] < 2 * 64 * 64
