"""Tests that pages are true: commands and Python run, and every option, field, file and link exists."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import tomllib
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import perfsuite
from perfsuite import MODELS, Case, Fake, KnownIssue, LoRA, Script, Topology
from perfsuite.frameworks.base import Framework
from perfsuite.launch.lock import USUAL
from perfsuite.results.outcome import Outcome
from perfsuite.results.rank_report import FailureKind
from tests import simulated
from tests.doc_pages import MARKS, NEEDS, ROOT, Block, Page, pages
from tests.repository.test_workflows import CASES as SIMULATED_CASES
from tests.repository.test_workflows import use_this_interpreter
from tests.sample_reports import WIDTH, texts, with_samples
from tests.synthetic import commit, git

PAGES = pages()
FOR_USERS = [page for page in PAGES if page.path.parent == ROOT / "docs"]
CHECKED_BY_PARSING = {
    "toml": tomllib.loads,
    "json": lambda text: [json.loads(line) for line in text.splitlines()],
    "yaml": yaml.safe_load,
}
FRAMEWORKS = [
    value
    for value in (getattr(perfsuite, name) for name in perfsuite.__all__)
    if isinstance(value, type) and issubclass(value, Framework) and value not in (Framework, Fake)
]
SIMULATED = f"""{simulated.CONFTEST}
from perfsuite import Case, Fake, Topology

SIMULATED = {{"topology": Topology(processes_per_node=1)}}
seen = set()

def pytest_itemcollected(item):
    '''Measure simulated training in place of the framework that the page's case names.'''
    if item.config.option.collectonly or not hasattr(item, "callspec"):
        return
    for name, case in item.callspec.params.items():
        if not isinstance(case, Case):
            continue
        step_ms = 5.0
        while (simulated := case.replace(framework=Fake(step_ms=step_ms), **SIMULATED)).id in seen:
            step_ms += 0.001  # keeps cases apart that differ only in their frameworks
        seen.add(simulated.id)
        item.callspec.params[name] = simulated
"""
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(language: str) -> list[Block]:
    return [block for page in PAGES for block in page.blocks if block.language == language]


COMMAND_PAGE = runpy.run_path(str(ROOT / "docs" / "command_page.py"))
COMMANDS: dict[str, Any] = COMMAND_PAGE["commands"]()
"""All commands of `perfsuite`, for example `baseline accept`."""


def options_of(command: Any) -> set[str]:
    names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return {name for name in names if name.startswith("-")} | {"--help"}


def perf_options(config: pytest.Config) -> set[str]:
    """Return the plugin's options, as they are typed."""
    return {f"--{name.replace('_', '-')}" for name in vars(config.option) if name.startswith("perf_")}


def has_ini_key(config: pytest.Config, key: str) -> bool:
    try:
        config.getini(key)
    except ValueError:
        return False
    return True


# Blocks


@every_page
def test_every_block_is_checked_or_explained(page: Page) -> None:
    known_languages = {"shell", "python", "text", *CHECKED_BY_PARSING}
    for block in page.blocks:
        assert block.language in known_languages or block.language.startswith("{"), block.where
        assert set(block.marks) <= MARKS, block.where
        assert block.marks.get("needs", "gpu") in NEEDS, block.where


@pytest.mark.parametrize("language", CHECKED_BY_PARSING)
def test_data_on_pages_can_be_parsed(language: str) -> None:
    for block in blocks(language):
        CHECKED_BY_PARSING[language](block.text)


