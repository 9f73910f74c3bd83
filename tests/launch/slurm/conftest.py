from collections.abc import Iterator

import pytest

from tests.launch.slurm.allocation import Allocation
from tests.processes import wait_until
from tests.slurm_cluster import Cluster


@pytest.fixture
def slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, which Slurm's commands find from this process."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return cluster


@pytest.fixture(scope="module")
def _nodes(cluster: Cluster) -> Iterator[Allocation]:
    allocated = Allocation(cluster)
    yield allocated
    allocated.release()


@pytest.fixture
def allocation(_nodes: Allocation, slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocation]:
    """Both nodes, which the tests of a file take one after the other; no process may be left on them."""
    _nodes.take()
    monkeypatch.setenv("SLURM_JOB_ID", _nodes.job_id)
    yield _nodes
    wait_until(_nodes.is_clean, "both nodes to be clean")
