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
NO_SETTING = """
from perfsuite.launch.local import LocalLauncher

class Pods(LocalLauncher):
    settings = ["pool"]
"""
TWICE = MISNAMED.replace("[Setting(", "2 * [Setting(").replace('"pool"', '"k8s-pool"')
WITHOUT_ARGUMENT = MISNAMED.replace('"pool"', '"k8s-pool"') + "    def __init__(self): pass"
TAKEN = """
from perfsuite.inputs.setting import Setting
from perfsuite.launch.local import LocalLauncher

class Pods(LocalLauncher):
    settings = [Setting(name="min-launches", help="")]
    def __init__(self, launches=None): pass
"""


def given(name: str | None = None) -> tuple[object, object]:
    """Return the settings that the launcher of `PODS` was created with."""
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
    with pytest.raises(CaseError, match=r"there is no launcher 'ray'; the launchers are k8s, local"):
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
    with pytest.raises(CaseError, match="launchers k8s and k9s are all defaults here: choose one"):
        launcher()


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("1 / 0", "of perf-bad 1.5 .* cannot be imported: ZeroDivisionError"),
        ("class Pods: pass", "it is .*Pods.*: give a subclass of perfsuite.launch.base.Launcher"),
        ("def Pods(): pass", "it is .*Pods.*: give a subclass of perfsuite.launch.base.Launcher"),
        (
            "from perfsuite.launch.base import Launcher\nclass Pods(Launcher): pass",
            "the method launch and machine is missing: add it",
        ),
        (MISNAMED, "rename its setting 'pool' to 'k8s-...'"),
        (NO_SETTING, "its settings contain 'pool': use perfsuite.inputs.setting.Setting"),
        (TWICE, "two of its settings have the same name: rename one"),
        (WITHOUT_ARGUMENT, "it cannot be called with its settings .*'pool'.*: correct that"),
    ],
    ids=["import", "no subclass", "no class", "abstract", "name", "no setting", "twice", "no argument"],
)
def test_names_a_launcher_that_cannot_be_used(packages: Packages, code: str, problem: str) -> None:
    packages.install("perf-bad", code, launchers="k8s = perf_bad:Pods")
    launchers = installed()
    assert isinstance(launcher(), LocalLauncher)
    assert "local" in launchers.usable
    assert [*launchers.problems] == ["k8s"]
    with pytest.raises(ExtensionError, match=problem) as caught:
        launcher("k8s")
    assert launchers.problems["k8s"] == str(caught.value)


def test_refuses_a_setting_named_as_an_option(packages: Packages) -> None:
    packages.install("perf-bad", TAKEN, launchers="min = perf_bad:Pods")
    assert "min" in installed().usable
    launchers = installed({"min-launches"})
    assert "its setting 'min-launches' has the same name as an option" in launchers.problems["min"]
    assert [setting.name for setting in launchers.settings if setting.name == "min-launches"] == []


def test_names_a_launcher_whose_default_fails(packages: Packages) -> None:
    bad = MEANT_FOR_HERE.replace("return True", "1 / 0")
    packages.install("perfsuite-k8s", PODS + bad, launchers="k8s = perfsuite_k8s:Pods")
    with pytest.raises(ExtensionError, match=r"'k8s' fails when asked .*ZeroDivisionError"):
        launcher()
    assert isinstance(launcher("local"), LocalLauncher)
