from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import perfsuite
from perfsuite.dry.cases import by_expression
from tests.cli.commands import run
from tests.doc_pages import ROOT, Page

COMMIT = "4d2c1b0f" * 5
WORKFLOW = Path(".github/workflows/performance.yml")


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_first_case_file_has_a_small_case_for_every_framework_here_and_one_for_gpus() -> None:
    told = run("init", "--hardware", "h100").stdout
    assert told.splitlines()[0] == "written: bench_cases/test_llama.py"
    assert "pytest bench_cases -m 'cpu or h100' --perf-min-launches=10\n" in told
    ids = {case.id for case in by_expression(Path("bench_cases"), "test_llama")}
    assert {each for each in ids if "1x2" in each} == {
        "ddp-llama-tiny-s64-b4-fp32-1x2",
        "fsdp2-llama-tiny-s64-b4-fp32-1x2",
        "accelerate-fsdp2-llama-tiny-s64-b4-fp32-1x2",
        "trainer-full_shard_auto_wrap-llama-tiny-s64-b4-fp32-1x2",
        "lightning-fsdp2-llama-tiny-s64-b4-fp32-1x2",
    }
    assert {each.replace("llama-3.2-1b-s2048-b1-fp32-1x8", "") for each in ids if "1x8" in each} == {
        "ddp-",
        "fsdp2-",
        "accelerate-fsdp2-",
        "trainer-full_shard_auto_wrap-",
        "lightning-fsdp2-",
    }
    assert Path(".gitignore").read_text() == ".perfsuite/\nout/\n"


def test_a_script_is_measured_as_it_is_where_cases_lie_that_commands_then_find(repository: Path) -> None:
    Path("train-it.py").write_text("")
    run("init", "--script", "train-it.py", "--hardware", "h100", "--cases", "perf")
    ids = [case.id for case in by_expression(Path("perf"), "test_train_it")]
    assert [each.split("-my")[0].startswith("script-train-it-") for each in ids] == [True, True]
    assert Path("pytest.ini").read_text() == "[pytest]\nperf_cases = perf\n"
    assert (
        f"no case in {repository / 'perf'} is called 'x': there are 2 others"
        in run("dry-run", "x", status=2).stderr
    )


def test_what_is_there_stays(repository: Path) -> None:
    Path("bench_cases").mkdir()
    Path("bench_cases/test_llama.py").write_text("mine")
    Path(".gitignore").write_text("out/\n*.log")
    Path("pytest.ini").write_text("[pytest]\naddopts = -q\n")
    told = run("init").stdout
    assert "kept: bench_cases/test_llama.py, which was there" in told
    assert Path("bench_cases/test_llama.py").read_text() == "mine"
    assert Path(".gitignore").read_text() == "out/\n*.log\n.perfsuite/\n"
    assert "added to .gitignore: .perfsuite/\n" in told
    told = run("init", "--cases", "perf").stdout
    assert "add to pytest's settings, for the commands of perfsuite: perf_cases = perf" in told
    assert Path("pytest.ini").read_text() == "[pytest]\naddopts = -q\n"


def test_a_workflow_runs_where_it_is_told_and_a_script_submits_to_slurm() -> None:
    where = ("--runs-on", "{group: gpus}", "--container", "ghcr.io/me/it@sha256:0")
    run("init", "--hardware", "a100", "--github", *where, "--slurm")
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["night"]
    assert job["runs-on"] == {"group": "gpus"}
    assert job["container"] == {"image": "ghcr.io/me/it@sha256:0", "options": "--gpus=all --ipc=host"}
    assert job["steps"][1]["run"] == "python -m perfsuite.cli night --hardware a100"
    script = Path("performance-night.sh").read_text()
    assert " -- bench_cases -m a100 --perf-missing-baseline=fail " in script
    WORKFLOW.unlink()
    run("init", "--hardware", "a100", "--github")
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["night"]
    assert job["runs-on"] == ["self-hosted", "a100"]
    assert "container" not in job


def test_the_page_shows_what_is_written() -> None:
    Path("pyproject.toml").write_text("")
    run("init", "--hardware", "h100", "--github", "--runs-on", "[self-hosted, h100]")
    theirs = "'perfsuite @ git+https://github.com/OWNER/perfsuite@COMMIT'"
    written = re.sub("'perfsuite ?[@=].*'", theirs, WORKFLOW.read_text())
    shown = [block.text for block in Page(ROOT / "docs" / "your-repository.md").blocks]
    assert written in shown
    assert Path(".gitignore").read_text() in shown


DIRECT_URL = '{"url": "https://example.org/p.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}'


