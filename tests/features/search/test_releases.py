"""Tests of `perfsuite releases`: its page, its refusals and its files. Runs are fake, and often also pip."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from perfsuite import DDP, Model, Script, documents
from perfsuite.dry.machine import pretended_gpu
from perfsuite.errors import CaseError, DryRunError
from perfsuite.features.search import releases as command_of
from perfsuite.features.search.releases import ReleaseRuns
from perfsuite.features.search.releases_page import ON_CPUS, SENSE
from perfsuite.launch.arm import Arm
from perfsuite.measure import Launching
from perfsuite.results.counts import CONSECUTIVE
from perfsuite.results.rank_report import Failure, Observed
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.session.setup import Host
from tests.cli import commands
from tests.packages import only_index, write_wheel
from tests.processes import have_compiler
from tests.samples import make_case, make_figures, make_machine
from tests.twin_counts import counts, launch

CASE = make_case(framework=DDP())
OTHER = CASE.replace(steps=21)
INDEX = ("1.0", "1.1", "1.1.1", "1.2rc1", "1.2", "2.0")
BOOM = Failure(kind="crash", message="boom", at=0.0)


class Runs:
    """Replaces dry runs and launches. A step has 100 kernels, or the number in `kernels`."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str, str]] = []  # `dry` or `launch`, release and case of each run
        self.devices: list[str | None] = []  # the devices that the dry runs simulated
        self.machine = make_machine()
        self.kernels: dict[str, int] = {}
        self.also_counted: tuple[int, ...] = ()
        self.norms: dict[str, float] = {}
        self.refused: set[tuple[str, str]] = set()  # (way, release) of runs that are refused
        self.failing: set[str] = set()
        self.uninstallable: set[str] = set()
        self.without_cuda: set[str] = set()  # texts of the arms whose torch cannot simulate CUDA
        self.asked: list[str] = []  # the packages about which the index was asked
        # Case or release -> the version that its run observes, if this is not the arm's version.
        self.uses: dict[str, str | None] = {}

    def _run(self, case: Any, directory: Path, arm: Arm, way: str) -> Run:
        package, _, release = arm.text.split()[0].partition("==")
        self.made.append((way, release, case.id))
        if (way, release) in self.refused:
            raise DryRunError("a shape depends on values")
        used = self.uses.get(case.id, self.uses.get(release, release))
        # The package's metadata spells its name like this.
        name = {"some_thing": "Some-Thing"}.get(package, package)
        run = launch(
            counts(
                kernels={"forward": self.kernels.get(release, 100)},
                also_counted=self.also_counted,
            ),
            case=case,
            machine=self.machine,
            dry=way == "dry",
            observed=Observed(settings={}, environment={} if used is None else {name: used}),
            figures=make_figures(gradient_norm=self.norms.get(release, 1.0)),
            failure=BOOM if release in self.failing else None,
        )
        documents.write(RunDir(directory).run, run)
        return run

    def dry(self, case: Any, directory: Path, *, device: str | None, arm: Arm, counted_steps: int) -> Run:
        assert counted_steps == CONSECUTIVE
        self.devices.append(device)
        return self._run(case, directory, arm, "dry")

    def resolve(self, option: str, text: str, **_: Any) -> Arm:
        if text.split()[0].partition("==")[2] in self.uninstallable:
            raise CaseError(f"{text}: pip: ERROR: Cannot install {text} and torch==2.13.0")
        return Arm(text=text)

    def launch(self, case: Any, machine: Any, directory: Path, how: Launching) -> Run:
        return self._run(case, directory, how.arm, "launch")

    def versions(self, package: str) -> list[Version]:
        self.asked.append(package)
        return [*map(Version, INDEX)]

    def why_no_cuda(self, arm: Arm) -> str | None:
        return "built for CUDA" if arm.text in self.without_cuda else None

    @property
    def released(self) -> list[str]:
        """Return the release of each run."""
        return [release for _, release, _ in self.made]

    def replace(self, monkeypatch: pytest.MonkeyPatch, **index: Any) -> None:
        """Replace the runs of the command, and functions that ask the index of packages."""
        replaced = {"dry": self.dry, "launch": self.launch, "why_no_cuda": self.why_no_cuda, **index}
        monkeypatch.setattr(command_of, "ReleaseRuns", partial(ReleaseRuns, **replaced))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Replace runs and pip. There are two cases, and a package with six releases."""
    monkeypatch.setenv("PIP_ONLY_BINARY", ":all:")
    stand_in = Runs()
    commands.hold(monkeypatch, CASE, OTHER)
    have_compiler(tmp_path / "compiler", monkeypatch)
    stand_in.replace(monkeypatch, versions=stand_in.versions, resolve=stand_in.resolve)
    return stand_in


def command(*words: object, ids: Sequence[str] = (CASE.id,), status: int = 0) -> Any:
    return commands.run("releases", "some_thing", *words, *ids, status=status)


def sections_of(page: str) -> tuple[str, str, str, str]:
    """Return the head, two releases with changes, and the list of releases without changes."""
    head, first, second, same = page.split("\n## ")
    return head, first, second, same


@pytest.fixture
def page_of_changes(runs: Runs) -> str:
    runs.kernels = {"1.2": 90, "2.0": 95}
    return str(command("--from", "1.0").stdout)


def test_page_begins_with_where_each_case_ran(page_of_changes: str) -> None:
    assert page_of_changes.startswith(f"# Releases of some_thing\n\n{SENSE}\n\n{ON_CPUS}\n\n")
    ran = f"\n\n- {CASE.id}: dry run on CPUs, 1 step counted\n\n## 1.1.1 → 1.2\n"
    assert ran in page_of_changes


def test_page_shows_changes_by_release(page_of_changes: str) -> None:
    _, first, second, _ = sections_of(page_of_changes)
    assert f"\n| {CASE.id} | " in first
    assert " | 100 → 90 | " in first
    assert "  - improved: kernels in forward: 100 → 90 a step" in first
    assert second.startswith("1.2 → 2.0\n")
    assert "  - regressed: kernels in forward: 90 → 95 a step" in second


def test_page_lists_releases_without_changes(page_of_changes: str) -> None:
    *_, same = sections_of(page_of_changes)
    assert same.splitlines() == ["The same in every case", "", "- 1.0 → 1.1", "- 1.1 → 1.1.1"]


def test_json_has_the_changes_of_each_release(runs: Runs) -> None:
    runs.kernels = {"1.2": 90, "2.0": 95}
    first, *_, last = commands.rows(command("--from", "1.0", "--json").stdout)
    assert (first["title"], first["same"], first["rows"]) == ("1.0", 0, [])
    assert last["title"] == "1.2 -> 2.0"
    assert "  - regressed: kernels in forward: 90 -> 95 a step" in "\n".join(last["lines"])


def test_page_shows_where_cases_ran(runs: Runs) -> None:
    both = "No case uses: mixed precision (autocast), gradient accumulation.\n"
    assert both in command("--from", "1.2").stdout


def test_page_shows_how_many_steps_were_counted(runs: Runs) -> None:
    runs.also_counted = (5, 6)
    assert f"\n- {CASE.id}: dry run on CPUs, 3 steps counted\n" in command("--from", "1.2").stdout


def test_page_shows_the_pretended_gpu(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CASE.replace(hardware="h100", precision="bf16-mixed", gradient_accumulation=2)
    commands.hold(monkeypatch, gpu)
    runs.machine = pretended_gpu("NVIDIA H100 80GB HBM3", gpu.topology)
    page = command("--from", "1.2", ids=(gpu.id,)).stdout
    assert f"{SENSE}\n\n- {gpu.id}: dry run as if on NVIDIA H100 80GB HBM3, 1 step counted\n" in page


def test_runs_each_release_once(runs: Runs) -> None:
    page = command("--from", "1.0", ids=(CASE.id, OTHER.id)).stdout
    assert runs.released == ["1.0", "1.0", "1.1", "1.1", "1.1.1", "1.1.1", "1.2", "1.2", "2.0", "2.0"]
    assert command("--from", "1.0", ids=(CASE.id, OTHER.id)).stdout == page
    assert len(runs.made) == 10
    for file in Path(".perfsuite/releases").glob("*/run.json"):
        file.write_text(file.read_text()[:-100])
    command("--from", "1.2")
    assert runs.released[10:] == ["1.2", "2.0"]


def test_a_changed_script_is_run_again(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    script = make_case(model=Model.named("mine"), framework=Script(path="train.py"))
    commands.hold(monkeypatch, script)
    for text in ("pass\n", "pass  # more\n"):
        Path("train.py").write_text(text)
        command("--from", "1.2", ids=(script.id,))
    assert runs.released == ["1.2", "2.0"] * 2


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--from 1.0 --minors", "1.0, 1.1.1, 1.2, 2.0"),
        ("--from 1.0 --to 1.2 --minors", "1.0, 1.1.1, 1.2"),
        ("--from 1.0 --to 1.1.1 --minors", "1.0, 1.1.1"),
        ("--from 1.1.1 --to 1.2rc1", "1.1.1, 1.2rc1"),  # a pre-release must be named by the user
        ("--from 2.0 --to 1.0", "--from 2.0 is newer than --to 1.0: swap them"),
        ("--from main", "--from or --to is not a version (Invalid version: 'main'): give one such as 2.11.0"),
        ("--from 2.0", "some_thing has no release after 2.0: give an older one with --from"),
        ("--from 1.0 --to 1.0", "some_thing has no release after 1.0"),
        ("", "some_thing is not installed here: give the oldest release with --from"),
    ],
)
def test_lists_the_releases_or_names_the_bad_option(runs: Runs, words: str, names: str) -> None:
    if names[0].isdigit():
        listed = f"{names.count(',') + 1} releases of some_thing: {names}\n"
        assert command(*words.split()).stderr.startswith(listed)
    else:
        assert names in command(*words.split(), status=2).stderr
        assert not runs.made


def test_launches_both_releases_if_not_dry(runs: Runs) -> None:
    runs.refused = {("dry", "1.2")}
    runs.norms = {"2.0": 2.0}
    page = command("--from", "1.1.1").stdout
    ways = [("dry", "1.1.1"), ("dry", "1.2"), ("launch", "1.1.1"), ("launch", "1.2"), ("launch", "2.0")]
    assert [made[:2] for made in runs.made] == ways
    assert f"- {CASE.id}: launch on CPUs" in page
    assert "  - the norm of the gradients after clipping in step 4: 1 → 2 (at most 2.0% is allowed)" in page


def test_launches_every_case_on_request(runs: Runs) -> None:
    command("--from", "1.2", "--launch", ids=(OTHER.id,))
    assert [made[:2] for made in runs.made] == [("launch", "1.2"), ("launch", "2.0")]


def test_a_cpu_is_pretended_if_one_torch_needs_it(runs: Runs) -> None:
    runs.without_cuda = {"torch==2.0"}
    commands.run("releases", "torch", "--from", "1.1.1", CASE.id)
    assert runs.released == ["1.1.1", "1.2", "1.2", "2.0"]
    assert runs.devices == [None, None, "cpu", "cpu"]


def test_a_case_of_another_machine_says_only_that(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CASE.replace(hardware="h100")
    commands.hold(monkeypatch, gpu)
    runs.refused = {("dry", "2.0")}
    page = command("--from", "1.2", ids=(gpu.id,), status=3).stdout
    assert f"\n## 1.2 → 2.0\n\n- {gpu.id}: dry run: a shape depends on values\n" in page


def test_refuses_unrunnable_cases_before_pip(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CASE.replace(hardware="h100", steps=22)
    commands.hold(monkeypatch, gpu, CASE)
    said = commands.error_of("releases", "some_thing", "--from", "1.2", "--launch", gpu.id)
    assert f"{gpu.id}: it is meant for h100, but this machine is " in said
    assert runs.asked == []


def test_leaves_out_unrunnable_cases_among_others(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CASE.replace(hardware="h100", steps=22)
    commands.hold(monkeypatch, gpu, CASE)
    said = command("--from", "1.2", "--launch", "-k", "any", ids=()).stderr
    assert f"{gpu.id}: it is meant for h100" in said
    assert {case for _, _, case in runs.made} == {CASE.id}


def test_compares_with_the_last_release_that_ran(runs: Runs) -> None:
    runs.failing = {"1.1"}
    runs.kernels = {"1.1.1": 90}
    runs.uses = {"2.0": "1.2"}
    runs.uninstallable = {"1.2"}
    page = command("--from", "1.0", status=3).stdout
    assert f"## 1.0 → 1.1\n\n- {CASE.id}: dry run: with some_thing==1.1: crash: boom; launch: with" in page
    assert f"- {CASE.id}, since 1.0\n  - improved: kernels in forward: 100 → 90" in page
    assert "## 1.1.1 → 1.2\n\n- not installed: Cannot install some_thing==1.2 and torch==2.13.0\n" in page
    assert (
        f"## 1.1.1 → 2.0\n\n- {CASE.id}: dry run: with some_thing==2.0: the run used some_thing 1.2" in page
    )


def test_skips_cases_that_do_not_use_the_package(runs: Runs) -> None:
    runs.uses = {OTHER.id: None}
    result = command("--from", "1.2", ids=(CASE.id, OTHER.id))
    assert f"left out: {OTHER.id} does not use some_thing" in result.stderr
    assert OTHER.id not in result.stdout.partition("\n## ")[2]


def test_installs_other_packages_with_each_release(runs: Runs) -> None:
    runs.failing = {"2.0"}
    page = command("--from", "1.2", "--with", "setuptools==80.9.0 b==1", status=3).stdout
    assert "\n\nInstalled with each release: setuptools==80.9.0, b==1.\n\n" in page
    assert "with some_thing==2.0 setuptools==80.9.0 b==1: crash: boom" in page


def test_runs_with_other_packages_are_kept_separately(runs: Runs) -> None:
    command("--from", "1.2")
    command("--from", "1.2", "--with", "setuptools==80.9.0")
    assert runs.released == ["1.2", "2.0"] * 2


def test_another_torch_is_asked_for_its_gpu(runs: Runs) -> None:
    runs.without_cuda = {"some_thing==1.2 torch==2.13.0"}
    command("--from", "1.2", "--with", "torch==2.13.0")
    assert {*runs.devices} == {"cpu"}


@pytest.mark.parametrize("word", ["setuptools", "X=1", "some-thing==1.0"])
def test_refuses_words_that_are_no_other_releases(runs: Runs, word: str) -> None:
    said = command("--from", "1.2", "--with", f"a==1 {word}", status=2).stderr
    assert f"--with {word!r}: give releases of packages other than some_thing, such as setuptools==" in said
    assert not runs.made


def test_the_page_says_if_no_release_ran(runs: Runs) -> None:
    runs.failing = {"1.2"}
    runs.uninstallable = {"2.0"}
    page = command("--from", "1.2", status=3).stdout
    assert f"{SENSE}\n\nNo case ran with any release.\n\n## 1.2\n\n- {CASE.id}: dry run: with" in page
    assert "\n\n## 1.2 → 2.0\n\n- not installed: Cannot install some_thing==2.0 and torch" in page


def test_names_a_case_that_stops_using_the_package(runs: Runs) -> None:
    runs.uses = {"1.2": None}
    runs.kernels = {"2.0": 90}
    page = command("--from", "1.1.1", status=3).stdout
    assert f"## 1.1.1 → 1.2\n\n- {CASE.id}: its run did not use some_thing\n" in page
    assert f"- {CASE.id}, since 1.1.1\n  - improved: kernels in forward: 100 → 90" in page


def test_launches_of_another_machine_are_not_reused(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cpu-node-a-8c", "cpu-node-b-8c"):
        runs.machine = make_machine(hardware_class=name)
        monkeypatch.setattr(Host, "machine_for", lambda self, case: runs.machine)
        command("--from", "1.2", "--launch")
    assert runs.released == ["1.2", "2.0"] * 2


def test_cases_without_the_package_are_an_error(runs: Runs) -> None:
    runs.uses = {OTHER.id: None}
    said = command("--from", "1.2", ids=(OTHER.id,), status=2).stderr
    assert "no case uses some_thing: give a case that imports it" in said


@pytest.mark.launch
@pytest.mark.nightly
def test_reports_what_pip_cannot_install(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.replace(monkeypatch)
    own_index = only_index(tmp_path / "found", monkeypatch)
    write_wheel(own_index, "torch", "99", "")
    (own_index / "some_thing-1.5.tar.gz").write_bytes(b"")  # pip would have to build this release
    index = tmp_path / "index/some-thing"
    index.mkdir(parents=True)
    links = []
    for version, needs in (("1.0", ()), ("1.1", ("torch==99",)), ("1.2", ()), ("2.0", ())):
        write_wheel(index, "some_thing", version, "", *needs)
        name = f"some_thing-{version}-py3-none-any.whl"
        yanked = 'data-yanked=""' * (version == "1.2")
        links.append(f'<a href="{name}" {yanked}>{name}</a>')
    (index / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", index.parent.as_uri())
    result = command("--from", "0.9", status=3)
    assert "5 releases of some_thing: 0.9, 1.0, 1.1, 1.5, 2.0\n" in result.stderr
    for title, version in (("0.9", "0.9"), ("1.0 → 1.5", "1.5")):
        said = f"- not installed: pip finds no some_thing {version} for Python "
        assert f"## {title}\n\n{said}" in result.stdout
    assert "- not installed: these requirements contradict each other: " in result.stdout
    assert result.stdout.endswith("\n- 1.0 → 2.0\n")
    assert [*Path(".perfsuite/packages").glob("some_thing==2.0-*/some_thing.py")]
    assert command("--from", "1.2", "--minors", status=3).stdout.endswith("\n- 1.2 → 2.0\n")
    said = commands.error_of("releases", "nosuch", "--from", "1.0", CASE.id)
    assert "ERROR: No matching distribution found for nosuch" in said
