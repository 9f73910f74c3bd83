"""Makes the projects whose files are damaged. In these projects, only the judged results are bad."""

import json
import math
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from perfsuite import documents
from perfsuite.results.baseline import Acceptance, Baseline, BaselineLaunch
from perfsuite.results.rank_report import Failure
from perfsuite.results.session_file import Measurement
from tests import samples
from tests.benchmarks.damaged.running import in_process
from tests.benchmarks.damaged.shown import Kind
from tests.processes import executable
from tests.suite import CASES, ID, waiver
from tests.synthetic import commit, git, make_repository

GATE = ("pytest", "-q", "-p", "no:cacheprovider", "test_cases.py")
KEYS = {"perf_missing_baseline": "fail", "perf_max_launches": "4", "perf_strict": "inconclusive"}
INI = "".join(f"{key} = {value}\n" for key, value in KEYS.items())
TOML = "".join(f'{key} = "{value}"\n' for key, value in KEYS.items())
SETTINGS: Mapping[str, tuple[str, str]] = {
    "ini": ("pytest.ini", f"[pytest]\n{INI}"),
    "dotted": (".pytest.ini", f"[pytest]\n{INI}"),
    "tox": ("tox.ini", f"[tox]\nenv_list = py312\n\n[pytest]\n{INI}"),
    "cfg": ("setup.cfg", f"[metadata]\nname = mine\n\n[tool:pytest]\n{INI}"),
    "options": ("pyproject.toml", f'[project]\nname = "mine"\n\n[tool.pytest.ini_options]\n{TOML}'),
    "native": ("pyproject.toml", f"[tool.pytest]\n{TOML}"),
    "toml": ("pytest.toml", f"[pytest]\n{TOML}"),
}
"""Each file that can hold pytest's settings of a project, with its content."""
FEATURES = Path(__file__).parents[2] / "features"
"""The folder with the tests of features. A feature whose commands read files has a `damaged.py`."""
URL = "https://example.org/1"

Launch = Callable[[BaselineLaunch], BaselineLaunch]


@dataclass(frozen=True)
class Target:
    """A file that is damaged, and the commands that read it."""

    project: str
    file: str
    kind: Kind
    commands: Sequence[Sequence[str]]
    is_printed: bool = False  # whether it is the output of a program, so that only bytes can replace it

    @property
    def name(self) -> str:
        """The name of the target in messages."""
        return f"{self.project}/{self.file}"


def make(root: Path) -> list[Target]:
    """Make every project, and return all files in the projects that can be damaged."""
    root.mkdir()
    made = [*_gates(root), *_results(root), *_launches(root)]
    for file in sorted(FEATURES.glob("*/damaged.py")):
        made += import_module(f"tests.features.{file.parent.name}.damaged").targets(root)
    return made


def _gates(root: Path) -> list[Target]:
    """Make projects with a case that is slower than its baseline, or that lacks a required baseline."""
    first = root / "first"
    first.mkdir()
    _write_cases(first, "[pytest]\n")
    said = in_process(first, (*GATE, "--perf-record-launches=5", "--perf-min-launches=5"))
    assert said.status == 0, said.output
    (recorded,) = first.glob(".perfsuite/baselines/*/*.json")
    accepted = documents.read(recorded, Baseline)
    name = f"{recorded.parent.name}/{recorded.name}"
    shutil.rmtree(first)
    judged = {
        "slower": _each(accepted, _faster),
        "stalls": _each(accepted, _steadier),
        "larger": _each(accepted, _smaller),
        "loss": _each(accepted, lambda launch: launch.replace(loss=tuple(2 * loss for loss in launch.loss))),
    }
    targets = []
    for project, baseline in judged.items():
        file = _project(root / project, baseline, name)
        shown = [("baseline", "list"), ("baseline", "show", ID)] if project == "slower" else []
        targets.append(Target(project, file, "baseline", [GATE, GATE, *shown]))
    local = root / "local"  # a project whose baseline was recorded and never reviewed
    _project(local, judged["slower"], name)
    (local / "baselines").rename(local / ".perfsuite" / "baselines")
    commit(local)
    targets.append(Target("local", f".perfsuite/baselines/{name}", "sealed", [GATE]))
    targets.append(Target("slower", "pytest.ini", "settings", [GATE, ("baseline", "list")]))
    for project, of_waiver in {
        "expired": {"tolerated": "99%", "until": "2020-01-01"},
        "little": {"tolerated": "1%", "until": "2999-12-31"},
    }.items():
        _project(root / project, judged["slower"], name, waiver(metric="*", **of_waiver))
        targets.append(Target(project, "perf-waivers.toml", "waivers", [GATE]))
    for project, (file, text) in SETTINGS.items():
        (root / project).mkdir()
        _write_cases(root / project, text, file)
        _as_branch(root / project)
        targets.append(Target(project, file, "settings", [GATE]))
    return targets


