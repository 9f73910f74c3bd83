from itertools import groupby
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import get_process_group_ranks
from torch.multiprocessing.spawn import start_processes

from perfsuite.worker.clock.timers import HostTimer
from perfsuite.worker.probes import node_probe
from perfsuite.worker.probes.node_probe import all_reduce_probe, device_probe, pair_rounds
from tests.fake_group import alone, fake_group

CPU = torch.device("cpu")


def test_one_rank_has_nobody_to_reduce_with() -> None:
    with alone():
        probed = device_probe(CPU)
        assert all_reduce_probe(CPU) == {}
    assert list(probed) == ["matmul_tflops", "copy_gb_s"]
    assert 1e-4 < probed["matmul_tflops"] < 100
    assert 0.05 < probed["copy_gb_s"] < 5000


def test_ranks_with_peers_reduce_as_well() -> None:
    with fake_group(0, 2):
        assert list(device_probe(CPU)) == ["matmul_tflops", "copy_gb_s", "all_reduce_gb_s"]


def test_best_of_twenty_all_reduces_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most all-reduces are disturbed. The best one shows what the links can do."""
    asked = Mock()
    monkeypatch.setattr(dist, "barrier", asked.barrier)
    monkeypatch.setattr(dist, "all_reduce", asked.all_reduce)
    times = [*(0.01 * number for number in range(9)), *(0.01 * number - 0.009 for number in range(9, 21))]
    monkeypatch.setattr(HostTimer, "stamp", Mock(side_effect=times))
    best = pytest.approx(4 * 2**20 / 0.001 / 1e9, rel=1e-3)
    with fake_group(0, 2):
        assert all_reduce_probe(CPU) == {"all_reduce_gb_s": best}
    # One all-reduce is a warm-up.
    assert [name for name, _, _ in asked.mock_calls] == ["barrier"] + ["all_reduce"] * 21
    assert asked.all_reduce.call_args.args[0].nbytes == 4 * 2**20


def test_keeps_the_workloads_randomness_and_memory() -> None:
    assert not dist.is_initialized()  # the probe does not need the group
    device_probe(CPU)  # from now on, the libraries' own buffers exist
    state = torch.get_rng_state()
    before = psutil.Process().memory_info().rss
    device_probe(CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert psutil.Process().memory_info().rss - before < 8 * 2**20


@pytest.mark.parametrize("nodes", range(2, 9))
def test_neighbours_talk_once_one_pair_at_a_time(nodes: int) -> None:
    rounds = pair_rounds(nodes)
    ring = [(0, 1)] if nodes == 2 else [(node, (node + 1) % nodes) for node in range(nodes)]
    assert sorted(pair for pairs in rounds for pair in pairs) == sorted(ring)
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(set(busy)) == len(busy)
    assert len(rounds) <= 3


def as_node(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=3)
    rounds = list[int]()
    probed = node_probe.node_probe(CPU, 3, rounds.append, rounds=2)
    assert rounds == [1, 2]
    assert sorted(probed) == ["all_reduce_gb_s", "copy_gb_s", "matmul_tflops", "next_gb_s", "previous_gb_s"]
    assert min(probed.values()) > 0
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.launch
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_three_nodes_are_a_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    start_processes(as_node, (str(tmp_path / "meet"),), nprocs=3, start_method="fork")


def test_best_round_and_its_best_matmul_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if other processes disturb all other rounds and most of this one, the best counts."""
    rounds: list[int] = []
    times = [[9.0, 9.0, 9.0], [8.0], [9.0, 2.0, 9.0], [4.0], *[[9.0, 9.0, 9.0], [8.0]] * 8, [0.5], [0.25]]
    monkeypatch.setattr(node_probe, "_seconds", Mock(side_effect=times))
    with fake_group(0, 2):
        probed = node_probe.node_probe(CPU, 2, rounds.append)
    assert probed == {
        "matmul_tflops": pytest.approx(2 * 384**3 / 2.0 / 1e12, rel=1e-3),
        "copy_gb_s": pytest.approx(2 * 64 * 2**20 / 4.0 / 1e9, rel=1e-3),
        "all_reduce_gb_s": pytest.approx(4 * 2**20 / 0.5 / 1e9, rel=1e-3),
        "next_gb_s": pytest.approx(4 * 2**20 / 0.25 / 1e9, rel=1e-3),
    }
    assert rounds == list(range(1, 11))


@pytest.mark.parametrize(("rank", "next_pair", "previous_pair"), [(0, 0, 3), (3, 2, 0), (4, 1, 2)])
def test_all_ranks_of_two_nodes_reduce_together(
    monkeypatch: pytest.MonkeyPatch, rank: int, next_pair: int, previous_pair: int
) -> None:
    """There are four nodes with two ranks each.

    Every rank makes each group, and measures in its own two groups.
    """
    new_group = Mock(wraps=dist.new_group)
    reduced: list[list[int]] = []
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_reduce", lambda _, group: reduced.append(get_process_group_ranks(group)))
    with fake_group(rank, 8):
        probed = node_probe._neighbour_probe(CPU, 4)
    groups = [sorted(call.args[0]) for call in new_group.call_args_list]
    assert groups == [[0, 1, 2, 3], [4, 5, 6, 7], [2, 3, 4, 5], [0, 1, 6, 7]]
    own = [sorted(ranks) for ranks, _ in groupby(reduced)]
    measured = dict(zip(probed, own, strict=True))
    assert measured == {"next_gb_s": groups[next_pair], "previous_gb_s": groups[previous_pair]}
