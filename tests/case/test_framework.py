import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from perfsuite import documents, extensions, frameworks
from perfsuite.case.case import Case, CaseFile
from perfsuite.case.framework import MissingFramework, framework_class
from perfsuite.errors import CaseError, ExtensionError, FileError
from perfsuite.extensions import FRAMEWORKS
from perfsuite.frameworks.base import framework_of
from perfsuite.frameworks.ddp import DDP
from perfsuite.launch.requirements import unsupported
from perfsuite.measure import launch_once
from perfsuite.results.baseline import Baseline
from perfsuite.results.rank_report import Observed
from perfsuite.results.run import Run
from perfsuite.results.session_file import SessionFile
from tests.cli import commands
from tests.packages import MINE, Packages
from tests.samples import (
    make_baseline,
    make_case,
    make_figures,
    make_machine,
    make_result,
    make_run,
    write_session,
)

SIMULATED = f"{MINE}    stage: int = 1\n"


def install(packages: Packages, code: str = SIMULATED, name: str = "mine") -> None:
    packages.install("perf-mine", code, frameworks=f"{name} = perf_mine:Mine")


def read_case(directory: Path, **framework: Any) -> Case:
    """Return the case in `case.json`, as perfsuite wrote it where the framework was installed."""
    file = directory / "case.json"
    content = documents.plain(CaseFile(case=make_case(), device="cpu"))
    content["case"]["framework"] = framework
    file.write_text(json.dumps(content))
    return documents.read(file, CaseFile).case


# Built-in frameworks


def test_each_file_or_folder_is_a_framework() -> None:
    modules = {module.name for module in pkgutil.iter_modules(frameworks.__path__)}
    assert {*extensions.own(FRAMEWORKS)} == modules - {"base", "common"}


@pytest.mark.parametrize("name", extensions.own(FRAMEWORKS))
def test_each_framework_is_in_its_file_or_folder(name: str) -> None:
    kind = framework_class(name)
    assert kind is not None
    assert kind.__module__.removesuffix(".framework") == f"perfsuite.frameworks.{name}"


# Frameworks of other packages


def test_finds_frameworks_of_other_packages(packages: Packages) -> None:
    install(packages)
    case = make_case(framework={"name": "mine", "stage": 2})
    assert case.id.startswith("mine-stage2-gpt2-tiny-")
    assert type(case.framework).__module__ == "perf_mine"
    assert make_case(framework=case.framework) == case
    assert json.loads(case.model_dump_json())["framework"] == {
        "name": "mine",
        "package": "perf-mine",
        "slug": "mine-stage2",
        "step_ms": 10,
        "noise": 0.01,
        "memory_mb": 100,
        "stage": 2,
    }
    assert Case.model_validate_json(case.model_dump_json()) == case


def test_suggests_names_of_other_packages(packages: Packages) -> None:
    install(packages, name="megatron")
    with pytest.raises(
        CaseError, match=r"unknown framework 'megatorn'\. Did you mean 'megatron'\? Known: acc"
    ):
        make_case(framework="megatorn")


BROKEN = pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("Mine = 3", "3 is not a perfsuite.frameworks.Framework: derive it from that class"),
        ("class Mine: name = 'mine'", "is not a perfsuite.frameworks.Framework"),
        (SIMULATED.replace('"mine"', '"other"'), "Mine.name is 'other': set it to 'mine'"),
        (SIMULATED.replace("stage", "package"), "rename its option 'package'"),
        ("raise OSError('no disk')", "cannot be imported: OSError: no disk"),
    ],
    ids=["not a class", "not a framework", "another name", "a taken option", "an error"],
)


def check_broken(use: Callable[[], object], reason: str) -> None:
    """Check that the error names the package, the reason, and what to do."""
    with pytest.raises(ExtensionError) as caught:
        use()
    assert str(caught.value).startswith("mine = 'perf_mine:Mine' of perf-mine 1.5 (perfsuite.frameworks)")
    assert reason in str(caught.value)
    assert "pip uninstall perf-mine" in str(caught.value)


@BROKEN
def test_a_broken_framework_names_its_package(packages: Packages, code: str, reason: str) -> None:
    install(packages, code)
    assert make_case(framework="ddp").framework == DDP()  # the broken framework has not been needed yet
    check_broken(lambda: make_case(framework="mine"), reason)


@BROKEN
def test_a_case_with_a_broken_framework_is_only_data(
    packages: Packages, tmp_path: Path, code: str, reason: str
) -> None:
    install(packages, code)
    case = read_case(tmp_path, name="mine", package="perf-mine", slug="mine", stage=2)
    assert isinstance(case.framework, MissingFramework)
    check_broken(lambda: framework_of(case), reason)


def test_a_name_that_is_built_in_cannot_be_taken(packages: Packages) -> None:
    packages.install("perf-ours", SIMULATED.replace('"mine"', '"ddp"'), frameworks="ddp = perf_ours:Mine")
    import perf_ours  # type: ignore[import-not-found]

    assert make_case(framework="ddp").framework == DDP()
    with pytest.raises(ExtensionError, match=r"'ddp' .* by perfsuite itself, and by perf-ours 1\.5"):
        make_case(framework=perf_ours.Mine())


