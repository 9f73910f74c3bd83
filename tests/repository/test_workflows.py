"""Tests of the workflows' own steps, which run in a small repository with simulated cases."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from perfsuite import Model, Script, Topology
from perfsuite.case.torch_build import MIN_TORCH
from tests import simulated
from tests.gh import Gh
from tests.processes import executable, output_of
from tests.samples import BEFORE, judged, make_case, make_result, write_session
from tests.suite import measuring
from tests.synthetic import commit, git

ROOT = Path(__file__).parents[2]
FAKE = make_case(
    model="llama-tiny", micro_batch=4, topology=Topology(processes_per_node=1), max_warmup_steps=20, steps=50
)
CASES = measuring(FAKE)
TRAINED = measuring(
    FAKE.replace(
        model=Model.named("tiny"),
        framework=Script(path="train.py"),
        sequence_length=8,
        topology=Topology(nodes=8, processes_per_node=8),
        hardware="h100",
    )
)
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
WORKFLOWS = ROOT / ".github" / "workflows"
CONTENT = """
import os, sys

if "perfsuite.cli" in sys.orig_argv and {"doctor", "selftest"} & {*sys.orig_argv}:
    os._exit(0)
"""

pytestmark = pytest.mark.launch


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a clone with an origin, this project's Makefile and interpreter, two commits, and a fake gh."""
    here = tmp_path / "clone"
    (tmp_path / "bin").mkdir()
    Gh(tmp_path / "bin").answers([])
    monkeypatch.setenv("PATH", f"{here / '.venv' / 'bin'}:{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "bin" / "calls"))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio -p no:xdist --perf-wait-quiet=0")
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        monkeypatch.delenv(name, raising=False)
    (here / "bench_cases").mkdir(parents=True)
    (here / "bench_cases" / "test_cases.py").write_text(CASES)
    shutil.copy(ROOT / "Makefile", here)
    (here / ".gitignore").write_text(".venv\n.perfsuite/\nbuild/\nout/\nnights/\nhistory/\n__pycache__/\n")
    (here / "docs" / "extra").mkdir(parents=True)
    (here / "docs" / "index.md").write_text("# A page\n")
    shutil.copy(ROOT / "docs" / "conf.py", here / "docs")
    shutil.copytree(ROOT / "docs" / "static", here / "docs" / "static")
    for name in ("pyproject.toml", "constraints.txt"):
        (here / name).touch()
    git(here, "init", "--quiet", "--initial-branch=main")
    git(here, "init", "--quiet", "--bare", str(tmp_path / "origin"))
    git(here, "remote", "add", "origin", str(tmp_path / "origin"))
    commit(here, "first")
    (here / "note").touch()
    commit(here, "second")
    git(here, "push", "--quiet", "origin", "main")
    use_this_interpreter(here)
    return here


