from pathlib import Path

import pytest

from perfsuite.errors import CaseError, ExtensionError
from perfsuite.launch.launchers import installed, launcher
from perfsuite.launch.local import LocalLauncher
from tests.packages import PODS, Packages

MEANT_FOR_HERE = """
    @classmethod
    def is_default(cls):
        return True
"""
MISNAMED = """
from perfsuite.inputs.setting import Setting
from perfsuite.launch.local import LocalLauncher

class Pods(LocalLauncher):
    settings = [Setting(name="pool", help="the pool")]
"""


def given(name: str | None = None) -> tuple[object, object]:
    """The settings with which the launcher of `PODS` was made."""
    made = launcher(name)
    assert type(made).__name__ == "Pods"
    values: tuple[object, object] = vars(made)["given"]
    return values


def test_local_queues_for_this_machine() -> None:
    local = launcher("local")
    assert isinstance(local, LocalLauncher)
    assert local.lock is None
    assert local.runs_here


def test_unknown_name_lists_the_launchers(packages: Packages) -> None:
    packages.install("perfsuite-k8s", PODS, launchers="k8s = perfsuite_k8s:Pods")
    with pytest.raises(CaseError, match=r"there is no launcher 'ray'; known are k8s, local"):
        launcher("ray")


def test_settings_become_arguments(
    packages: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages.install("perfsuite-k8s", PODS, launchers="k8s = perfsuite_k8s:Pods")
    monkeypatch.chdir(tmp_path)
    assert given("k8s") == ("any", False)
    (tmp_path / "pytest.ini").write_text("[pytest]\nperf_k8s_pool = gpu\nperf_k8s_spot = true\n")
    assert given("k8s") == ("gpu", True)


def test_default_is_the_one_meant_for_here(packages: Packages) -> None:
    packages.install("perfsuite-k8s", PODS, launchers="k8s = perfsuite_k8s:Pods")
    assert isinstance(launcher(), LocalLauncher)
    packages.uninstall("perfsuite-k8s")
    packages.install("perfsuite-k8s", PODS + MEANT_FOR_HERE, launchers="k8s = perfsuite_k8s:Pods")
    assert given() == ("any", False)


def test_two_that_are_meant_for_here_are_refused(packages: Packages) -> None:
    names = "k8s = perfsuite_k8s:Pods\nk9s = perfsuite_k8s:Other"
    other = f"class Other(LocalLauncher):{MEANT_FOR_HERE}"
    packages.install("perfsuite-k8s", PODS + MEANT_FOR_HERE + other, launchers=names)
    with pytest.raises(CaseError, match="launchers k8s and k9s are both meant for here: name one"):
        launcher()


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("1 / 0", "of perf-bad 1.5 .* cannot be imported: ZeroDivisionError"),
        ("class Pods: pass", "it is .*Pods.*: name a subclass of perfsuite.launch.base.Launcher"),
        ("def Pods(): pass", "it is .*Pods.*: name a subclass of perfsuite.launch.base.Launcher"),
        (
            "from perfsuite.launch.base import Launcher\nclass Pods(Launcher): pass",
            "it has no method launch and machine: add that",
        ),
        (MISNAMED, "rename its setting 'pool' to 'k8s-...'"),
    ],
    ids=["import", "no subclass", "no class", "abstract", "name"],
)
def test_names_a_launcher_that_cannot_be_used(packages: Packages, code: str, problem: str) -> None:
    packages.install("perf-bad", code, launchers="k8s = perf_bad:Pods")
    found = installed()
    assert isinstance(launcher(), LocalLauncher)
    assert "local" in found.usable
    assert [*found.problems] == ["k8s"]
    with pytest.raises(ExtensionError, match=problem) as caught:
        launcher("k8s")
    assert found.problems["k8s"] == str(caught.value)
