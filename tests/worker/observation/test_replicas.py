from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Replicate, Shard

from perfsuite.worker.observation import replicas
from tests.fake_group import alone, fake_group, sharded_without_weights
from tests.frameworks.common.test_model import TINY


def test_step_changes_the_trained_fingerprint() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    before = replicas.fingerprint(model)
    assert set(before) == {"0.weight", "0.bias"}
    with torch.no_grad():
        model[0].bias.add_(1)
    after = replicas.fingerprint(model)
    assert {name for name in before if before[name] != after[name]} == {"0.bias"}


def test_unsharded_parameters_are_whole() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[1].bias.allreduce = False  # marked like an expert's parameter
    assert replicas.replicated(model) == {"0.weight", "0.bias", "1.weight", "2.weight"}
    with fake_group(0, 2):
        assert replicas.replicated(sharded_without_weights(TINY)[0]) == set()


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated")
@pytest.mark.parametrize(("strategy", "whole"), [("NO_SHARD", 2), ("FULL_SHARD", 0), ("SHARD_GRAD_OP", 0)])
def test_of_fsdp_only_no_shard_leaves_them_whole(strategy: str, whole: int) -> None:
    with fake_group(0, 2):
        model = FullyShardedDataParallel(
            nn.Linear(4, 4),
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        assert len(replicas.replicated(model)) == whole


def test_dtensor_is_whole_if_all_replicate() -> None:
    with fake_group(0, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        model = nn.Module()
        for name, last in (("a", Replicate()), ("b", Shard(0))):
            local = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate(), last], run_check=False)
            model.register_parameter(name, nn.Parameter(local))
        assert replicas.replicated(model) == {"a"}


def test_uncounted_collectives_are_unknown() -> None:
    assert replicas.collectives_begun() is None
    with fake_group(0, 2):
        assert replicas.collectives_begun() is None


@pytest.mark.parametrize("name", ["world", "sequence_number"])
def test_collectives_are_unknown_without_the_name(name: str) -> None:
    lacks: Any = {name: None}
    with alone():
        assert replicas.collectives_begun(**lacks) is None


def test_a_group_of_one_rank_begins_no_collective() -> None:
    with alone():
        assert replicas.collectives_begun() == 0


def test_squares_gradients_of_every_kind() -> None:
    table = torch.nn.Embedding(8, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    dense = torch.full((3,), 2.0)
    empty = torch.zeros(0)
    assert replicas.squares([None, dense, table.weight.grad, empty]) == pytest.approx(12 + 2 * 4 + 2 * 1)
    assert replicas.squares([None]) is None


@pytest.mark.parametrize("gradient", [torch.tensor([3 + 4j, 0]), torch.tensor([3 + 4j, 0]).conj()])
def test_squares_complex_gradients(gradient: torch.Tensor) -> None:
    assert replicas.squares([gradient]) == 25


def test_fingerprints_complex_parameters() -> None:
    model = nn.ParameterList([nn.Parameter(torch.tensor([3 - 4j]))])
    assert replicas.fingerprint(model) == {"0": 7}


@pytest.mark.parametrize(
    ("mesh", "placements", "share"),
    [
        ((2, 3), (Replicate(), Shard(0)), 1 / 2),  # hybrid sharding
        ((3, 2), (Shard(0), Replicate()), 1 / 2),  # a norm in addition to layers that are split
        ((2, 3), (Shard(0), Shard(0)), 1),
        ((2, 3), (Replicate(), Replicate()), 1),  # like in DDP: each rank has the sum of the whole job
    ],
)
def test_shards_that_ranks_share_count_once(mesh: tuple[int, ...], placements: Any, share: float) -> None:
    with fake_group(0, 6):
        ranks = init_device_mesh("cpu", mesh)
        gradient = DTensor.from_local(torch.full((4,), 3.0), ranks, placements, run_check=False)
        assert replicas.squares([gradient]) == pytest.approx(36 * share)
        split = DTensor.from_local(torch.ones(2), ranks, (Shard(0), Shard(0)), run_check=False)
        of_mesh = share if share < 1 else 1 / 6 if placements == (Replicate(), Replicate()) else 1
        assert replicas.squares([gradient, split]) == pytest.approx(36 * of_mesh + 2)