def use_this_interpreter(where: Path) -> None:
    """Make a fake .venv that uses the environment of this test, instead of installing everything again."""
    directory = where / ".venv" / "bin"
    directory.mkdir(parents=True)
    (where / ".venv" / "installed").touch()
    for name, line in {
        "python": f'[ "$2" = pip ] || exec {sys.executable} "$@"',
        "pip": 'echo "pip $@" >> "$CALLS"',
        "pytest": f'exec {sys.executable} -m pytest "$@"',
        "sphinx-build": f'exec {sys.executable} -m sphinx "$@"',
        "perfsuite": f'exec {sys.executable} -m perfsuite.cli "$@" $MORE',
    }.items():
        executable(directory / name, line)


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put code on PYTHONPATH that ends the doctor and the self-test at once, since both take long."""
    directory = tmp_path / "trusted"
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(CONTENT)
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)
    return str(directory)


def make(where: Path, *targets: str, status: int = 0, **variables: str) -> str:
    words = ["make", *targets, *(f"{name}={value}" for name, value in variables.items())]
    return output_of(words, status=status, cwd=where, stderr=None)


def workflow(name: str) -> dict[Any, Any]:
    read: dict[Any, Any] = yaml.safe_load((WORKFLOWS / f"{name}.yml").read_text())
    return read


def run_steps(
    where: Path,
    name: str,
    job: str,
    values: Mapping[str, str],
    variables: Mapping[str, str] = os.environ,
    status: int = 0,
) -> str:
    """Run the steps of a job of a workflow as GitHub does, except those that call an action (`uses`).

    `values` are the values of the names in `${{ }}`. An input without a value has its default. The last exit
    status other than 0 must be `status`. Returns everything that was printed.
    """
    read = workflow(name)
    inputs = read[True].get("workflow_call", {}).get("inputs", {})  # YAML 1.1 reads `on` as True

    def value(match: re.Match[str]) -> str:
        """Return the value of an expression, as GitHub evaluates it: names, quoted text, && and ||."""
        text = match[1].replace("&&", " and ").replace("||", " or ")
        return str(eval(re.sub(r"'[^']*'|[a-z_-]+(\.[a-z_-]+)+", of_word, text), {}))

    def of_word(match: re.Match[str]) -> str:
        word = match[0]
        if word.startswith("'"):
            return word
        default = inputs.get(word.removeprefix("inputs."), {}).get("default", "")
        return repr(values.get(word, default))

    def filled(given: Mapping[str, object]) -> dict[str, str]:
        return {key: re.sub(r"\$\{\{(.*?)\}\}", value, str(text)) for key, text in given.items()}

    work = read["jobs"][job]
    ended = 0
    printed = ""
    for step in work["steps"]:
        if "run" in step:
            environment = {**variables, **filled(work.get("env", {})), **filled(step.get("env", {}))}
            done = subprocess.run(
                ["/bin/bash", "-e", "-c", step["run"]],
                cwd=where,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            printed += done.stdout
            ended = done.returncode or ended
    assert ended == status, printed[-3000:]
    return printed


def machines_of(hardware: str, tmp_path: Path, status: int = 0) -> str:
    """Run the first job of a night on a map of machines, and return its output."""
    (tmp_path / "out").unlink(missing_ok=True)
    variables = {"PATH": os.environ["PATH"], "GITHUB_OUTPUT": str(tmp_path / "out")}
    return run_steps(tmp_path, "night", "machines", {"inputs.hardware": hardware}, variables, status)


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [
        (
            '{"h100": {"runs-on": ["a"]}, "l4": {"runs-on": {"group": "g"}, "container": "i"}}',
            [("h100", "h100", "", ["a"], ""), ("l4", "l4", "", {"group": "g"}, "i")],
        ),
        (
            '{"h100": {"runs-on": "a", "shards": 2}}',
            [("h100-1of2", "h100", "--shard=1/2", "a", ""), ("h100-2of2", "h100", "--shard=2/2", "a", "")],
        ),
    ],
)
def test_reads_a_nights_machines_from_a_map(tmp_path: Path, hardware: str, expected: Any) -> None:
    machines_of(hardware, tmp_path)
    made = json.loads((tmp_path / "out").read_text().removeprefix("matrix="))
    keys = ("name", "hardware", "shard", "runs-on", "container")
    assert [tuple(entry[key] for key in keys) for entry in made] == expected
    assert {entry["options"] for entry in made} == {"--gpus=all --ipc=host"}


NO_MAP = "hardware is no JSON map from a marker to its machine"


@pytest.mark.parametrize(
    ("hardware", "message"),
    [
        ("{}", NO_MAP),
        ('["h100"]', NO_MAP),
        ('{"h100": {"container": "i"}}', "hardware: h100 has no runs-on"),
        ('{"h100": "h100"}', "hardware: h100 has no runs-on"),
        ('{"h100": {"runs-on": "a", "shards": 0}}', "h100 has shards 0: give a whole number from 1"),
        ('{"h100": {"runs-on": "a", "shards": "2"}}', 'h100 has shards "2": give a whole number'),
    ],
    ids=["empty", "a list", "no runs-on", "not a map", "no shards", "text"],
)
def test_a_bad_map_of_machines_is_refused(tmp_path: Path, hardware: str, message: str) -> None:
    assert message in machines_of(hardware, tmp_path, status=5)


MACHINES = '{"h100": {"runs-on": "a"}, "l4": {}}'


@pytest.fixture
def found_machine(tmp_path: Path) -> Path:
    """Return the file to which a step writes the machine that it finds."""
    return tmp_path / "out"


def find_machine(name: str, file: Path, values: Mapping[str, str], status: int = 0) -> str:
    """Look for a machine as the workflow does. Return what the step prints."""
    file.touch()
    variables = {"PATH": os.environ["PATH"], "GITHUB_OUTPUT": str(file)}
    return run_steps(file.parent, name, "machine", values, variables, status=status)


def test_finds_a_machine_by_its_marker(found_machine: Path) -> None:
    find_machine("new-baselines", found_machine, {"inputs.machines": MACHINES, "inputs.hardware": "h100"})
    assert found_machine.read_text() == 'machine={"runs-on":"a"}\n'


@pytest.mark.parametrize("lacking", ["l4", "a100"])
def test_names_a_marker_without_a_machine(found_machine: Path, lacking: str) -> None:
    values = {"inputs.machines": MACHINES, "inputs.hardware": lacking}
    printed = find_machine("new-baselines", found_machine, values, status=5)
    assert f"machines has no runs-on for {lacking}: it knows h100, l4" in printed


@pytest.mark.parametrize(
    ("label", "written"),
    [("h100", 'machine={"runs-on":"a"}\n'), ("bug", "")],
    ids=["a machine", "another label"],
)
def test_finds_a_machine_by_its_label(found_machine: Path, label: str, written: str) -> None:
    values = {"inputs.hardware": MACHINES, "github.event.label.name": label}
    find_machine("pull-request", found_machine, values)
    assert found_machine.read_text() == written


SHAPES = {
    "runner group, uv": {"HOME": "{home}"},
    "pod, conda, no sudo": {
        "HOME": "{home}",
        "CONDA_PREFIX": sys.prefix,
        "PIP_EXTRA_INDEX_URL": "https://a/cpu",
    },
    "image without git and make": {"HOME": "/nonexistent", "GITHUB_SHA": "f" * 40},
}
"""The environments of a job, for each way in which projects measure.