@pytest.mark.parametrize(
    ("installed", "line"),
    [
        (None, f"perfsuite=={perfsuite.__version__}"),
        (DIRECT_URL, "perfsuite @ git+https://example.org/p.git@c0ffee"),
        ('{"url": "file:///src/perfsuite"}', "perfsuite @ file:///src/perfsuite"),
    ],
)
def test_a_workflow_installs_perfsuite_from_where_it_was_installed_next_to_what_the_project_needs(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, line: str
) -> None:
    module, known = sys.modules["perfsuite.cli.init"], SimpleNamespace(read_text=lambda name: installed)
    monkeypatch.setattr(module, "distribution", {"perfsuite": known}.get)
    monkeypatch.setattr(module, "version", {"perfsuite": perfsuite.__version__, "torch": "2.13.0+cpu"}.get)
    monkeypatch.setattr(module, "INSTALLED", ("torch",))
    Path("pyproject.toml").write_text("")
    told = run("init", "--github").stdout
    assert ("installs perfsuite by its path here" in told) == ("file:" in line)
    assert f".venv/bin/pip install -e . '{line}'\n" in WORKFLOW.read_text()
    assert not Path("requirements.txt").exists()
    for path in (WORKFLOW, Path("pyproject.toml")):
        path.unlink()
    run("init", "--github")
    assert Path("requirements.txt").read_text() == "torch==2.13.0\n"
    assert f".venv/bin/pip install -r requirements.txt '{line}'\n" in WORKFLOW.read_text()


def test_a_workflow_calls_that_of_a_copy_of_perfsuite() -> None:
    where = ("--runs-on", "{group: gpus}", "--container", "image")
    run("init", "--hardware", "a100", "--github", *where, "--uses", f"octo/perfsuite@{COMMIT}")
    text = WORKFLOW.read_text()
    assert f"perfsuite[history] @ git+https://github.com/octo/perfsuite@{COMMIT}" in text
    job = yaml.safe_load(text)["jobs"]["night"]
    assert job["uses"] == f"octo/perfsuite/.github/workflows/night.yml@{COMMIT}"
    machine = {"runs-on": {"group": "gpus"}, "container": "image"}
    assert json.loads(job["with"]["hardware"]) == {"a100": machine}
    assert "setup" not in job["with"], "the image has its own"
    WORKFLOW.unlink()
    run("init", "--github", "--uses", "octo/perfsuite@v1.2.0")
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["night"]
    theirs = "-r requirements.txt 'perfsuite @ git+https://github.com/octo/perfsuite@v1.2.0'"
    assert job["with"]["setup"] == f"test -d .venv || python3 -m venv .venv && .venv/bin/pip install {theirs}"


@pytest.mark.parametrize(
    "words",
    [
        ("--github", "--runs-on", "{group: gpus}", "--uses", f"octo/perfsuite@{COMMIT}"),
        ("--github", "--container", "ghcr.io/me/it@sha256:0", "--uses", f"octo/perfsuite@{COMMIT}"),
        ("--slurm",),
    ],
)
def test_a_project_gets_at_most_thirty_lines(repository: Path, words: tuple[str, ...]) -> None:
    for name in ("pyproject.toml", "train.py"):
        Path(name).write_text("")
    run("init", "--script", "train.py", "--hardware", "h100", *words)
    written = [each for each in repository.rglob("*") if each.is_file()]
    assert len(written) == 5
    assert sum(len(each.read_text().splitlines()) for each in written) <= 30


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hardware", "h1000"), "--hardware h1000: did you mean 'h100'?"),
        (("--script", "nosuch.py"), "--script nosuch.py: there is no such file"),
        (("--container", "image"), "--runs-on, --container and --uses are for --github: add that"),
        (("--github", "--uses", "perfsuite"), "--uses perfsuite: expected OWNER/REPOSITORY@ and a commit"),
        (
            ("--github", "--uses", "o/p@main"),
            "--uses o/p@main: expected OWNER/REPOSITORY@ and a commit of 40",
        ),
        (("--github", "--uses", "o/p@4d2c1b0"), "--uses o/p@4d2c1b0: expected"),
        (("--github", "--uses", "o/p@v1", "--runs-on", "["), "--runs-on [: no YAML"),
        (("--github", "--runs-on", "["), "--runs-on [: no YAML"),
    ],
)
def test_what_cannot_be_begun_is_refused(arguments: tuple[str, ...], words: str) -> None:
    assert words in " ".join(run("init", *arguments, status=2).stderr.split())
    assert not any(Path().iterdir())


def test_without_transformers_a_script_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["perfsuite.cli.init"], "find_spec", lambda name: None)
    assert "name your own --script" in run("init", status=2).stderr


@pytest.mark.launch
def test_what_it_wrote_runs_at_once() -> None:
    run("init")
    ours = ("-m", "cpu", "-k", "ddp", "--perf-record-launches=1", "--perf-allow-shared", "-q")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "bench_cases", *ours], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
