"""Test calls of pip without an index: variables that would mislead pip, and reasons for failures."""

import sys
from pathlib import Path

import pytest

from perfsuite.errors import PackageError
from perfsuite.launch import installer
from perfsuite.launch.installer import would_install
from perfsuite.launch.overlay import Wanted, release
from tests.packages import only_index, write_wheel
from tests.processes import executable


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only directory where pip finds packages."""
    return only_index(tmp_path / "index", monkeypatch)


MISLEADING = {
    "FORCE_COLOR": "1",
    "PIP_DRY_RUN": "1",
    "PIP_VERBOSE": "2",
    "PIP_QUIET": "3",
    "PIP_REPORT": "/no/such/directory/report.json",
    "PIP_TARGET": "/no/such/directory",
    "PIP_REQUIRE_VIRTUALENV": "1",
    "PIP_NO_INPUT": "1",
    "PIP_PROGRESS_BAR": "on",
}


@pytest.mark.launch
def test_variables_of_pip_mislead_nobody(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables that name the place of packages are kept, because one of them names the only index."""
    write_wheel(index, "plain", "1.0", "VERSION = '1.0'\n")
    for name, value in MISLEADING.items():
        monkeypatch.setenv(name, value)
    made = release(Wanted(releases=("plain==1.0",)), tmp_path / "store")
    assert (made / "plain.py").read_text() == "VERSION = '1.0'\n"
    assert "1.0" in map(str, installer.versions("plain"))


def test_pip_has_the_private_names_we_use() -> None:
    """Without these names, an old pip would download everything before anybody is asked."""
    from pip._internal.cli import cmdoptions
    from pip._internal.operations.prepare import RequirementPreparer

    assert callable(RequirementPreparer.prepare_linked_requirements_more)
    assert "fast-deps" in cmdoptions.use_new_feature.keywords["choices"]  # type: ignore[attr-defined]


WITHOUT_NAMES = """
import pip._internal.cli.req_command
import pip._internal.resolution.resolvelib.resolver
import pip._internal.operations.prepare
del pip._internal.operations.prepare.RequirementPreparer
"""
"""Code that removes a private name from pip, after it has imported the modules of pip that need the name."""


@pytest.mark.launch
def test_a_pip_without_these_names_says_the_same(index: Path) -> None:
    write_wheel(index, "older", "1.0", "", "oldest")
    write_wheel(index, "oldest", "2.0", "")
    without = executable(
        index.with_name("python"),
        "code=$2; shift 2",
        f'exec {sys.executable} -c "{WITHOUT_NAMES}$code" "$@"',
    )
    packages = would_install("older==1.0", python=sys.executable)
    assert would_install("older==1.0", python=str(without)) == packages
    assert [(package.name, package.version) for package in packages] == [("older", "1.0"), ("oldest", "2.0")]


@pytest.mark.launch
@pytest.mark.parametrize(
    ("requirement", "why"),
    [
        (
            "vision==1.5",
            r"^pip finds no vision 1\.5 for Python 3\.\d+\. The nearest versions are 1\.0, 2\.0$",
        ),
        (
            "library==2.0",
            r"^pip finds no vision>=9, which library needs for Python 3\.\d+\. The nearest versions are 1\.",
        ),
        pytest.param(
            "absent==1.0",
            r"^pip finds no absent 1\.0, nor any other version of absent, for Python 3\.\d+$",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_says_which_version_is_missing(index: Path, requirement: str, why: str) -> None:
    for version in ("1.0", "2.0"):
        write_wheel(index, "vision", version)
    write_wheel(index, "library", "2.0", "", "vision>=9")
    with pytest.raises(PackageError, match=why):
        would_install(requirement, python=sys.executable)


@pytest.mark.launch
def test_says_which_python_a_release_needs(index: Path) -> None:
    """Such a release says so itself, or it has only wheels for other Pythons, like an old torch."""
    write_wheel(index, "modern", "1.0", requires_python=">=3.99")
    write_wheel(index, "old", "1.0", tag="cp39-none-any")
    write_wheel(index, "old", "2.0")
    with pytest.raises(PackageError, match=r"^modern needs Python >=3\.99, but this is 3\.\d+\.\d+\. Name"):
        would_install("modern==1.0", python=sys.executable)
    with pytest.raises(
        PackageError, match=r"^old 1\.0 needs Python 3\.9, but this is 3\.\d+\.\d+\. Name the"
    ):
        would_install("old==1.0", python=sys.executable)


@pytest.mark.launch
def test_a_constraint_keeps_the_nearest_versions(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("1.0", "2.0"):
        write_wheel(index, "vision", version)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("vision<3\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(constraints))
    with pytest.raises(
        PackageError, match=r"^pip finds no vision 1\.5 .* The nearest versions are 1\.0, 2\.0$"
    ):
        would_install("vision==1.5", python=sys.executable)


@pytest.mark.launch
def test_says_which_requirements_conflict(index: Path) -> None:
    write_wheel(index, "vision", "1.0")
    write_wheel(index, "vision", "2.0")
    write_wheel(index, "library", "1.0", "", "vision<2")
    with pytest.raises(
        PackageError, match=r"contradict each other: .*vision==2\.0; library 1\.0 depends on vis"
    ):
        would_install("vision==2.0", "library==1.0", python=sys.executable)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("No module named pip", "that environment has no pip. Run .*python -m ensurepip"),
        ("ERROR: this is the reason\nHint: read the manual", ": ERROR: this is the reason$"),
    ],
)
def test_says_what_to_do_about_a_failed_pip(tmp_path: Path, said: str, why: str) -> None:
    python = tmp_path / "python"
    executable(python, f"echo '{said}' >&2; exit 1")
    with pytest.raises(PackageError, match=why):
        installer.pip("install", "x", python=str(python))
