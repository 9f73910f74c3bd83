from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launch.slurm.allocation import Allocation
from tests.slurm_cluster import Cluster


@pytest.fixture
def allocation(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocation]:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    allocated = Allocation(cluster)
    monkeypatch.setenv("SLURM_JOB_ID", allocated.job_id)
    yield allocated
    allocated.release()
