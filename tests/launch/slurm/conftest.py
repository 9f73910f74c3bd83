from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launch.slurm.allocation import Allocation
from tests.slurm_cluster import Cluster


@pytest.fixture
def slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, which Slurm's commands find from this process."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield cluster
    cluster.run("scancel", "--full", "--user=root")  # a test that failed may have left its job on the nodes


@pytest.fixture
def allocation(
    request: pytest.FixtureRequest, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Allocation]:
    """A parameter is a tuple of further options of salloc."""
    allocated = Allocation(slurm, *getattr(request, "param", ()))
    monkeypatch.setenv("SLURM_JOB_ID", allocated.job_id)
    yield allocated
    allocated.release()