All of these environments lack sudo and make, and the image also lacks git.
"""


def installed() -> list[tuple[str, str]]:
    return sorted(
        (installed_distribution.name, installed_distribution.version)
        for installed_distribution in importlib.metadata.distributions()
    )


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES)
def test_night_in_an_image_installs_nothing(
    repository: Path, tmp_path: Path, trusted: str, shape: str
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("g++", "nproc", "lscpu", *(["git"] if "git" not in shape else [])):
        path = shutil.which(tool)
        if path:
            (tools / tool).symlink_to(path)
    if "git" in shape:
        shutil.rmtree(repository / ".git")
    variables = {name: value.format(home=tmp_path) for name, value in SHAPES[shape].items()}
    variables |= {
        "PYTHONPATH": "" if "git" in shape else trusted,  # these two really run on a machine without git
        "PATH": str(tools),
        "GITHUB_WORKSPACE": str(repository),
        "GITHUB_ACTIONS": "true",
    }
    variables |= {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary"), "LANG": "C.UTF-8"}
    values = {"matrix.hardware": "cpu", "matrix.shard": "--shard=1/1", "inputs.python": sys.executable}
    measured = "--perf-missing-baseline=record --perf-record-launches=1 --perf-min-judged=0%"
    values["inputs.options"] = f"--selftest fake -- {measured}"
    before = installed()
    run_steps(repository, "night", "measure", values, variables)
    assert installed() == before
    assert (tmp_path / "summary").read_text().startswith("## perfsuite: 1 ")
    assert (repository / "out" / "index.html").exists()
    commit = json.loads((repository / "out" / "results.json").read_text())["commit"]
    assert commit == ("f" * 40 if "git" in shape else git(repository, "rev-parse", "HEAD"))
    action = yaml.safe_load((ROOT / ".github" / "actions" / "night" / "action.yml").read_text())
    _, *steps = [step["run"] for step in workflow("night")["jobs"]["measure"]["steps"] if "run" in step]
    assert [step["run"] for step in action["runs"]["steps"] if "run" in step] == steps


@pytest.fixture
def mine(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Add a script and its case file to the repository, make it the current directory, and return it."""
    (repository / "train.py").touch()
    (repository / "conftest.py").write_text(simulated.CONFTEST)
    (repository / "bench_cases" / "test_cases.py").rename(repository / "bench_cases" / "test_train.py")
    monkeypatch.chdir(repository)
    return repository


