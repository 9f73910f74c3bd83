"""`perfsuite init`: create the initial files of a repository that measures its training."""

import ast
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version

from perfsuite import documents
from perfsuite.case.hardware import hardware_error
from perfsuite.cli.shared_options import Shared, shares
from perfsuite.errors import CaseError, FileError, GitError
from perfsuite.features.nightly.night import gate
from perfsuite.inputs.files import read_text
from perfsuite.inputs.git import git
from perfsuite.inputs.ini import CASES, FILES, read_ini

IGNORED = (".perfsuite/", "out/", "/history/")
SLURM_LOGS = "slurm-*.out"
STRICT = {"perf_missing_baseline": "fail", "perf_strict": "inconclusive"}
"""Settings with which a nightly run or a pull request fails if a case was not judged."""
OWNED = ("/baselines/", "/perf-waivers.toml", "/.github/", "conftest.py", "/{ini}", "/{cases}/")
"""Files that determine whether a check succeeds. Code owners should approve changes to them."""
CODEOWNERS = (Path(".github/CODEOWNERS"), Path("CODEOWNERS"), Path("docs/CODEOWNERS"))
NIGHT = Path("performance-night.sh")
ACCEPT = 'perfsuite baseline accept --reason "the first"'
# The frameworks that the first case file measures in addition to DDP -> the required package, and the code.
FRAMEWORKS = {
    "FSDP2": ("transformers", "FSDP2()"),
    "Accelerate": ("accelerate", 'Accelerate(strategy="fsdp2")'),
    "Trainer": ("accelerate", 'Trainer(fsdp="full_shard auto_wrap")'),
    "Lightning": ("lightning", 'Lightning(strategy="fsdp2")'),
}
OF_LLAMA = ("torch", "transformers", "accelerate", "lightning")
"""Packages that the cases with a tiny Llama need."""
PLACEHOLDER = "perfsuite @ git+https://github.com/OWNER/perfsuite@COMMIT"


@shares("cases")
def init(
    *,
    script: Annotated[
        Path | None, typer.Option(help="Measure this training script instead of a tiny Llama.")
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="Also write cases for this hardware marker, such as h100.")
    ] = "cpu",
    github: Annotated[
        bool, typer.Option("--github", help="Also write a workflow that measures every night.")
    ] = False,
    runs_on: Annotated[
        str,
        typer.Option(help="Runner of the workflow, as YAML: a label, a list of labels or {group: name}."),
    ] = "",
    container: Annotated[
        str, typer.Option(help="Container image of the workflow (default: no container).")
    ] = "",
    uses: Annotated[
        str,
        typer.Option(
            metavar="OWNER/REPOSITORY@COMMIT",
            help="Call the workflow of this copy of perfsuite, which also keeps a history and opens issues.",
        ),
    ] = "",
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Also write a script for nightly runs on a Slurm cluster.")
    ] = False,
    shared: Shared,
) -> None:
    """Write a first case file, lines for .gitignore, pytest's settings and, if requested, a nightly run.

    Existing files are never overwritten. Lines are appended to an existing .gitignore.
    """
    cases = shared.cases
    error = hardware_error(hardware)
    if error is not None:
        raise CaseError(f"--hardware {hardware}: {error}")
    if script is not None and not script.is_file():
        raise CaseError(f"--script {script}: there is no such file")
    if script is None and find_spec("transformers") is None:
        raise CaseError("the Llama cases need transformers, which is not installed: give your own --script")
    if not github and (runs_on or container or uses):
        raise CaseError("--runs-on, --container and --uses need --github: add it, or remove them")
    if uses and not re.fullmatch(r"[\w.-]+/[\w.-]+@([0-9a-f]{40}|v\d[\w.]*)", uses):
        raise CaseError(
            f"--uses {uses}: give OWNER/REPOSITORY@ and a commit of 40 digits or a release, such as v1.2.0"
        )
    if github:
        _refuse_a_part(cases)
    for path, text in {
        **_case_file(script, hardware, cases),
        **(_workflow(hardware, runs_on, container, uses, script) if github else {}),
        **(_slurm(hardware, cases) if slurm else {}),
    }.items():
        _write(path, text)
    _ignore(Path(".gitignore"), (*IGNORED, SLURM_LOGS) if slurm else IGNORED)
    _settings({**({} if cases == CASES else {"perf_cases": str(cases)}), **(STRICT if github else {})})
    if github:
        _owners(cases)
    # With the settings of a workflow, a case without a baseline fails. So these options let the first session
    # record baselines.
    first = ["--perf-min-launches=10", *(["--perf-missing-baseline=record"] if github else [])]
    if slurm:
        steps = [_submit(hardware, cases, *first), ACCEPT, f"sh {NIGHT}"]
    else:
        marker = hardware if hardware == "cpu" else f"cpu or {hardware}"
        record = shlex.join(["pytest", str(cases), "-m", marker, *first])
        steps = ["perfsuite doctor --quick", record, ACCEPT]
    if script is not None:
        typer.echo(f"\nEdit the case first: its batch and its lengths must be those of {script}.")
    typer.echo("\n  ".join(["\nNext:", *steps]))