@every_page
def test_python_on_pages_runs(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {name: getattr(perfsuite, name) for name in perfsuite.__all__}
    for block in page.blocks:
        write_file(block, tmp_path)
        if block.language == "python" and "needs" not in block.marks:
            exec(compile(block.text, block.where, "exec"), names)


def write_file(block: Block, root: Path) -> None:
    if "file" in block.marks:
        file = root / block.marks["file"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)


# Commands


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with one simulated case, its reviewed baseline, and a session in the local
    store."""
    root = tmp_path_factory.mktemp("project") / "clone"
    (root / "bench_cases").mkdir(parents=True)
    (root / "bench_cases" / "test_cases.py").write_text(SIMULATED_CASES)
    (root / "conftest.py").write_text(SIMULATED)
    (root / ".gitignore").write_text(
        ".venv\n.perfsuite/\n__pycache__/\n.pytest_cache/\nnights/\n.benchmarks/\n"
    )
    for name in ("Makefile", "bench_cases/published.py", "bench_cases/published.json"):
        shutil.copy(ROOT / name, root / name)
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "config", "user.name", "t")
    git(root, "config", "user.email", "t@example.org")
    commit(root, "first")
    use_this_interpreter(root)
    run("pytest bench_cases --perf-min-launches=5 --perf-record-launches=5", root)
    run("perfsuite baseline accept --reason first", root)
    commit(root, "baselines")
    run("pytest bench_cases --perf-json nights/cpu/results.json", root)
    return root


def run(command: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Run a line like a reader who has activated the environment."""
    environment = os.environ | {
        "PATH": f"{root / '.venv' / 'bin'}:{os.environ['PATH']}",
        "PYTEST_ADDOPTS": "-p no:hypothesispytest -p no:anyio -p no:xdist --perf-wait-quiet=0",
        "COLUMNS": "200",
    }
    return subprocess.run(
        ["bash", "-c", command], cwd=root, env=environment, capture_output=True, text=True, check=False
    )


FIRST_READ = {"README.md", "docs/tutorial.md"}
"""Pages whose commands `make test` runs. Those of the other pages run every night."""
WITH_COMMANDS = [
    pytest.param(page, marks=() if page.name in FIRST_READ else pytest.mark.nightly, id=page.name)
    for page in PAGES
    if any(block.language == "shell" and "needs" not in block.marks for block in page.blocks)
]


@pytest.mark.launch
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_on_pages_run(page: Page, template: Path, tmp_path: Path) -> None:
    root = tmp_path / "clone"
    shutil.copytree(template, root, symlinks=True)
    for block in page.blocks:
        write_file(block, root)
        if block.language != "shell" or "needs" in block.marks:
            continue
        for command in block.commands:
            done = run(command, root)
            said = f"{block.where}: {command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            assert str(done.returncode) in block.marks.get("exits", "0").split(" or "), said
        assert block.marks.get("shows", "") in done.stdout, said


def test_tutorial_case_is_first_in_make_bench() -> None:
    first, *_ = runpy.run_path(str(ROOT / "bench_cases" / "test_cpu.py"))["CASES"]
    names: dict[str, Any] = {}
    exec(page_of("tutorial").files["bench_cases/test_tiny.py"], names)
    assert names["TINY"].replace(timeout_s=first.timeout_s) == first


def test_tutorial_commits_the_case_before_measuring_it() -> None:
    """A session without a commit says that the commit of its cases is unknown."""
    shell = [block for block in page_of("tutorial").blocks if block.language == "shell"]
    commands = [command for block in shell for command in block.commands]
    measured = commands.index("pytest bench_cases/test_tiny.py")
    assert [command for command in commands[:measured] if command.startswith("git commit")]


# Names on pages exist


@every_page
def test_links_and_files_on_pages_exist(page: Page) -> None:
    for link in page.links:
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in Page(target).anchors, f"{page.name}: {link}"
    named = [
        code for code in page.code if re.match(r"(perfsuite|tests|docs|bench_cases|\.github)/[\w./-]+$", code)
    ]
    assert [name for name in named if not (ROOT / name).exists()] == []


@every_page
def test_options_that_pages_name_exist(page: Page, pytestconfig: pytest.Config) -> None:
    named = set(re.findall(r"--perf-[a-z-]*[a-z]", page.text))
    assert named <= perf_options(pytestconfig)
    keys = {key for code in page.code for key in re.findall(r"\bperf_[a-z_]*[a-z]\b", code)}
    assert [key for key in sorted(keys) if not has_ini_key(pytestconfig, key)] == []


def words_after(program: str, line: str) -> list[str]:
    """Return the words of a command line that follow a program's name, up to the next program."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # not a command: text with one quotation mark
        return []
    names = [Path(word).name for word in words]
    if program not in names:
        return []
    after = words[names.index(program) + 1 :]
    return list(takewhile(lambda word: word not in ("|", "||", "&&", ";", ">"), after))


@every_page
def test_commands_and_make_targets_on_pages_exist(page: Page) -> None:
    rules = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {name for names in rules for name in names.split()}
    groups = {name.split()[0] for name in COMMANDS if " " in name}
    for line in page.commands:
        made = {word for word in words_after("make", line) if "=" not in word}
        assert made <= targets, f"{page.name}: {line}"
        words = words_after("perfsuite", line)
        if not words or words[0].startswith("-") or (words == [words[0]] and words[0] in groups):
            continue
        name = " ".join(words[:2]) if words[0] in groups else words[0]
        assert name in COMMANDS, f"{page.name}: {line}"
        own = takewhile(lambda word: word != "--", words)  # the remaining words are for another program
        named = {word.partition("=")[0] for word in own if word.startswith("--")}
        assert named <= options_of(COMMANDS[name]), f"{page.name}: {line}"


# Everything in the code is on a page


def page_of(name: str) -> Page:
    (page,) = [page for page in FOR_USERS if page.path.stem == name]
    return page


def words_in_code(*names: str) -> set[str]:
    """Return every word between backquotes on these pages for users."""
    return {
        word
        for page in FOR_USERS
        if page.path.stem in names
        for code in page.code
        for word in re.findall(r"[\w-]+", code)
    }


def test_every_field_of_a_case_is_explained() -> None:
    fields = {name for kind in (Case, Topology, LoRA, KnownIssue) for name in kind.model_fields}
    assert fields - words_in_code("cases") == set()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_option_of_a_framework_is_explained(framework: type[Framework]) -> None:
    page = "your-own-script" if framework is Script else "frameworks"
    assert set(framework.model_fields) - words_in_code(page) == set()


def test_explains_models_verdicts_and_the_lock() -> None:
    assert f"`{USUAL}`" in page_of("not-judged").text
    assert [name for name in MODELS if f"`{name}`" not in page_of("cases").text] == []
    outcomes = {*get_args(Outcome), *get_args(FailureKind)} - {"undecided"}  # no session ends undecided
    assert outcomes - words_in_code("verdicts") == set()


def test_the_reference_is_of_every_public_package() -> None:
    text = page_of("reference").text
    files = [ROOT / "perfsuite" / "__init__.py", *(ROOT / "perfsuite").glob("*/__init__.py")]
    public = [file.parent for file in files if "__all__" in file.read_text()]
    names = [".".join(package.relative_to(ROOT).parts) for package in public]
    assert [name for name in names if f".. automodule:: {name}\n" not in text] == []


def test_every_option_and_ini_key_is_explained(pytestconfig: pytest.Config) -> None:
    options = perf_options(pytestconfig) - {"--perf-cases"}  # these are only for commands
    words = words_in_code("options")
    assert {name for name in options if name not in words} == set()
    keys = {option[2:].replace("-", "_") for option in options}
    assert {key for key in keys if has_ini_key(pytestconfig, key)} - words == set()


def test_option_page_has_the_table_of_options() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "option_table.py"))["written"]
    page = (ROOT / "docs" / "options.md").read_text()
    assert written(page) == page, "run python docs/option_table.py"


def test_command_page_matches_the_commands() -> None:
    hidden = {name for name, command in COMMANDS.items() if command.hidden}
    assert hidden == {"github comment", "github issue", "github propose", "history pull", "history push"}
    assert page_of("commands").text == COMMAND_PAGE["written"](), "run `make samples`"


@every_page
def test_samples_are_what_todays_code_shows(page: Page) -> None:
    assert page.text == with_samples(page.text), "run `make samples`"


def test_samples_are_as_wide_as_a_terminal() -> None:
    assert [line for text in texts().values() for line in text.splitlines() if len(line) > WIDTH] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
@pytest.mark.parametrize(
    "words",
    [
        "There is no release on PyPI yet",
        "Several GPUs, NCCL between them and real nodes have not been",
    ],
    ids=["release", "hardware"],
)
def test_home_page_has_the_readmes_status(words: str, name: str) -> None:
    page = (ROOT / name).read_text()
    assert words in " ".join(re.findall(r"^> (.*)$", page, re.MULTILINE))


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_a_found_regression_is_above_the_fold(name: str) -> None:
    above = (ROOT / name).read_text().splitlines()[:32]
    assert "<!-- sample: cause -->" in above
    assert [line for line in above if line.startswith("  all_gather")]