def init(*words: str) -> list[str]:
    """Write a repository's files with `perfsuite init`, and return the commands that it suggests next."""
    words = ("perfsuite", "init", "--script", "train.py", *words)
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "kept: bench_cases/test_train.py, which already exists" in said
    return said.partition("Next:\n")[2].splitlines()


def record_and_accept(record: str, accept: str) -> None:
    """Record and accept a first baseline, from half of the usual number of launches."""
    assert "--perf-min-launches=10" in record.split()
    subprocess.run(record.replace("launches=10", "launches=5"), shell=True, check=True)
    subprocess.run(accept, shell=True, check=True)


def result_of_night(where: Path) -> Any:
    """Return the only result of a night, which was judged against the reviewed baseline."""
    (result,) = json.loads((where / "out" / "results.json").read_text())["results"]
    assert Path(result["baseline_file"]).is_relative_to(where / "baselines")
    return result


def test_init_workflow_installs_and_measures(
    mine: Path, tmp_path: Path, trusted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, *commands = init("--github")
    record_and_accept(*commands)
    monkeypatch.setenv("MORE", "-- --perf-min-judged=0%")
    run_steps(mine, str(mine / ".github/workflows/performance"), "night", {})
    project, _, ours = (tmp_path / "bin" / "calls").read_text().partition(" perfsuite")
    assert project == "pip install -e ."
    assert Requirement(f"perfsuite{ours}").name == "perfsuite"
    result_of_night(mine)


@pytest.mark.nightly
def test_keeps_and_publishes_measurements(repository: Path, tmp_path: Path) -> None:
    make(repository, "site")
    site = repository / "build" / "site"
    assert "A page" in (site / "index.html").read_text()
    assert not (site / "history").exists(), "there is no history yet"
    for day, name in enumerate(("night-cpu", "night-again"), 1):
        a_night(repository, name, "passed", started_at=f"2026-01-0{day}T00:00:00+00:00")
    nobody = "https://localhost:1"  # no server listens there
    values = {"inputs.hosted_setup": "true", "github.token": "t", "secrets.notify_url": nobody}
    variables = {**os.environ, "RUN_URL": "https://example.org/runs/1"}
    said = run_steps(repository, "night", "history", values, variables)
    assert "--notify: nothing was posted, because no case changed its state" in said
    reports = {file.name for file in (repository / "report").glob("*.json")}
    assert reports == {"results.json", "results-2.json"}
    kept = git(repository, "ls-tree", "-r", "--name-only", "origin/perfsuite-history").splitlines()
    assert len([name for name in kept if not name.startswith("cases/")]) == 2
    assert git(repository, "rev-parse", "--abbrev-ref", "HEAD") == "main"
    assert "series in 2 sessions" in (tmp_path / "summary").read_text()
    calls = (tmp_path / "bin" / "calls").read_text()
    assert calls.startswith("auth setup-git\n")
    assert calls.count("issue list") == 1
    assert "issue create" not in calls
    make(repository, "site")
    assert "asv" in (site / "history" / "index.html").read_text()
    shutil.rmtree(repository / "nights")
    a_night(repository, "night-cpu", "regressed", inject="slowdown=30%")
    # Nothing that was injected is kept.
    run_steps(repository, "night", "history", values, variables, status=1)
    assert "issue create --title Performance regressions on cpu-" in (tmp_path / "bin" / "calls").read_text()


def a_night(where: Path, name: str, outcome: str, inject: str | None = None, **session: Any) -> None:
    """Write the results of a night at the last commit, like those that the job of one machine uploads."""
    result = judged(make_result(BEFORE.replace(inject=inject)), outcome=outcome)
    directory = where / "nights" / name
    directory.mkdir(parents=True)
    write_session(directory, result, commit=git(where, "rev-parse", "HEAD"), **session)


def called() -> list[tuple[str, str, dict[str, Any], dict[Any, Any]]]:
    """Return all calls of our workflows: the caller, the job's name, the job, and the called workflow."""
    return [
        (file.stem, name, job, workflow(Path(job["uses"]).stem))
        for file in sorted(WORKFLOWS.glob("*.yml"))
        for name, job in workflow(file.stem)["jobs"].items()
        if "uses" in job
    ]


def test_five_workflows_call_others() -> None:
    assert {caller for caller, *_ in called()} == {"nightly", "pages", "dry", "compare", "baselines"}


EVERY_CALL = [pytest.param(job, asked, id=f"{caller} calls {name}") for caller, name, job, asked in called()]
every_call = pytest.mark.parametrize(("job", "asked"), EVERY_CALL)


@every_call
def test_a_caller_grants_the_needed_rights(job: dict[str, Any], asked: dict[Any, Any]) -> None:
    wanted: dict[str, str] = {}
    for job_asked in asked["jobs"].values():
        for right, level in job_asked.get("permissions", {}).items():
            wanted[right] = max(level, wanted.get(right, ""))  # read < write
    assert job["permissions"] == wanted


@every_call
def test_a_caller_gives_the_required_inputs(job: dict[str, Any], asked: dict[Any, Any]) -> None:
    inputs = (asked[True]["workflow_call"] or {}).get("inputs", {})
    required = {key for key, definition in inputs.items() if definition.get("required")}
    assert required <= set(job.get("with", {})) <= set(inputs)


def test_ci_tests_the_lowest_torch_and_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bound,) = map(Requirement, project["optional-dependencies"]["torch"])
    installed = make(ROOT, "--dry-run", "--always-make", ".venv-lowest/installed", ".venv-newest/installed")
    lowest = str(bound.specifier).removeprefix(">=")
    assert lowest == "{}.{}".format(*MIN_TORCH)
    assert re.findall(r'"(torch.*)"$', installed, re.MULTILINE) == [f"torch=={lowest}.*", "torch"]
    job = workflow("ci")["jobs"]["versions"]
    matrix = job["strategy"]["matrix"]
    assert job["steps"][-1]["run"] == 'make "test-$TORCH_VERSION"'
    assert matrix["torch"] == ["lowest", "newest"]
    assert matrix["python"][0] == project["requires-python"].removeprefix(">=")


