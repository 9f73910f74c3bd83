"""Test that dynamo compiles a user's functions as it would without perfsuite."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters, get_compilation_metrics

from perfsuite.worker.counting import gradients
from perfsuite.worker.hooks import calls, dynamo
from perfsuite.worker.observation.second_step import SecondStep


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Begin without compiled functions, and leave none."""
    torch._dynamo.reset()
    counters.clear()
    dynamo.watch()
    yield
    torch._dynamo.reset()
    counters.clear()


def graphs_and_breaks() -> tuple[int, dict[str, int]]:
    """Return the number of graphs, and the number of breaks for each reason."""
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def with_backward(model: nn.Module) -> Callable[[], Any]:
    @torch.compile(backend="eager")
    def step() -> None:
        model(torch.ones(2, 4)).square().mean().backward()

    return step


def test_a_watched_backward_in_compiled_code_adds_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    model = nn.Linear(4, 4)
    step = with_backward(model)
    for _ in range(3):
        step()
    expected = graphs_and_breaks()
    torch._dynamo.reset()
    counters.clear()
    calls.before(torch.autograd, "backward", gradients._clips)
    step = with_backward(model)
    for _ in range(3):
        step()
    assert graphs_and_breaks() == expected


def test_clipping_in_a_whole_graph_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (nn.utils, nn.utils.clip_grad):
        monkeypatch.setattr(owner, "clip_grad_norm_", nn.utils.clip_grad_norm_)
    gradients.watch()
    clip = nn.utils.clip_grad_norm_
    model = nn.Linear(4, 4)
    step = torch.compile(lambda: clip(model.parameters(), 1e-3), backend="eager", fullgraph=True)
    norm = gradients.NormBeforeClipping(torch.optim.SGD(model.parameters()), lambda read: read())
    for is_counted in (False, True):
        model(torch.ones(2, 4)).sum().backward()
        if is_counted:
            norm.enter()
        try:
            assert float(step()) > 0
        finally:
            norm.leave()


class Net(nn.Module):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.relu() + 1


def test_a_model_that_is_compiled_in_place_can_be_observed() -> None:
    model = Net()
    model.compile(backend="eager", fullgraph=True)
    model(torch.ones(2, 4))
    observed = SecondStep(model, inside=False)
    model(torch.ones(2, 4))
    observed.finish()
    assert graphs_and_breaks()[1] == {}


def test_all_compilations_are_remembered() -> None:
    before = len(get_compilation_metrics())
    for size in range(70):
        add: Callable[[Any], Any] = eval(f"lambda x: x + {size}")
        torch.compile(add, backend="eager")(torch.ones(2))
    assert len(get_compilation_metrics()) - before == 70


def test_waits_for_the_import_of_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    skipped = list[object]()
    monkeypatch.setattr(dynamo, "_skip", skipped.append)
    dynamo.watch()
    assert skipped == []
