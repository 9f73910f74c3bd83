import json
import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import perfsuite
from perfsuite import documents
from perfsuite.features.nightly.init import OF_LLAMA, PLACEHOLDER, releases_of
from tests.cli import commands
from tests.doc_pages import ROOT, Page
from tests.processes import executable, output_of
from tests.synthetic import make_repository

OCTO = "octo/perfsuite@" + "4d2c1b0f" * 5
WORKFLOW = Path(".github/workflows/performance.yml")
REQUIREMENTS = Path("requirements.txt")


init = partial(commands.run, "init")


def job(*words: str) -> Any:
    """Return the job in the workflow that `init` writes with these options if there is no workflow yet."""
    WORKFLOW.unlink(missing_ok=True)
    init("--github", *words)
    return yaml.safe_load(WORKFLOW.read_text())["jobs"]["night"]


def ids(file: str) -> list[str]:
    """Return the ids of the cases in a file that has a single test."""
    (mark,) = next(
        value.pytestmark for value in runpy.run_path(file).values() if hasattr(value, "pytestmark")
    )
    return [case.id for case in mark.args[1]]


def test_first_case_file_covers_every_framework() -> None:
    printed = init("--hardware", "h100").stdout
    assert printed.splitlines()[0] == "written: bench_cases/test_llama.py"
    assert "pytest bench_cases -m 'cpu or h100' --perf-min-launches=10\n" in printed
    names = ("ddp", "fsdp2", "accelerate-fsdp2", "trainer-full_shard_auto_wrap", "lightning-fsdp2")
    sizes = ("llama-tiny-s64-b4-fp32-1x2", "llama-3.2-1b-s2048-b1-bf16-mixed-1x8")
    assert ids("bench_cases/test_llama.py") == [f"{name}-{size}" for size in sizes for name in names]
    assert Path(".gitignore").read_text() == ".perfsuite/\nout/\n/history/\n"


def test_measures_a_script_where_commands_look() -> None:
    Path("train-it.py").write_text("")
    init("--script", "train-it.py", "--hardware", "h100", "--cases", "perf")
    small, large = ids("perf/test_train_it.py")
    assert small.startswith("script-train-it-")
    assert large == small.replace("-fp32-1x1", "-bf16-mixed-1x8")
    assert Path("pytest.ini").read_text() == "[pytest]\nperf_cases = perf\n"
    Path("perf").rename("elsewhere")
    message = commands.error_of("night", "--plan", "--hardware", "h100")
    assert f"--cases {Path('perf').absolute()}: no such directory" in message


def test_keeps_an_existing_case_file() -> None:
    mine = Path("bench_cases/test_llama.py")
    documents.write_text(mine, "mine")
    assert "kept: bench_cases/test_llama.py, which already exists" in init().stdout
    assert mine.read_text() == "mine"


def test_adds_lines_to_an_existing_gitignore() -> None:
    Path(".gitignore").write_text("out/\n*.log")
    assert "added to .gitignore: .perfsuite/ /history/\n" in init().stdout
    assert Path(".gitignore").read_text() == "out/\n*.log\n.perfsuite/\n/history/\n"


def test_keeps_an_existing_ini_file() -> None:
    Path("pytest.ini").write_text("[pytest]\naddopts = -q\n")
    printed = init("--cases", "perf").stdout
    assert "add this to pytest's settings, which perfsuite's commands also read: perf_cases = perf" in printed
    assert Path("pytest.ini").read_text() == "[pytest]\naddopts = -q\n"


def test_a_workflow_runs_where_requested_or_on_slurm() -> None:
    where = ("--runs-on", "{group: gpus}", "--container", "ghcr.io/me/it@sha256:0")
    night = job("--hardware", "a100", *where, "--slurm")
    assert night["runs-on"] == {"group": "gpus"}
    assert night["container"] == {"image": "ghcr.io/me/it@sha256:0", "options": "--gpus=all --ipc=host"}
    assert night["steps"][1]["run"] == "python -m perfsuite.cli night --hardware a100"
    script = Path("performance-night.sh").read_text()
    assert " --gres=gpu:8 --mem=0 --wrap='pytest bench_cases -m a100 --perf-launcher=slurm " in script
    night = job("--hardware", "a100")
    assert (night["runs-on"], "container" in night) == (["self-hosted", "a100"], False)