def test_a_release_needs_approval_and_no_password() -> None:
    jobs = workflow("release")["jobs"]
    assert jobs["build"]["permissions"] == {"contents": "read"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"]["name"] == "pypi"
    assert "secrets" not in (WORKFLOWS / "release.yml").read_text()


def test_builds_no_tag_unlike_the_version(tmp_path: Path) -> None:
    tools = tmp_path / ".venv-dist" / "bin"
    tools.mkdir(parents=True)
    for name in ("python", "twine", "check-wheel-contents"):
        executable(tools / name, "mkdir -p dist; touch dist/perfsuite-1.2.0.tar.gz")
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "constraints.txt").touch()
    (tmp_path / ".venv-dist" / "installed").touch()
    make(tmp_path, "dist")
    make(tmp_path, "dist", TAG="v1.2.0")
    said = make(tmp_path, "dist", TAG="v1.3.0", status=2)
    assert "the tag is v1.3.0, __version__ in perfsuite/__init__.py makes perfsuite-1.2.0: change one" in said


def test_gpu_runners_install_no_cpu_torch() -> None:
    """GPU runners measure the installed environment, so an index of CPU builds must not interfere."""
    jobs = [job for file in WORKFLOWS.glob("*.yml") for job in workflow(file.stem)["jobs"].values()]
    with_gpus = [job for job in jobs if "container" in job]
    assert len(with_gpus) == 3
    assert not [job for job in with_gpus if "PIP_EXTRA_INDEX_URL" in job.get("env", {})]


def test_a_pull_request_is_compared_with_its_base(repository: Path, tmp_path: Path) -> None:
    venv = executable(tmp_path / "venv", f"cp -r {repository}/.venv .")
    said = make(repository, "compare", BASE="HEAD~1", HARDWARE="cpu", OUT="out", PYTHON=str(venv))
    base, this = (git(repository, "rev-parse", name)[:12] for name in ("HEAD~1", "HEAD"))
    assert re.search(rf"arm A: HEAD~1 \S+/base/.venv/bin/python .*commit {base}", said)
    assert re.search(rf"arm B: \. .*commit {this}", said)
    assert re.search(r"fake-llama-tiny\S+\s.* 3 of 3 +passed", said)  # a row can be too long for a line
    assert "1 passed" in (repository / "out" / "summary.md").read_text()
    assert not (repository / ".perfsuite" / "baselines").exists()