def test_options_without_behaviour_cannot_run(packages: Packages) -> None:
    code = SIMULATED.replace("frameworks.fake import Fake", "case.framework import FrameworkOptions as Fake")
    install(packages, code)
    with pytest.raises(CaseError, match=r"Mine'> cannot run a case: derive it from"):
        framework_of(make_case(framework="mine"))


# A framework that is not installed


@pytest.fixture
def file_of_missing(packages: Packages, tmp_path: Path) -> Path:
    """Return the file of a case whose framework was uninstalled after it was written."""
    install(packages)
    file = tmp_path / "case.json"
    documents.write(file, CaseFile(case=make_case(framework={"name": "mine", "stage": 2}), device="cpu"))
    packages.uninstall("perf-mine")
    return file


def test_reads_cases_of_a_missing_framework(file_of_missing: Path) -> None:
    case = documents.read(file_of_missing, CaseFile).case
    assert isinstance(case.framework, MissingFramework)
    assert (case.framework.name, case.framework.package) == ("mine", "perf-mine")
    assert case.id.startswith("mine-stage2-gpt2-tiny-s64-")


def test_copies_cases_of_a_missing_framework(file_of_missing: Path) -> None:
    case = documents.read(file_of_missing, CaseFile).case
    assert case.replace(micro_batch=4).framework == case.framework
    assert documents.read(file_of_missing, CaseFile).case == case


def test_writes_cases_of_a_missing_framework_unchanged(file_of_missing: Path) -> None:
    before = file_of_missing.read_text()
    case = documents.read(file_of_missing, CaseFile).case
    documents.write(file_of_missing, CaseFile(case=case, device="cpu"))
    assert file_of_missing.read_text() == before


def test_missing_framework_says_what_to_install(tmp_path: Path) -> None:
    case = read_case(tmp_path, name="gone", package="perf-gone", stage=2)
    said = r"^(Case: framework: )?the framework 'gone' comes from the package perf-gone, .*: pip install perf"
    for use in (
        lambda: framework_of(case),
        lambda: unsupported(case, make_machine()),
        lambda: launch_once(case, make_machine(), tmp_path / "launch"),
        lambda: make_case(framework={"name": "gone", "package": "perf-gone"}),  # no file is involved
    ):
        with pytest.raises(CaseError, match=said):
            use()
    assert not (tmp_path / "launch").exists()
    unknown = read_case(tmp_path, name="gone", package=["?"])
    with pytest.raises(
        CaseError,
        match=r"^unknown framework 'gone'\. Known: .*\. For another framework, pip install the pack",
    ):
        framework_of(unknown)


def test_runs_of_a_missing_framework_are_read(tmp_path: Path) -> None:
    content = documents.plain(make_run())
    origin = {"name": "gone", "package": "perf-gone", "slug": "gone-7"}
    content["case"]["framework"] = {**origin, "nested": {"a": [1, None]}}
    with pytest.raises(ValueError, match="pip install perf-gone"):
        Run.model_validate(content)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(content))
    run = documents.read(file, Run)
    assert documents.plain(run) == content
    assert run.case.framework.promises.loss == "falls"
    assert run.case.id.startswith("gone-7-gpt2-tiny-")


def test_missing_framework_keeps_results(packages: Packages, tmp_path: Path) -> None:
    install(packages)
    run = make_run(
        case=make_case(framework={"name": "mine", "stage": 2}),
        figures=make_figures(step_s_p50=0.25, step_s_mean=0.25, probe_s_p50=0.001),
        observed=Observed(settings={"wrapper": "none"}, environment={"torch": "2.13.0"}),
    )
    session = write_session(tmp_path, make_result(run, before=run))
    baseline = tmp_path / "baseline.json"
    documents.write(baseline, make_baseline(run))
    case_id = run.case.id
    packages.uninstall("perf-mine")
    assert documents.read(baseline, Baseline).case.id == case_id
    assert documents.read(session, SessionFile).results[0].runs[0].case.id == case_id
    assert case_id in commands.run("report", session).stdout


@pytest.mark.parametrize(
    ("other", "is_equal"),
    [
        ({"name": "gone", "stage": 1}, True),
        ({"name": "gone", "stage": 2}, False),
        ({"name": "lost", "stage": 1}, False),
    ],
    ids=["same", "another option", "another name"],
)
def test_missing_frameworks_compare_by_options(tmp_path: Path, other: dict[str, Any], is_equal: bool) -> None:
    framework = read_case(tmp_path, name="gone", stage=1).framework
    assert (read_case(tmp_path, **other).framework == framework) == is_equal


def test_file_with_unknown_options_fails(tmp_path: Path) -> None:
    with pytest.raises(
        FileError, match=r"case\.json: .*no_such: unknown field.*Options of ddp: bucket_cap_mb"
    ):
        read_case(tmp_path, name="ddp", no_such=1)


def test_refuses_a_class_that_no_rank_would_find(packages: Packages) -> None:
    class Mine(DDP):
        name: ClassVar[str] = "mine"

    with pytest.raises(CaseError) as caught:
        make_case(framework=Mine())
    assert 'Add [project.entry-points."perfsuite.frameworks"] mine = "' in str(caught.value)
    assert "install this package with `pip install -e` (docs/develop/extending.md)" in str(caught.value)
    install(packages)
    with pytest.raises(CaseError, match="Mine is defined in"):  # another class has that name
        make_case(framework=Mine())