@pytest.mark.parametrize(
    ("job", "status"),
    [
        ("mkdir -p out; touch out/results.json", 0),
        ("mkdir -p out; touch out/results.json; exit 1", 1),
        ("true", 2),  # like a job that is cancelled in the queue
    ],
)
def test_night_on_slurm_fails_without_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, status: int
) -> None:
    init("--slurm")
    documents.write_text(Path("out/results.json"), "of the last night")
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "sbatch", job)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    done = subprocess.run(["sh", "performance-night.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert ("the job has measured nothing" in done.stderr) == (status == 2)


def test_git_ignores_the_logs_of_slurm() -> None:
    init("--slurm")
    assert Path(".gitignore").read_text() == ".perfsuite/\nout/\n/history/\nslurm-*.out\n"


def test_the_page_shows_the_generated_files() -> None:
    Path("pyproject.toml").write_text("")
    init("--hardware", "h100", "--github", "--runs-on", "[self-hosted, h100]")
    theirs = "'perfsuite @ git+https://github.com/OWNER/perfsuite@COMMIT'"
    written = re.sub("'perfsuite ?[@=].*'", theirs, WORKFLOW.read_text())
    shown = [block.text for block in Page(ROOT / "docs" / "your-repository.md").blocks]
    assert written in shown
    assert Path(".gitignore").read_text() in shown


def write_metadata(site: Path, name: str, version: str, direct_url: str | None = None) -> None:
    """Write what pip leaves of an installed package: its name, its version and its origin."""
    directory = site / f"{name}-{version}.dist-info"
    directory.mkdir(parents=True)
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if direct_url is not None:
        (directory / "direct_url.json").write_text(direct_url)


DIRECT_URL = '{"url": "https://example.org/p.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}'


@pytest.mark.parametrize(
    ("installed", "line"),
    [
        (None, f"perfsuite=={perfsuite.__version__}"),
        (DIRECT_URL, "perfsuite @ git+https://example.org/p.git@c0ffee"),
        ('{"url": "file:///src/perfsuite"}', PLACEHOLDER),
        (DIRECT_URL.replace("https://example.org/p.git", "file:///src/p"), PLACEHOLDER),
    ],
)
def test_workflow_installs_perfsuite_from_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str | None, line: str
) -> None:
    write_metadata(tmp_path / "site", "perfsuite", perfsuite.__version__, installed)
    monkeypatch.syspath_prepend(tmp_path / "site")
    project = Path("pyproject.toml")
    project.write_text("")
    assert ("the owner of your copy of perfsuite" in init("--github").stdout) == ("OWNER" in line)
    assert f".venv/bin/pip install -e . '{line}'\n" in WORKFLOW.read_text()
    assert not REQUIREMENTS.exists()
    project.unlink()
    job()
    assert REQUIREMENTS.read_text().splitlines() == releases_of(OF_LLAMA)
    assert f".venv/bin/pip install -r requirements.txt '{line}'\n" in WORKFLOW.read_text()


def test_requirements_are_installed_releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_metadata(tmp_path / "site", "thing", "2.13.0+cpu")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert releases_of(["thing", "nosuch"]) == ["thing==2.13.0"]


def test_workflow_calls_a_copys_workflow() -> None:
    where = ("--runs-on", "{group: gpus}", "--container", "image")
    night = job("--hardware", "a100", *where, "--uses", OCTO)
    assert f"perfsuite[history] @ git+https://github.com/{OCTO}" in WORKFLOW.read_text()
    assert night["uses"] == OCTO.replace("@", "/.github/workflows/night.yml@")
    machine = {"runs-on": {"group": "gpus"}, "container": "image"}
    assert json.loads(night["with"]["hardware"]) == {"a100": machine}
    assert "setup" not in night["with"], "the image needs no setup"
    assert night["secrets"] == {"notify_url": "${{ secrets.notify_url }}"}


def test_a_copys_workflow_installs_the_copy() -> None:
    setup = job("--uses", "octo/perfsuite@v1.2.0")["with"]["setup"]
    theirs = "-r requirements.txt 'perfsuite @ git+https://github.com/octo/perfsuite@v1.2.0'"
    assert setup == f"test -d .venv || python3 -m venv .venv && .venv/bin/pip install {theirs}"


@pytest.mark.parametrize(
    "words",
    [
        ("--github", "--runs-on", "{group: gpus}", "--uses", OCTO),
        ("--github", "--container", "ghcr.io/me/it@sha256:0", "--uses", OCTO),
        ("--slurm",),
    ],
)
def test_a_project_gets_at_most_36_lines(words: tuple[str, ...]) -> None:
    for name in ("pyproject.toml", "train.py"):
        Path(name).write_text("")
    init("--script", "train.py", "--hardware", "h100", *words)
    written = [path for path in Path().rglob("*") if path.is_file()]
    assert len(written) == (6 if "--github" in words else 5)
    assert sum(len(path.read_text().splitlines()) for path in written) <= 36


def test_later_workflow_nights_must_be_judged() -> None:
    printed = init("--github", "--hardware", "h100").stdout
    assert Path("pytest.ini").read_text() == (
        "[pytest]\nperf_missing_baseline = fail\nperf_strict = inconclusive\n"
    )
    first = "pytest bench_cases -m 'cpu or h100' --perf-min-launches=10 --perf-missing-baseline=record\n"
    assert first in printed


@pytest.mark.parametrize("name", ["pyproject.toml", "pytest.ini", "tox.ini"])
def test_keeps_settings_and_says_what_to_add(name: str) -> None:
    text = "[pytest]\nperf_strict = improved\n"
    if name == "pyproject.toml":
        text = "[tool.pytest.ini_options]\nperf_strict = 'improved'\n"
    Path(name).write_text(text)
    printed = init("--github").stdout
    assert (
        "add this to pytest's settings, which perfsuite's commands also read: perf_missing_baseline = fail\n"
        in printed
    )
    assert Path(name).read_text() == text
    assert "perf_strict = " not in printed


def test_prints_the_code_owner_lines_once() -> None:
    printed = init("--github", "--cases", "perf").stdout
    assert "write this to .github/CODEOWNERS, with your reviewers instead of @OWNER:" in printed
    lines = [line.strip() for line in printed.splitlines() if line.endswith(" @OWNER")]
    assert [line.split()[0] for line in lines] == [
        "/baselines/",
        "/perf-waivers.toml",
        "/.github/",
        "conftest.py",
        "/pytest.ini",
        "/perf/",
    ]
    Path("CODEOWNERS").write_text("\n".join(line.replace("@OWNER", "@ada") for line in lines[1:]))
    printed = init("--github", "--cases", "perf").stdout
    assert (
        "add this to CODEOWNERS, with your reviewers instead of @OWNER:\n  /baselines/ @OWNER\n\n" in printed
    )
    assert "@OWNER" not in init().stdout


def test_requirements_are_what_a_script_imports() -> None:
    Path("train.py").write_text(
        "import os, yaml\nfrom numpy.linalg import norm\nfrom . import own\nimport nosuch"
    )
    init("--script", "train.py", "--github")
    names = [line.partition("==")[0].lower() for line in REQUIREMENTS.read_text().splitlines()]
    assert sorted(names) == ["numpy", "pyyaml", "torch"]
    REQUIREMENTS.unlink()
    WORKFLOW.unlink()
    Path("train.py").write_text("this is not Python")
    init("--script", "train.py", "--github")
    assert REQUIREMENTS.read_text().startswith("torch==")
    assert len(REQUIREMENTS.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--hardware h1000", "--hardware h1000: did you mean 'h100'?"),
        ("--script nosuch.py", "--script nosuch.py: there is no such file"),
        ("--container image", "--runs-on, --container and --uses need --github: add it"),
        ("--github --uses perfsuite", "--uses perfsuite: give OWNER/REPOSITORY@ and a commit"),
        ("--github --uses o/p@main", "--uses o/p@main: give OWNER/REPOSITORY@ and a commit of 40"),
        ("--github --uses o/p@4d2c1b0", "--uses o/p@4d2c1b0: give"),
        ("--github --uses o/p@v1 --runs-on [", "--runs-on [: not YAML"),
        ("--github --runs-on [", "--runs-on [: not YAML"),
        ("", "give your own --script"),
    ],
)
def test_refuses_bad_options_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, arguments: str, words: str
) -> None:
    if not arguments:
        monkeypatch.setitem(sys.modules, "transformers", None)
    assert words in commands.error_of("init", *arguments.split())
    assert not any(Path().iterdir())


def test_refuses_a_workflow_in_a_part_of_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    make_repository(Path("mono"), 1)
    top = Path("mono").resolve()
    monkeypatch.chdir(top)
    init("--github", "--uses", OCTO)
    (top / "sub/train").mkdir(parents=True)
    monkeypatch.chdir(top / "sub/train")
    said = commands.error_of("init", "--github")
    assert "top directory of a repository, but the current directory is sub/train/. Run this" in said
    assert f"in {top}, for example with --cases sub/train/bench_cases, or leave out --github" in said
    assert not any(Path().iterdir())
    init()


@pytest.mark.nightly
def test_the_generated_case_runs_unchanged() -> None:
    """The test only reduces the number of steps in the file that `init` wrote."""
    init()
    file = Path("bench_cases/test_llama.py")
    file.write_text(file.read_text().replace("SMALL = Case(", "SMALL = Case(steps=10, max_warmup_steps=4,"))
    ours = ("-m", "cpu", "-k", "ddp", "--perf-record-launches=1", "--perf-allow-shared", "--perf-no-counts")
    output_of([sys.executable, "-m", "pytest", "bench_cases", *ours, "-q"])