def _refuse_a_part(cases: Path) -> None:
    """Raise `CaseError` if the current directory is only a part of a repository."""
    try:
        here, top = git("rev-parse", "--show-prefix", "--show-toplevel", cwd=Path()).splitlines()
    except GitError:  # no repository yet, or no git
        return
    if here:
        raise CaseError(
            "--github: GitHub reads workflows only in the top directory of a repository, but the current "
            f"directory is {here}. Run this command in {top}, for example with --cases {here}{cases}, or "
            "leave out --github"
        )


def _case_file(script: Path | None, hardware: str, cases: Path) -> dict[Path, str]:
    if script is not None:
        stem = re.sub(r"\W", "_", script.stem)
        text = _written("test_script.py", stem=stem, script=script.as_posix(), hardware=hardware)
        return {cases / f"test_{stem}.py": text}
    there = {name: made for name, (package, made) in FRAMEWORKS.items() if find_spec(package)}
    names = sorted(["DDP", "Case", "Topology", *there], key=lambda name: (not name.isupper(), name))
    made = ["DDP()", *there.values()]
    text = _written("test_llama.py", names=names, frameworks=made, hardware=hardware)
    return {cases / "test_llama.py": text}


def _workflow(hardware: str, runs_on: str, container: str, uses: str, script: Path | None) -> dict[Path, str]:
    runner = runs_on or f"[self-hosted, {hardware}]"
    where = _yaml(runner)
    of_job = {
        "hardware": hardware,
        "container": container,
        "install": "" if container else _install(uses, script),
    }
    if uses:
        repository, _, commit = uses.partition("@")
        machine = {"runs-on": where, **({"container": container} if container else {})}
        machines = json.dumps({hardware: machine}).replace("'", "''")  # YAML's escape
        text = _written("call.yml", **of_job, repository=repository, commit=commit, machines=machines)
    else:
        command = "python -m perfsuite.cli" if container else ".venv/bin/perfsuite"
        text = _written("workflow.yml", **of_job, runs_on=runner, perfsuite=command)
    return {Path(".github/workflows/performance.yml"): text}


