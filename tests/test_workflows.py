"""What the workflows run: their make targets, in a small repository of its own with simulated cases."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from perfsuite.case.torch_build import MIN_TORCH

ROOT = Path(__file__).parent.parent
CASES = """
import pytest
from perfsuite import Case, Fake, Topology

@pytest.mark.parametrize("case", [
    Case(model="llama-tiny", framework=Fake(step_ms=10), sequence_length=64, micro_batch=4,
         topology=Topology(processes_per_node=2), hardware="cpu", timeout_s=60)
])
def test_it(bench, case):
    bench(case)
"""
TRAINED = """
import pytest
from perfsuite import Case, Model, Script, Topology

@pytest.mark.parametrize("case", [
    Case(model=Model.named("tiny"), framework=Script(path="train.py"), sequence_length=8, micro_batch=4,
         topology=Topology(nodes=8, processes_per_node=8), hardware="h100")
])
def test_it(bench, case):
    bench(case)
"""
SCRIPT = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.Sequential(torch.nn.Linear(8, 8)).cuda()
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(100):
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SPEEDS = ("tokens_per_s", "tokens_per_s_mean")
NIGHT = 'perfsuite night --hardware "$$HARDWARE"'
DOCTOR, QUICK_DOCTOR = "perfsuite doctor --expect", "perfsuite doctor --quick --expect"
GH = """#!/bin/sh
echo "gh $@" >> "$CALLS"
case "$1 $2" in
  "issue list") echo "[]" ;;
  "pr create" | "issue create") cat >> "$CALLS" ;;
