from typing import Any

import pytest

from perfsuite.errors import CaseError, MachineError
from perfsuite.launch.launchers import launcher, usual
from perfsuite.launch.local import LocalLauncher
from perfsuite.launch.slurm.launcher import SlurmLauncher

THEIRS = """
from perfsuite.launch.local import LocalLauncher

class Pods(LocalLauncher):
    name = "k8s"
"""


@pytest.fixture(autouse=True)
def _no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "local"),
        ({"SLURM_JOB_ID": "7"}, "local"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}, "local"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}, "slurm"),
        ({"SLURM_JOB_NUM_NODES": "2"}, "local"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2-4"}, "local"),
    ],
)
def test_slurm_is_the_default_over_several_nodes(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert usual() == name
    assert launcher().name == name


def test_one_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match=r"in no allocation .* perfsuite slurm submit"):
        launcher("slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert isinstance(launcher("slurm"), SlurmLauncher)
    assert launcher("slurm").lock == "/tmp/perfsuite-slurm-7.lock"
    assert isinstance(launcher("local"), LocalLauncher)
    assert launcher("local").lock is None


def test_knows_launchers_of_other_packages(packages: Any) -> None:
    with pytest.raises(CaseError, match=r"there is no launcher 'ray'; known are local, slurm$"):
        launcher("ray")
    packages.install("perfsuite-k8s", THEIRS, launchers="k8s = perfsuite_k8s:Pods")
    assert launcher("k8s").name == "k8s"