def _written(name: str, **values: object) -> str:
    """Render one of the files in `templates` with these values."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # other commands do not need it

    loader = PackageLoader(__package__)
    files = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return files.get_template(f"{name}.j2").render(values)


def _yaml(text: str) -> object:
    import yaml  # other commands do not need it

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise CaseError(
            f"--runs-on {text}: not YAML ({error}): give a label, [labels] or {{group: name}}"
        ) from None


def _slurm(hardware: str, cases: Path) -> dict[Path, str]:
    return {NIGHT: _written("night.sh", submit=_submit(hardware, cases, *gate(Path("out"))))}


def _submit(hardware: str, cases: Path, *options: str) -> str:
    """Return a command that measures cases in a job with its own node, and waits until the job ends."""
    gpus = "" if hardware == "cpu" else " --gres=gpu:8"
    session = shlex.join(["pytest", str(cases), "-m", hardware, "--perf-launcher=slurm", *options])
    job = f"--exclusive --no-requeue --nodes=1 --time=10:00:00{gpus} --mem=0"
    return f"sbatch --wait {job} --wrap={shlex.quote(session)}"


def _install(uses: str, script: Path | None) -> str:
    """Return a command that installs perfsuite, and the project of this directory, into `.venv`."""
    needs = Path("requirements.txt")
    # If no file lists the project's requirements, write one with the releases that are installed here.
    if not needs.exists() and not Path("pyproject.toml").exists():
        needed = OF_LLAMA if script is None else _imported(script)
        _write(needs, "".join(f"{line}\n" for line in releases_of(needed)))
    project = "-r requirements.txt" if needs.exists() else "-e ."
    return f"test -d .venv || python3 -m venv .venv && .venv/bin/pip install {project} '{_perfsuite(uses)}'"


def releases_of(names: Iterable[str]) -> list[str]:
    """Return the installed releases of packages, as requirements for pip. Leave out missing packages."""
    return [f"{name}=={Version(version(name)).public}" for name in names if _is_installed(name)]


def _imported(script: Path) -> list[str]:
    """Return torch and the installed packages that a script imports directly."""
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError):  # another language, or another Python version
        return ["torch"]
    modules = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module.partition(".")[0])
    distributions = packages_distributions()
    return [
        "torch",
        *sorted(
            {name for module in modules for name in distributions.get(module, [])} - {"torch", "perfsuite"}
        ),
    ]


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _perfsuite(uses: str) -> str:
    """Return perfsuite as a requirement for pip: a copy on GitHub, or the source of this installation.

    If that source is a path on this machine, which a runner cannot use, the requirement has placeholders for
    the user to fill in.
    """
    if uses:
        return "perfsuite @ git+https://github.com/" + uses
    source = json.loads(distribution("perfsuite").read_text("direct_url.json") or "{}")
    if "url" not in source:
        return f"perfsuite=={version('perfsuite')}"
    commit = source.get("vcs_info", {}).get("commit_id")
    if commit and not source["url"].startswith("file:"):
        return f"perfsuite @ git+{source['url']}@{commit}"
    typer.echo(
        "complete the workflow: replace OWNER and COMMIT with the owner of your copy of perfsuite and a "
        f"commit. A runner cannot use {source['url']}, from which perfsuite was installed here"
    )
    return PLACEHOLDER


def _write(path: Path, text: str) -> None:
    """Write a file unless it already exists, and print a line about it."""
    if path.exists():
        typer.echo(f"kept: {path}, which already exists")
        return
    documents.write_text(path, text)
    typer.echo(f"written: {path}")


def _ignore(path: Path, names: Iterable[str]) -> None:
    """Append the names of files that git should ignore to `.gitignore`."""
    try:
        text = read_text(path, errors="replace") if path.exists() else ""
        missing = [name for name in names if name not in text.splitlines()]
        with path.open("ab") as file:  # binary, because the file can have another encoding or line ends
            end = "" if text.endswith("\n") or not text else "\n"
            file.write((end + "".join(f"{name}\n" for name in missing)).encode() if missing else b"")
    except OSError as error:
        raise FileError(f"cannot add to {path}: {error.strerror}") from None
    if missing:
        typer.echo(f"added to {path}: {' '.join(missing)}")


def _settings(wanted: Mapping[str, str]) -> None:
    """Write pytest's settings if there are none. Otherwise, print the settings that are missing."""
    ini = read_ini(Path.cwd())
    missing = [f"{key} = {value}" for key, value in wanted.items() if key not in ini.values]
    if not missing:
        return
    if ini.values:
        instruction = "add this to pytest's settings, which perfsuite's commands also read:"
        typer.echo(
            f"{instruction} {missing[0]}" if len(missing) == 1 else "\n  ".join([instruction, *missing])
        )
    else:
        _write(Path("pytest.ini"), "".join(f"{line}\n" for line in ("[pytest]", *missing)))


def _owners(cases: Path) -> None:
    """Print the lines that are missing in CODEOWNERS. Only the project can fill in the owners."""
    file = next(filter(Path.exists, CODEOWNERS), None)
    text = "" if file is None else read_text(file, errors="replace")
    patterns = {line.split()[0] for line in text.splitlines() if line.strip()}
    ini = next((name for name in FILES if Path(name).is_file()), "pytest.ini")
    lines = [owned.format(ini=ini, cases=cases.as_posix()) for owned in OWNED]
    missing = [f"{line} @OWNER" for line in lines if line not in patterns]
    if missing:
        where = f"add this to {file}" if file else f"write this to {CODEOWNERS[0]}"
        instruction = (
            f"to require a review of changes to the checks, {where}, with your reviewers instead of @OWNER:"
        )
        typer.echo("\n  ".join([instruction, *missing]))