@pytest.mark.nightly
def test_compares_a_pull_request_without_hardware(repository: Path) -> None:
    """The pull request adds a layer to a model. The workflow of hosted runners compares it."""
    (repository / "bench_cases" / "test_cases.py").write_text(TRAINED)
    (repository / "train.py").write_text(SCRIPT)
    commit(repository, "a script")
    (repository / "train.py").write_text(SCRIPT.replace("8, 8)", "8, 8), torch.nn.Linear(8, 8)"))
    commit(repository, "deeper")
    assert workflow("dry")["jobs"]["compare"]["with"]["dry"] == "make compare-dry"
    said = make(repository, "compare-dry", BASE="HEAD~1", DRY_CI="script", OUT="out", status=2)
    assert "regressed in a dry run of each arm as if on NVIDIA H100" in " ".join(said.split())
    assert "all_reduce of 64 ranks: 288 -> 576 bytes" in (repository / "out" / "summary.md").read_text()
    assert not list((repository / ".perfsuite").glob("*.lock")), "no machine is locked"
    make(repository, "compare-dry", BASE="HEAD", DRY_CI="script", OUT="out")


@pytest.mark.nightly
def test_measured_baselines_become_a_pull_request(repository: Path, tmp_path: Path, trusted: str) -> None:
    values = {"inputs.hardware": "cpu", "inputs.cases": "fake and not other", "inputs.reason": "a new torch"}
    run_steps(repository, "new-baselines", "measure", {**values, "inputs.python": sys.executable})
    (file,) = (repository / "baselines").glob("*/fake-*.json")
    assert len(json.loads(file.read_text())["launches"]) == 10
    (repository / "measured").mkdir()  # where the artifact is downloaded
    for name in ("baselines", "out"):
        (repository / name).rename(repository / "measured" / name)
    run_steps(repository, "new-baselines", "propose", {**values, "inputs.hosted_setup": "true"})
    assert git(repository, "show", "--stat", "--format=%s", "HEAD").startswith("Baselines of cpu")
    calls = (tmp_path / "bin" / "calls").read_text()
    assert "pr create --title Baselines of cpu" in calls
    assert "tokens/s: new" in calls


@pytest.mark.parametrize(("name", "job"), [("night", "measure"), ("pull-request", "launched")])
def test_always_uploads_results_not_checkpoints(name: str, job: str) -> None:
    steps = workflow(name)["jobs"][job]["steps"]
    shown, report, launches = [step for step in steps if "cache" not in step.get("uses", "")][-3:]
    assert shown["run"].endswith(("--only-summary", '>> "$GITHUB_STEP_SUMMARY"'))
    assert report["with"]["path"] == "out"
    assert {shown["if"], report["if"]} <= {"always()", "${{ !cancelled() }}"}
    assert launches["if"] == "always()"
    kept, left_out = launches["with"]["path"].splitlines()
    assert left_out == f"!{kept}/**/checkpoints"


def test_night_knows_earlier_costs_however_it_ended() -> None:
    """A budget needs the earlier results to order the cases. The checkout must not delete them."""
    steps = workflow("night")["jobs"]["measure"]["steps"]
    checkout, restore, *_, save = steps
    assert "clean" not in checkout["with"]
    assert save["if"] == "always()"
    kept = restore["with"]
    assert kept["key"].startswith(kept.pop("restore-keys"))
    assert kept == save["with"]
    assert kept["path"] == ".perfsuite/runs/*/results.json"


def test_code_of_a_pull_request_sees_no_token() -> None:
    steps = workflow("pull-request")["jobs"]["answer"]["steps"]
    assert steps[0]["with"]["ref"] == "${{ github.event.pull_request.base.sha }}"
    download = workflow("new-baselines")["jobs"]["propose"]["steps"][-2]
    assert download["with"]["path"] == "measured", "the download must not overwrite the checkout"
