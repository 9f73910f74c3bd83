import os
from collections.abc import Generator, Iterator

import pytest

from tests.features.slurm import emulated
from tests.features.slurm.allocation import Allocation
from tests.features.slurm.emulated import Cluster
from tests.processes import wait_until


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let all tests in this folder start processes as users do."""
    item.add_marker("unforked")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of Slurm's daemons to the report of a failed test that uses a cluster."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and cluster is not None:
        report.sections.append(("Slurm", cluster.logs()))
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Start one cluster for each process of xdist.

    If no cluster can be started, the test is skipped, or it fails if CI is set.
    """
    reason = emulated.missing()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with emulated.slurm_cluster() as started:
        yield started


@pytest.fixture
def slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Return the cluster, after setting the variables with which Slurm's commands find it."""
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
    """Yield an allocation of both nodes for one test. Afterwards, no process must be left on the nodes."""
    _nodes.take()
    monkeypatch.setenv("SLURM_JOB_ID", _nodes.job_id)
    yield _nodes
    wait_until(_nodes.is_clean, "both nodes to be clean")
