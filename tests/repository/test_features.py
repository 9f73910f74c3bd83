"""Tests that each feature can be deleted with its tests and pages, without breaking the core."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import NamedTuple

import pytest

import perfsuite
from perfsuite import extensions
from perfsuite.extensions import FRAMEWORKS
from tests.case_files import BENCH_CASES, cases_of
from tests.frameworks import removable

ROOT = Path(__file__).parents[2]


class Removable(NamedTuple):
    """A part of perfsuite that can be deleted."""

    package: str
    paths: tuple[str, ...]  # the paths to delete: its code, tests and pages
    named_by: tuple[str, ...] = ("Makefile", "tests/pictures")  # other files that name it, but do not need it


def feature(name: str, *pages: str) -> Removable:
    """Return a feature, which has a folder in `perfsuite/features` and one in `tests/features`."""
    return Removable(
        f"perfsuite.features.{name}", (f"perfsuite/features/{name}", f"tests/features/{name}", *pages)
    )


def framework(name: str, *files: str) -> Removable:
    """Return a framework, which has a folder for its code and one for its tests, and maybe files of cases."""
    paths = (f"perfsuite/frameworks/{name}", f"tests/frameworks/{name}", *files)
    return Removable(f"perfsuite.frameworks.{name}", paths, OF_ALL_FRAMEWORKS)


OF_ALL_FRAMEWORKS = (
    "docs/evidence",
    "perfsuite/__init__.py",  # its imports for type checkers
    "tests/repository/test_imports.py",
    "tests/repository/test_private_names.py",
    "tests/repository/test_public.py",
)
"""Files that name several frameworks, and do without those that were deleted."""

REMOVABLE = {
    "exports": feature("exports", "docs/dashboards.md"),
    "first_night": feature("first_night", "docs/first-night.md"),
    "github": feature("github", "docs/github.md"),
    "history": feature("history", "docs/history.md"),
    "logs": feature("logs", "docs/existing-jobs.md"),
    "nightly": feature("nightly", "docs/your-repository.md"),
    "search": feature("search", "docs/bisect.md", "docs/releases"),
    "slurm": feature("slurm", "docs/slurm.md"),
    "deepspeed": framework("deepspeed"),
    "nanotron": framework(
        "nanotron", "bench_cases/test_fsdp_vs_3d_parallelism.py", "bench_cases/test_nanotron_known_issues.py"
    ),
    "torchtitan": framework(
        "torchtitan",
        "bench_cases/test_torchtitan_a100.py",
        "bench_cases/test_torchtitan_h100.py",
        "bench_cases/test_torchtitan_registry.py",
        "bench_cases/torchtitan_configs.py",
        "tests/bench_cases/test_theory.py",  # most formulas are for torchtitan's own models
        "tests/benchmarks/theory.py",
    ),
}
each_removable = pytest.mark.parametrize("name", REMOVABLE)

LONGEST_S = 14 * 60  # below `faulthandler_timeout`, which would end the process of this test
ABOUT_THE_REPOSITORY = (
    "tests/features",
    "tests/pages",
    "tests/pictures",
    "tests/repository/test_features.py",
    "tests/repository/test_workflows.py",
)
"""Tests that are left out when the suite runs on a copy without one feature: the tests of features, pages,
pictures and workflows.

Pages link to the pages of features, and workflows run commands of features. Whoever deletes a feature has to
edit both.
"""


def tracked() -> list[str]:
    """Return the files of the repository as git lists them, including new ones."""
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if (ROOT / name).is_file()]


def is_below(name: str, paths: tuple[str, ...]) -> bool:
    return any(name == path or name.startswith(f"{path}/") for path in paths)


def without_entry_points(pyproject: str, package: str) -> str:
    """Return `pyproject.toml` without the entry points of a package."""
    return re.sub(rf'^[\w-]+ = "{re.escape(package)}[.:].*\n', "", pyproject, flags=re.MULTILINE)


def test_the_table_has_every_feature() -> None:
    folders = {file.parent.name for file in (ROOT / "perfsuite" / "features").glob("*/__init__.py")}
    assert folders | {*removable.REMOVABLE} <= {*REMOVABLE}


@each_removable
def test_its_paths_exist(name: str) -> None:
    assert [path for path in REMOVABLE[name].paths if not (ROOT / path).exists()] == []


@each_removable
def test_only_its_own_files_name_it(name: str) -> None:
    package, paths, named_by = REMOVABLE[name]
    folder = package.removeprefix("perfsuite.").replace(".", "/")
    named = re.compile(rf"{re.escape(package)}\b|{folder}\b")
    naming = []
    for file in tracked():
        if not is_below(file, (*paths, *named_by)):
            text = (ROOT / file).read_text(errors="replace")
            kept = without_entry_points(text, package) if file == "pyproject.toml" else text
            if named.search(kept):
                naming.append(file)
    assert naming == []


@cache
def imported_by(file: Path) -> frozenset[str]:
    """Return the modules that a file imports, and the names that it imports from them, with dots.

    Imports for type checkers are left out.
    """
    nodes = list(without_type_checking(ast.parse(file.read_text())))
    modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return frozenset(modules).union(
        f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )


def without_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a file, except those in `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from without_type_checking(child)


@each_removable
def test_no_other_file_imports_it(name: str) -> None:
    """If a file imported it, the core's tests could not be collected without it."""
    package, paths, _ = REMOVABLE[name]
    modules = tuple(path.removesuffix(".py").replace("/", ".") for path in paths)
    values = re.findall(rf'"{re.escape(package)}:(\w+)"', (ROOT / "pyproject.toml").read_text())
    public = {f"perfsuite.{value}" for value in values}
    importing = [
        file
        for file in tracked()
        if file.endswith(".py") and not is_below(file, (*paths, "tests/pages", "tests/pictures"))
        for imported in imported_by(ROOT / file)
        if imported in public or f"{imported}.".startswith(tuple(f"{module}." for module in modules))
    ]
    assert importing == []


