import shutil
import sys

import pytest

from perfsuite import extensions
from perfsuite.errors import ExtensionError
from perfsuite.extensions import COMMANDS, FRAMEWORKS, GROUPS, LAUNCHERS, Extension
from tests.packages import Packages


def test_imports_nothing_before_it_is_needed(packages: Packages) -> None:
    packages.install("perf-broken", "raise RuntimeError('imported')", launchers="k8s = perf_broken:K8s")
    (extension,) = extensions.installed(LAUNCHERS)
    assert (extension.name, extension.package, extension.version) == ("k8s", "perf-broken", "1.5")
    assert extensions.names(LAUNCHERS) == sorted(["k8s", *extensions.own(LAUNCHERS)])
    of_name = extensions.find(LAUNCHERS, "k8s")
    assert of_name is extension
    with pytest.raises(ExtensionError) as caught:
        of_name.load()
    assert str(caught.value) == (
        "k8s = 'perf_broken:K8s' of perf-broken 1.5 (perfsuite.launchers) cannot be imported: "
        "RuntimeError: imported. Upgrade it (pip install --upgrade perf-broken) or remove it "
        "(pip uninstall perf-broken)."
    )


def test_a_name_taken_twice_names_both_packages(packages: Packages) -> None:
    packages.install("perf-one", "", frameworks="mine = perf_one:Mine")
    packages.install("perf-two", "", frameworks="mine = perf_two:Mine\nother = perf_two:Other")
    with pytest.raises(ExtensionError) as caught:
        extensions.find(FRAMEWORKS, "mine")
    assert str(caught.value) == (
        "the name 'mine' (perfsuite.frameworks) is used twice: by perf-one 1.5, and by perf-two 1.5 "
        "(perf_two:Mine). Remove one of them (pip uninstall perf-two), or change its name."
    )
    assert extensions.find(FRAMEWORKS, "other") is not None


def test_metadata_is_read_once(packages: Packages) -> None:
    """After the first look, the metadata is removed."""
    kinds = [group.removeprefix("perfsuite.") for group in GROUPS]
    packages.install("perf-mine", "", **dict.fromkeys(kinds, "mine = perf_mine:Mine"))
    first = [extensions.find(group, "mine") for group in GROUPS]
    shutil.rmtree(packages.directory / "perf_mine-1.5.dist-info")
    assert [extensions.find(group, "mine") for group in GROUPS] == first
    assert [extensions.installed(group) for group in GROUPS] == [(extension,) for extension in first]


@pytest.mark.usefixtures("packages")
def test_own_extensions_need_no_other_metadata() -> None:
    assert extensions.find(LAUNCHERS, "local") is not None
    assert extensions.installed.cache_info().misses == 0


def test_problems_of_every_extension_are_listed(packages: Packages) -> None:
    packages.install("perf-good", "Good = object()", launchers="good = perf_good:Good")
    packages.install("perf-broken", "1 / 0", launchers="broken = perf_broken:X")
    packages.install("perf-taken", "", launchers="local = perf_taken:X\ngood = perf_taken:X")
    problems = extensions.problems(LAUNCHERS, Extension.load)
    assert [error.split(" cannot")[0].split(" (perf")[0] for error in problems] == [
        "broken = 'perf_broken:X' of perf-broken 1.5",
        "the name 'good'",
        "the name 'local'",
    ]
    assert "used twice: by perfsuite itself, and by perf-taken 1.5" in problems[2]
    local = extensions.find(LAUNCHERS, "local")
    assert local is not None
    assert local.package == "perfsuite"


def test_ignores_older_metadata_of_a_source_tree(packages: Packages) -> None:
    packages.install("perfsuite", "", commands="old = perfsuite.old:app")
    (packages.directory / "perfsuite.py").unlink()
    extensions.own.cache_clear()
    try:
        assert "ddp" in extensions.own(FRAMEWORKS)
        assert "old" not in extensions.own(COMMANDS)
    finally:
        extensions.own.cache_clear()


def test_missing_metadata_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    extensions.own.cache_clear()
    with pytest.raises(ExtensionError, match=r"older than its code: install it again \(pip"):
        extensions.own(FRAMEWORKS)