def _write_cases(project: Path, settings: str, file: str = "pytest.ini") -> None:
    (project / "test_cases.py").write_text(textwrap.dedent(CASES).replace("[FAKE, A100]", "[FAKE]"))
    (project / ".gitignore").write_text(".perfsuite\n__pycache__\n")
    (project / file).write_text(settings)


def _project(project: Path, baseline: Baseline, name: str, waivers: str = "") -> str:
    """Make a project with a reviewed baseline, and return the name of the baseline's file."""
    project.mkdir()
    (project / ".perfsuite").mkdir()
    _write_cases(project, f"[pytest]\n{INI}")
    if waivers:
        (project / "perf-waivers.toml").write_text(waivers)
    documents.write(project / "baselines" / name, baseline)
    _as_branch(project)
    return f"baselines/{name}"


def _as_branch(project: Path) -> None:
    """Make a repository whose branch has not changed anything yet."""
    make_repository(project, 1)
    git(project, "reset", "--quiet")
    head = commit(project)
    git(project, "update-ref", "refs/remotes/origin/main", head)


def _each(baseline: Baseline, change: Launch) -> Baseline:
    accepted = Acceptance(by="me", date="2026-01-02T03:04:05+00:00", commit=None)
    return baseline.replace(launches=tuple(map(change, baseline.launches)), accepted=accepted)


def _faster(launch: BaselineLaunch) -> BaselineLaunch:
    speed = launch.figures.tokens_per_s
    mean = launch.figures.tokens_per_s_mean
    times = {"tokens_per_s": 3 * samples.known(speed), "tokens_per_s_mean": 3 * samples.known(mean)}
    return launch.replace(figures=launch.figures.replace(**times))


def _steadier(launch: BaselineLaunch) -> BaselineLaunch:
    mean = samples.known(launch.figures.tokens_per_s_mean)
    return launch.replace(figures=launch.figures.replace(tokens_per_s_mean=3 * mean))


def _smaller(launch: BaselineLaunch) -> BaselineLaunch:
    peak = samples.known(launch.figures.peak_memory_bytes)
    return launch.replace(figures=launch.figures.replace(peak_memory_bytes=peak / 3))


def bad_result() -> Measurement:
    """Make a result that is slower than arm A."""
    bad = samples.make_launches(*(0.5,) * 5, step_s_p50=0.25, step_s_mean=0.25)
    return samples.make_result(*bad, before=samples.make_run())


def _results(root: Path) -> list[Target]:
    """Make a session of a slow case."""
    project = root / "session"
    samples.write_session(project / "results", bad_result())
    results = "results/results.json"
    commands = [("report", results), ("report", results, "--json"), ("report", results, "--out", "out")]
    return [Target("session", results, "sealed", commands)]


def stand_in(directory: Path, answer: object) -> None:
    """Write a replacement for `gh` that prints `answer` and records its calls."""
    directory.mkdir(parents=True)
    executable(
        directory / "gh",
        'cd "$(dirname "$0")"; echo "$@" >> calls',
        'case "$*" in *"-file -"* | *"@-"* | *"--input -"*) cat >> calls ;; esac',
        'case "$2" in view | list) cat answer ;; create) echo https://example.org/made ;; esac',
    )
    (directory / "answer").write_text(json.dumps(answer))


def _launches(root: Path) -> list[Target]:
    """Write the files of three launches: a rank with a loss of NaN, a failed rank, and a rank that died."""
    project = root / "launches"
    good = samples.make_report(0)
    loss = list(samples.make_report(1).loss)
    loss[12] = math.nan
    samples.write_launch(project / "nan", good, samples.make_report(1, loss=tuple(loss)))
    crash = Failure(kind="crash", message="boom", rank=1)
    samples.write_launch(project / "failed", good, samples.make_report(1, failure=crash))
    samples.write_launch(project / "died", good, ended=(crash,))
    files = (
        "nan/rank-0.json",
        "nan/rank-1.json",
        "failed/rank-1.json",
        "died/launch-0.json",
        "nan/case.json",
    )
    return [Target("launches", file, "sealed", [("collect", file.partition("/")[0])]) for file in files]