esac
"""

pytestmark = pytest.mark.launch


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with an origin, this project's Makefile and interpreter, two commits, and a stand-in for gh."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gh").write_text(GH)
    (tmp_path / "bin" / "gh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        monkeypatch.delenv(name, raising=False)
    here = tmp_path / "clone"
    (here / "bench_cases").mkdir(parents=True)
    (here / "bench_cases" / "test_cases.py").write_text(CASES)
    # The self-test and the doctor train for real, which is another test's concern.
    makefile = (ROOT / "Makefile").read_text()
    for trains, quick in ((NIGHT, f"{NIGHT} --selftest fake"), (DOCTOR, QUICK_DOCTOR)):
        assert trains in makefile
        makefile = makefile.replace(trains, quick)
    (here / "Makefile").write_text(makefile)
    (here / ".gitignore").write_text(".venv\n.perfsuite/\nbuild/\nout/\nnights/\nhistory/\n__pycache__/\n")
    (here / "docs").mkdir()
    (here / "docs" / "index.md").write_text("# A page\n")
    shutil.copy(ROOT / "docs" / "conf.py", here / "docs")
    for name in ("pyproject.toml", "constraints.txt"):
        (here / name).write_text("")
    git(here, "init", "--quiet", "--initial-branch=main")
    git(here, "init", "--quiet", "--bare", str(tmp_path / "origin"))
    git(here, "remote", "add", "origin", str(tmp_path / "origin"))
    commit(here, "first")
    (here / "note").write_text("")
    commit(here, "second")
    git(here, "push", "--quiet", "origin", "main")
    use_this_interpreter(here)
    return here


def git(where: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=where, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(where: Path, message: str) -> None:
    git(where, "add", "--all")
    git(where, "commit", "--quiet", "-m", message)


def use_this_interpreter(where: Path) -> None:
    """Instead of installing everything anew: .venv stands for the environment that runs this test."""
    scripts = {
        "python": f'[ "$2" = pip ] || exec {sys.executable} "$@"',
        "pytest": f'exec {sys.executable} -m pytest "$@"',
        "sphinx-build": f'exec {sys.executable} -m sphinx "$@"',
        "perfsuite": f"exec {sys.executable} -c 'from perfsuite.cli.app import app; app()' \"$@\"",
    }
    directory = where / ".venv" / "bin"
    directory.mkdir(parents=True)
    for name, text in scripts.items():
        (directory / name).write_text(f"#!/bin/sh\n{text}\n")
        (directory / name).chmod(0o755)
    (where / ".venv" / "installed").touch()


def make(where: Path, *targets: str, status: int = 0, **variables: str) -> str:
    done = subprocess.run(
        ["make", *targets, *(f"{name}={value}" for name, value in variables.items())],
        cwd=where,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.nightly
def test_a_night_is_reported_kept_published_and_an_issue_opened(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(repository, "refresh", HARDWARE="cpu", OUT="out", REASON="the first")
    commit(repository, "baselines")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    make(repository, "night", HARDWARE="cpu", OUT="out")
    assert "1 passed" in (tmp_path / "summary").read_text()
    measured = (repository / "out" / "results.json").read_text()
    shutil.rmtree(repository / "out")  # as if the night had been cut short
    for _ in range(2):
        make(repository, "summary", HARDWARE="cpu", OUT="out")
        assert (tmp_path / "summary").read_text().count("## perfsuite: 1 passed") == 2
    assert (repository / "out" / "results.json").read_text() == measured
    assert (repository / "out" / "index.html").exists()
    make(repository, "keep", status=2)
    shutil.copytree(repository / "out", repository / "nights")  # as a single artifact is downloaded
    make(repository, "keep")
    shutil.rmtree(repository / "nights")
    for night in ("night-cpu", "night-cpu-again"):
        shutil.copytree(repository / "out", repository / "nights" / night)
        make(repository, "keep")
    kept = git(repository, "ls-tree", "-r", "--name-only", "origin/perfsuite-history").splitlines()
    assert len([name for name in kept if not name.startswith("cases/")]) == 1, "the same session once"
    assert git(repository, "rev-parse", "--abbrev-ref", "HEAD") == "main"
    make(repository, "site")
    assert "A page" in (repository / "build" / "site" / "index.html").read_text()
    assert "asv" in (repository / "build" / "site" / "history" / "index.html").read_text()
    make(repository, "drift", OUT="nights/trend")
    assert "2 series in 1 sessions" in (tmp_path / "summary").read_text()
    make(repository, "issue", RUN_URL="https://example.org/runs/0")
    calls = (tmp_path / "calls").read_text()
    assert calls.count("gh issue list") == 1
    assert "gh issue create" not in calls
    make(repository, "night", HARDWARE="cpu", OUT="nights/slow", ARGS="--perf-inject=slowdown=30%", status=2)
    make(repository, "issue", RUN_URL="https://example.org/runs/1")
    assert "gh issue create --title Performance regressions on cpu-" in (tmp_path / "calls").read_text()


def test_ci_tests_the_lowest_torch_and_python_that_pyproject_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bound,) = map(Requirement, project["optional-dependencies"]["torch"])
    installed = make(ROOT, "--dry-run", "--always-make", ".venv-lowest/installed", ".venv-newest/installed")
    lowest = str(bound.specifier).removeprefix(">=")
    assert lowest == "{}.{}".format(*MIN_TORCH)
    assert re.findall(r'"(torch.*)"$', installed, re.MULTILINE) == [f"torch=={lowest}.*", "torch"]
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]["versions"]
    matrix = job["strategy"]["matrix"]
    assert job["steps"][-1]["run"] == 'make "test-$TORCH_VERSION"'
    assert matrix["torch"] == ["lowest", "newest"]
    assert matrix["python"][0] == project["requires-python"].removeprefix(">=")


def test_the_site_is_published_before_there_is_a_history(repository: Path) -> None:
    make(repository, "site")
    assert (repository / "build" / "site" / "index.html").exists()
    assert not (repository / "build" / "site" / "history").exists()


def test_the_pages_of_a_night_are_those_of_a_push() -> None:
    workflows = ROOT / ".github" / "workflows"
    pages = yaml.safe_load((workflows / "pages.yml").read_text())
    assert pages["jobs"]["build"]["steps"][-2]["run"] == "make site"
    night = yaml.safe_load((workflows / "nightly.yml").read_text())["jobs"]["pages"]
    assert night["uses"] == "$/.github/workflows/pages.yml"
    granted = [job["permissions"] for job in pages["jobs"].values()]
    assert night["permissions"] == {name: level for each in granted for name, level in each.items()}


def test_a_release_needs_approval_and_no_password() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert jobs["build"]["permissions"] == {"contents": "read"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"]["name"] == "pypi"
    assert "secrets" not in text


def test_a_tag_that_is_not_the_version_is_not_built(tmp_path: Path) -> None:
    tools = tmp_path / ".venv-dist" / "bin"
    tools.mkdir(parents=True)
    for name in ("python", "twine", "check-wheel-contents"):
        (tools / name).write_text("#!/bin/sh\nmkdir -p dist; touch dist/perfsuite-1.2.0.tar.gz\n")
        (tools / name).chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "constraints.txt").write_text("")
    (tmp_path / ".venv-dist" / "installed").touch()
    make(tmp_path, "dist")
    make(tmp_path, "dist", TAG="v1.2.0")
    said = make(tmp_path, "dist", TAG="v1.3.0", status=2)
    assert "the tag is v1.3.0, __version__ in perfsuite/__init__.py makes perfsuite-1.2.0: change one" in said


def test_runners_with_gpus_install_no_torch_for_cpus() -> None:
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    jobs = [job for file in files for job in yaml.safe_load(file.read_text())["jobs"].values()]
    measuring = [job for job in jobs if "self-hosted" in job.get("runs-on", ())]
    assert len(measuring) == 3
    assert not [job for job in measuring if "PIP_EXTRA_INDEX_URL" in job.get("env", {})]


def test_a_night_without_its_gpus_fails_first_with_the_reason(repository: Path) -> None:
    done = subprocess.run(
        ["make", "night", "HARDWARE=h100", "OUT=out"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no h100 here: it is meant for h100, this machine is cpu-" in done.stderr
    assert "$ perfsuite.cli selftest" not in done.stderr
    assert not (repository / "out").exists()


def test_drift_without_a_history_is_an_error(repository: Path) -> None:
    make(repository, "drift", OUT="out", status=2)


def test_a_pull_request_is_compared_with_its_base(repository: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    venv.write_text(f"#!/bin/sh\ncp -r {repository}/.venv .\n")
    venv.chmod(0o755)
    said = make(repository, "compare", BASE="HEAD~1", HARDWARE="cpu", OUT="out", PYTHON=str(venv))
    base, this = (git(repository, "rev-parse", name)[:12] for name in ("HEAD~1", "HEAD"))
    assert re.search(rf"arm A: HEAD~1 \S+/base/.venv/bin/python .*commit {base}", said)
    assert re.search(rf"arm B: \. .*commit {this}", said)
    assert re.search(r"fake-llama-tiny\S+\s.* 3 of 3 +passed", said)  # a row may be wider than its line
    assert "1 passed" in (repository / "out" / "summary.md").read_text()
    assert not (repository / ".perfsuite" / "baselines").exists()


def test_a_pull_request_is_compared_with_its_base_without_its_hardware(repository: Path) -> None:
    """A model of one layer more, by the workflow of hosted runners."""
    cases = repository / "bench_cases" / "test_cases.py"
    cases.write_text(TRAINED)
    (repository / "train.py").write_text(SCRIPT)
    commit(repository, "a script")
    (repository / "train.py").write_text(SCRIPT.replace("8, 8)", "8, 8), torch.nn.Linear(8, 8)"))
    commit(repository, "deeper")
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "dry.yml").read_text())["jobs"]["compare"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make compare-dry", "make summary"]
    said = make(repository, "compare-dry", BASE="HEAD~1", DRY_CI="script", OUT="out", status=2)
    assert "regressed by a dry run of each arm as if on NVIDIA H100" in " ".join(said.split())
    summary = (repository / "out" / "summary.md").read_text()
    assert "all_reduce of 64 ranks: 288 -> 576 bytes" in summary
    assert not list((repository / ".perfsuite").glob("*.lock")), "no machine is locked"
    make(repository, "compare-dry", BASE="HEAD", DRY_CI="script", OUT="out")


@pytest.mark.nightly
def test_a_slower_baseline_is_accepted_with_its_reason(repository: Path) -> None:
    make(repository, "refresh", HARDWARE="cpu", OUT="out", REASON="the first")
    (file,) = (repository / "baselines").glob("*/fake-*.json")
    known = json.loads(file.read_text())
    for launch in known["launches"]:
        launch["figures"] |= {name: 2 * launch["figures"][name] for name in SPEEDS}
    file.write_text(json.dumps(known))
    commit(repository, "twice as fast")
    make(repository, "refresh", HARDWARE="cpu", OUT="out", REASON="[dropout] is back")
    accepted = json.loads(file.read_text())
    assert len(accepted["launches"]) == 10
    assert accepted["accepted"]["reason"] == "[dropout] is back"
    for name in SPEEDS:
        assert accepted["launches"][0]["figures"][name] < 0.6 * known["launches"][0]["figures"][name]
    assert "1 regressed" in (repository / "out" / "summary.md").read_text()
    make(repository, "refresh", CASES="nothing", HARDWARE="cpu", OUT="out", status=2)


def test_new_baselines_of_what_cannot_be_measured_are_an_error_that_is_shown(repository: Path) -> None:
    cases = CASES.replace("processes_per_node=2", "processes_per_node=1024")
    (repository / "bench_cases" / "test_large.py").write_text(cases)
    said = make(repository, "refresh", HARDWARE="cpu", OUT="out", CASES="1024", REASON="r", status=2)
    assert said.endswith("-m ...\n")
    assert "perfsuite baseline: no measured run of a case matching '*'" in said


def test_new_baselines_become_a_pull_request(repository: Path, tmp_path: Path) -> None:
    make(repository, "refresh", HARDWARE="cpu", OUT="out", CASES="fake and not other", REASON="a new torch")
    assert len(list((repository / "baselines").glob("*/fake-*.json"))) == 1
    make(repository, "propose", HARDWARE="cpu", OUT="out")
    assert git(repository, "show", "--stat", "--format=%s", "HEAD").startswith("Baselines of cpu")
    calls = (tmp_path / "calls").read_text()
    assert "gh pr create --title Baselines of cpu" in calls
    assert "tokens/s: new" in calls


def test_of_what_a_runner_measured_only_baselines_are_proposed(repository: Path, tmp_path: Path) -> None:
    """Code of anybody may have run on that machine: its files are not run, and not followed."""
    secret = tmp_path / "secret"
    secret.write_text("the token")
    measured = repository / "out" / "measured"
    (measured / "baselines" / "cpu").mkdir(parents=True)
    (measured / "out").mkdir()
    for name in ("Makefile", "baselines/conftest.py", "baselines/cpu/case.json", "case.json"):
        (measured / name).write_text("evil: ;")
    (measured / "baselines" / "link.json").symlink_to(secret)
    (measured / "out" / "before-after.txt").symlink_to(secret)
    make(repository, "propose", MEASURED="out/measured", OUT="out/measured/out", REASON="a new torch")
    assert git(repository, "show", "--name-only", "--format=", "HEAD") == "baselines/cpu/case.json"
    assert git(repository, "status", "--porcelain") == ""
    assert "the token" not in (tmp_path / "calls").read_text()
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "baselines.yml").read_text())["jobs"]["propose"]
    download, propose = job["steps"][-2:]
    assert download["with"]["path"] == "measured"
    assert "MEASURED=measured" in propose["run"]


def test_what_a_night_measured_is_shown_and_uploaded_however_it_ends() -> None:
    night = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())["jobs"]["measure"]
    number = next(at for at, step in enumerate(night["steps"]) if step.get("run") == "make night")
    after = night["steps"][number + 1 :]
    assert [step.get("run") or step["with"]["path"].splitlines()[0] for step in after] == [
        "make summary",
        "out",
        ".perfsuite/runs",
    ]
    assert {step["if"] for step in after} == {"always()"}


def test_checkpoints_are_not_uploaded() -> None:
    for name in ("nightly", "compare"):
        text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
        steps = [step for job in yaml.safe_load(text)["jobs"].values() for step in job.get("steps", [])]
        (paths,) = [step["with"]["path"] for step in steps if "hidden" in str(step.get("with"))]
        assert paths.splitlines()[1].startswith("!.perfsuite/")
        assert paths.splitlines()[1].endswith("/**/checkpoints")