@pytest.mark.parametrize("name", sorted({*removable.REMOVABLE} - {*removable.DELETED}))
def test_other_files_of_cases_leave_it_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deleted = {ROOT / path for path in REMOVABLE[name].paths}
    files = sorted({*BENCH_CASES.glob("test_*.py")} - deleted)
    before = [case for file in files for case in cases_of(file).values()]
    of_all = extensions.own(FRAMEWORKS)
    left = {other: extension for other, extension in of_all.items() if other != name}
    monkeypatch.setattr(extensions, "own", {FRAMEWORKS: left}.__getitem__)
    monkeypatch.delattr(perfsuite, of_all[name].entry_point.attr)  # it was imported before
    after = [case for file in files for case in cases_of(file).values()]
    assert after == [case for case in before if case.framework.name != name]
    assert 0 < len(after) < len(before)


def test_only_modules_with_commands_write_to_the_terminal() -> None:
    """For the core, import-linter checks this. For features, its contract would have to name each feature."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    with_commands = {value.partition(":")[0] for value in points["perfsuite.commands"].values()}
    writing = set()
    for file in (ROOT / "perfsuite" / "features").rglob("*.py"):
        if re.search(r"^\s*(import|from) (rich|typer)\b", file.read_text(), re.MULTILINE):
            writing.add(".".join(file.relative_to(ROOT).with_suffix("").parts))
    assert writing
    assert writing <= with_commands


def delete(name: str, repository: Path) -> None:
    """Copy the repository without a part and without its entry points."""
    package, paths, _ = REMOVABLE[name]
    for file in tracked():
        if not is_below(file, paths):
            (repository / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, repository / file)
    project = repository / "pyproject.toml"
    project.write_text(without_entry_points(project.read_text(), package))
    install_metadata(repository)


def run_pytest(repository: Path, *words: str) -> str:
    """Run unit tests of a copy of the repository. Return the output. They must pass."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-m", "unit", "-q", "-p", "no:cacheprovider"],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST_S,
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
    return ran.stdout


@pytest.mark.launch
@pytest.mark.parametrize("name", removable.REMOVABLE)
def test_tests_of_cases_are_collected_without_it(name: str, tmp_path: Path) -> None:
    """These tests use cases of every framework when they are imported. Nightly tests run all tests."""
    delete(name, tmp_path)
    files = ("tests/bench_cases", "tests/dry/test_builds.py", "tests/repository/test_gpu_day.py")
    assert re.search(r"\b\d{3,} tests collected", run_pytest(tmp_path, "--collect-only", *files))


@pytest.mark.launch
@pytest.mark.nightly
@each_removable
def test_the_core_passes_without_it(name: str, tmp_path: Path) -> None:
    delete(name, tmp_path)
    ignored = [f"--ignore={path}" for path in ABOUT_THE_REPOSITORY]
    shown = run_pytest(tmp_path, "tests", *ignored, "--numprocesses=3", "--dist=worksteal")
    assert re.search(r"\b\d{4,} passed", shown)


def install_metadata(repository: Path) -> None:
    """Copy the metadata of the installed perfsuite, with the entry points of this `pyproject.toml`.

    A source tree can contain a `perfsuite.egg-info` as well, which has a `PKG-INFO` instead of `METADATA`.
    """
    files = [file for package in distributions(name="perfsuite") for file in package.files or ()]
    metadata = next(Path(str(file.locate())) for file in files if file.name == "METADATA")
    copied = repository / metadata.parent.name
    shutil.copytree(metadata.parent, copied)
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    lines = ["[console_scripts]", *(f"{key} = {value}" for key, value in project["scripts"].items())]
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (copied / "entry_points.txt").write_text("\n".join(lines) + "\n")


def test_an_egg_info_is_not_the_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Setuptools writes one into the source tree. Its files are those of a `SOURCES.txt`."""
    egg_info = tmp_path / "source" / "perfsuite.egg-info"
    egg_info.mkdir(parents=True)
    (egg_info / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: perfsuite\nVersion: 0.0\n")
    (egg_info / "SOURCES.txt").write_text("perfsuite.egg-info/PKG-INFO\n")
    monkeypatch.syspath_prepend(egg_info.parent)
    assert not any(file.name == "METADATA" for file in distribution("perfsuite").files or ())
    repository = tmp_path / "repository"
    repository.mkdir()
    shutil.copy(ROOT / "pyproject.toml", repository)
    install_metadata(repository)
    (written,) = repository.glob("*.dist-info/entry_points.txt")
    assert "[perfsuite.frameworks]" in written.read_text()
