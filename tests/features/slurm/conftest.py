import os
from collections.abc import Generator, Iterator

import pytest

from tests.features.slurm import emulated
from tests.features.slurm.allocation import Allocation
from tests.features.slurm.emulated import Cluster
from tests.processes import wait_until


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of Slurm's daemons to each failure of a test that uses them."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and cluster is not None:
        report.sections.append(("Slurm", cluster.logs()))
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """One cluster for each process of xdist.

    If no cluster can be started, the test is skipped, or fails if CI is set.
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
    """The cluster, with variables that let Slurm's commands find it from this process."""
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
    """Both nodes, which the tests of a file use one after another. No process may be left on them."""
    _nodes.take()
    monkeypatch.setenv("SLURM_JOB_ID", _nodes.job_id)
    yield _nodes
    wait_until(_nodes.is_clean, "both nodes to be clean")
