"""Test how dry runs prepare DDP and FSDP1. dry/test_rank.py compares dry runs with real launches."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import utils as dynamo
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import _flat_param
from torch.nn.parallel import DistributedDataParallel, distributed

from perfsuite.errors import DryRunError
from perfsuite.frameworks.common import pretend
from tests.fake_group import alone, fake_group


def test_dropped_torch_name_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed, "_verify_param_shape_across_processes")
    with pytest.raises(DryRunError, match=r"torch has no .*_verify_param_shape_across_processes"):
        pretend.ddp()


def test_buckets_are_those_of_the_second_step() -> None:
    """In backward, the gradients of the last parameters are ready first."""
    assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]
    parameters = [nn.Parameter(nn.Linear(16, 16).weight.detach()) for _ in range(5)]  # 1024 bytes each
    buckets, sizes = pretend._as_rebuilt(assign, [2048], parameters, [1 << 20, 25 << 20], [False] * 5)
    assert buckets == [[4, 3], [2, 1], [0]]
    assert sizes == [2048] * 3


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield the bytes of each all-reduce, while DDP is prepared for a dry run as one of two ranks."""
    for owner, name in (
        (distributed, "_verify_param_shape_across_processes"),
        (dist, "_compute_bucket_assignment_by_size"),
        (DistributedDataParallel, "__init__"),
        (DistributedDataParallel, "register_comm_hook"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    sent: list[int] = []
    all_reduce = dist.all_reduce

    def reduce(buffer: torch.Tensor, group: Any, **options: Any) -> Any:
        sent.append(buffer.nbytes)
        return all_reduce(buffer, group=group, **options)

    monkeypatch.setattr(dist, "all_reduce", reduce)
    pretend.ddp()
    with fake_group(0, 2):
        yield sent


def four_layers(**options: Any) -> Any:
    """Return a model with four weights of 1024 bytes, two of which fill a bucket."""
    layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    return DistributedDataParallel(layers, bucket_cap_mb=2048 / 2**20, **options)


def train(model: Any) -> None:
    model(torch.ones(1, 16)).sum().backward()


def test_ddp_rebuilds_its_one_bucket_in_the_second_step(reduced: list[int]) -> None:
    model = four_layers()
    train(model)
    assert reduced == [4096]
    train(model)
    assert reduced == [4096, 2048, 2048]
    train(model)
    assert reduced == [4096, *[2048] * 4]
    assert all(weight.grad is not None for weight in model.parameters())


def test_buckets_are_rebuilt_only_after_a_reduction(reduced: list[int]) -> None:
    model = four_layers()
    with model.no_sync():
        train(model)
        train(model)
    train(model)
    assert reduced == [4096]
    train(model)
    assert reduced == [4096, 2048, 2048]


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_other_buckets_are_never_rebuilt(reduced: list[int], option: str) -> None:
    model = four_layers(**{option: True})
    train(model)
    train(model)
    assert reduced == [2048] * 4


@pytest.mark.parametrize("first", [0, 3])
def test_unused_parameter_ends_the_second_step(reduced: list[int], first: int) -> None:
    """As in torch, the error does not depend on whether another bucket was reduced."""
    model = four_layers()
    del model.module[first]
    train(model)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        train(model)


def test_buckets_of_unused_parameters_are_reduced(reduced: list[int]) -> None:
    model = four_layers(find_unused_parameters=True)
    del model.module[2:]
    train(model)
    assert reduced == [2048] * 2


@pytest.mark.parametrize("option", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_hook_of_a_script_reduces_the_gradients(reduced: list[int], option: dict[str, bool]) -> None:
    model = four_layers(**option)
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    train(model)
    train(model)
    assert reduced[-2:] == [1024, 1024], "half of the bytes in fp32"
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.usefixtures("reduced")
def test_second_hook_is_torchs_error() -> None:
    model = four_layers()
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)


def test_old_buckets_are_freed_before_new_ones_are_made(reduced: list[int]) -> None:
    model = four_layers()
    first = model.reducer._reducer
    train(model)
    gone = weakref.ref(first)
    del first
    train(model)
    assert gone() is None


def no_gradients(model: Any) -> contextlib.AbstractContextManager[None]:
    return torch.no_grad()


def compiled_breaks(first_step: Callable[[Any], contextlib.AbstractContextManager[None]]) -> Counter[str]:
    """Return the graph breaks by reason, and the recompilations, of four steps of a compiled DDP model.

    torch refuses to compile DDP with a bucket that is smaller than the first one, of 1 MiB.
    """
    torch._dynamo.reset()
    dynamo.counters.clear()
    dynamo.clear_compilation_metrics()
    layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    model = DistributedDataParallel(layers, bucket_cap_mb=2)
    compiled = torch.compile(model, backend="eager")
    inputs = torch.ones(1, 512)
    with first_step(model):
        compiled(inputs)
    for _ in range(3):
        compiled(inputs).sum().backward()
    recompiled = [metric for metric in dynamo.get_compilation_metrics() if metric.recompile_reason]
    breaks = Counter(recompilations=len(recompiled))
    for reason, count in dynamo.counters["graph_break"].items():
        breaks[reason.splitlines()[0]] += count
    return breaks


@pytest.mark.parametrize(
    "first_step",
    [contextlib.nullcontext, no_gradients, DistributedDataParallel.no_sync],
    ids=["training", "evaluation", "no synchronisation"],
)
def test_compiled_ddp_breaks_as_with_torchs_reducer(first_step: Any, request: pytest.FixtureRequest) -> None:
    with alone():
        expected = compiled_breaks(first_step)
    reduced = request.getfixturevalue("reduced")
    assert compiled_breaks(first_step) == expected
    assert reduced[-2:] == [2 << 20, 2 << 20], "the buckets were rebuilt"
    assert expected.total() > 0


def test_storages_replace_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_data_ptr_allocated", "_same_storage"):
        monkeypatch.setattr(_flat_param, name, None)
    pretend.fsdp1()
    is_allocated: Any = vars(_flat_param)["_data_ptr_allocated"]
    share_storage: Any = vars(_flat_param)["_same_storage"]
    whole = torch.ones(4)
    other = torch.ones(4)
    assert share_storage(whole, whole[2:])
    assert not share_storage(whole, other)
    assert is_allocated(whole)
    whole.untyped_storage().resize_(0)
    assert not is_allocated(whole)
