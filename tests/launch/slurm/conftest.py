from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launch.slurm.allocation import Allocation
from tests.slurm_cluster import Cluster


@pytest.fixture
def allocation(
    request: pytest.FixtureRequest, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Allocation]:
    """A parameter is a tuple of further options of salloc."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    allocated = Allocation(cluster, *getattr(request, "param", ()))
    monkeypatch.setenv("SLURM_JOB_ID", allocated.job_id)
    yield allocated
    allocated.release()
