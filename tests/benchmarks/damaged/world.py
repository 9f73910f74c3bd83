"""The projects whose files are damaged. All is well in them but what the commands judge, which is bad."""

import json
import math
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from perfsuite import documents
from perfsuite.cli.github_issue import title
from perfsuite.cli.judge_logs import MEGATRON_TAG
from perfsuite.history import store
from perfsuite.results.baseline import Acceptance, Baseline, BaselineLaunch
from perfsuite.results.rank_report import Failure
from perfsuite.results.session_file import Measurement
from tests import samples
from tests.benchmarks.damaged.running import in_process
from tests.benchmarks.damaged.shown import Kind
from tests.processes import executable
from tests.samples import COMMIT
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
"""Where a project can have pytest's settings: a file and what it holds, by a name."""
URL = "https://example.org/1"

Launch = Callable[[BaselineLaunch], BaselineLaunch]


@dataclass(frozen=True)
class Target:
    """A file that is damaged, and the commands that read it."""

    project: str
    file: str
    kind: Kind
    commands: Sequence[Sequence[str]]
    is_printed: bool = False  # whether a program prints it, so that nothing but bytes can stand in its place

    @property
    def name(self) -> str:
        """The target, for rows."""
        return f"{self.project}/{self.file}"


def make(root: Path) -> list[Target]:
    """Make every project, and return what can be damaged in them."""
    root.mkdir()
    return [*_gates(root), *_results(root), *_history(root), *_judged(root), *_launches(root)]


def _gates(root: Path) -> list[Target]:
    """Make projects with a case that is slower than its baseline, or has none though it has to."""
    first = root / "first"
    first.mkdir()
    _write_cases(first, "[pytest]\n")
    said = in_process(first, (*GATE, "--perf-record-launches=5", "--perf-min-launches=5"))
    assert said.status == 0, said.output
    (recorded,) = first.glob(".perfsuite/baselines/*/*.json")
    known = documents.read(recorded, Baseline)
    name = f"{recorded.parent.name}/{recorded.name}"
    shutil.rmtree(first)
    judged = {
        "slower": _each(known, _faster),
        "stalls": _each(known, _steadier),
        "larger": _each(known, _smaller),
        "loss": _each(known, lambda launch: launch.replace(loss=tuple(2 * each for each in launch.loss))),
    }
    targets = []
    for project, baseline in judged.items():
        file = _project(root / project, baseline, name)
        shown = [("baseline", "list"), ("baseline", "show", ID)] if project == "slower" else []
        targets.append(Target(project, file, "baseline", [GATE, GATE, *shown]))
    local = root / "local"  # its baseline was recorded and never reviewed
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
    """Make a project with a reviewed baseline, and return its file."""
    project.mkdir()
    (project / ".perfsuite").mkdir()
    _write_cases(project, f"[pytest]\n{INI}")
    if waivers:
        (project / "perf-waivers.toml").write_text(waivers)
    documents.write(project / "baselines" / name, baseline)
    _as_branch(project)
    return f"baselines/{name}"


def _as_branch(project: Path) -> None:
    """Make a repository whose branch has changed nothing yet."""
    make_repository(project, 1)
    git(project, "reset", "--quiet")
    head = commit(project)
    git(project, "update-ref", "refs/remotes/origin/main", head)


def _each(known: Baseline, change: Launch) -> Baseline:
    accepted = Acceptance(by="me", date="2026-01-02T03:04:05+00:00", commit=None)
    return known.replace(launches=tuple(map(change, known.launches)), accepted=accepted)


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


def _bad_result() -> Measurement:
    bad = samples.make_launches(*(0.5,) * 5, step_s_p50=0.25, step_s_mean=0.25)
    return samples.make_result(*bad, before=samples.make_run())


def _results(root: Path) -> list[Target]:
    """Make a session of a slow case, a pull request that is answered, and the issue of a night."""
    project = root / "session"
    samples.write_session(project / "results", _bad_result())
    results = "results/results.json"
    _stand_in(project / "bin", {"headRefOid": COMMIT, "comments": [], "commits": [{"oid": COMMIT}]})
    comment = ("github", "comment", results, "--run-url", URL, "--pull-request", "7")
    commands = [
        ("report", results),
        ("report", results, "--json"),
        ("report", results, "--report", "out"),
        ("export", results, "--format", "hud"),
        ("history", "add", "--history", "new", results),
        comment,
        comment,
    ]
    night = root / "night"
    samples.write_session(night / "results", _bad_result())
    body = f"text\n<!-- perfsuite: {json.dumps([samples.make_case().id])} -->"
    _stand_in(night / "bin", [{"number": 7, "title": title("cpu-test-2c"), "body": body}])
    issue = ("github", "issue", results, "--run-url", URL)
    return [
        Target("session", results, "sealed", commands),
        Target("session", "bin/answer", "sealed", [comment], is_printed=True),
        Target("night", results, "sealed", [issue]),
        Target("night", "bin/answer", "sealed", [issue], is_printed=True),
    ]


def _stand_in(directory: Path, answer: object) -> None:
    """Put a program into a directory that stands in for `gh`: it keeps what it is told."""
    directory.mkdir(parents=True)
    executable(
        directory / "gh",
        'cd "$(dirname "$0")"; echo "$@" >> calls',
        'case "$*" in *"-file -"* | *"@-"* | *"--input -"*) cat >> calls ;; esac',
        'case "$2" in view | list) cat answer ;; create) echo https://example.org/made ;; esac',
    )
    (directory / "answer").write_text(json.dumps(answer))


def _history(root: Path) -> list[Target]:
    """Make a history of nights: one that failed, and one in which cases got slower for good."""
    project = root / "history"
    lost = samples.never_run().replace(case_id="lost", judged_by="b")
    file = samples.write_session(project, _bad_result().replace(judged_by="a"), lost)
    store.add(project / "history", file)
    file.unlink()
    (session,) = project.glob("history/cpu*/*/*.json")
    (case,) = project.glob("history/cases/*.json")
    commands = [
        ("history", *words, "--history", "history")
        for words in (("list",), ("failures",), ("list", "--json"), ("failures", "--json"))
    ]
    drifting = root / "drift"
    for night in range(24):
        step_s = (0.1 if night < 12 else 0.13) * (1 + 0.002 * (night * 7 % 5 - 2))
        figures = samples.make_figures(tokens_per_s=51.2 / step_s, step_s_p50=step_s, step_s_mean=step_s)
        began = f"2026-01-{night + 1:02}T03:04:05+00:00"
        run = samples.make_run(figures=figures, started_at=began)
        result = samples.make_result(run, before=None)
        told = {"started_at": began, "commit": f"{night:02}" * 20}
        store.add(drifting / "history", samples.write_session(drifting, result, **told))
    (drifting / "results.json").unlink()
    newest = sorted(drifting.glob("history/cpu*/*/*.json"))[-1]
    (drifting_case,) = drifting.glob("history/cases/*.json")
    before = samples.make_launches(*(0.394,) * 5)
    accepted = samples.make_baseline(*before).replace(recorded_at="2026-01-02T03:04:05+00:00")
    baseline = drifting / "baselines" / "cpu-test-2c" / f"{accepted.case.id}.json"
    documents.write(baseline, accepted)
    trends = [("history", "trend", "--history", "history", *words) for words in ((), ("--json",))]
    said = in_process(drifting, trends[1])
    assert said.status == 1, said.output
    drifted = root / "drifted"
    samples.write_session(drifted / "results", samples.make_result(samples.BEFORE))
    (drifted / "trend.json").write_text(said.output[said.output.index("{") : said.output.rindex("}") + 1])
    subject = f"drift of {accepted.case.id}, tokens/s"
    body = f"text\n<!-- perfsuite: {json.dumps([subject])} -->"
    _stand_in(drifted / "bin", [{"number": 7, "title": title("cpu-test-2c"), "body": body}])
    issue = ("github", "issue", "results/results.json", "--run-url", URL, "--trend", "trend.json")

    def below(of: Path, path: Path) -> str:
        return str(path.relative_to(of))

    return [
        Target("history", below(project, session), "sealed", commands),
        Target("history", below(project, case), "sealed", commands[:2]),
        Target("drift", below(drifting, newest), "sealed", trends),
        Target("drift", below(drifting, drifting_case), "sealed", trends),
        Target("drift", below(drifting, baseline), "accepting", trends),
        Target("drifted", "trend.json", "sealed", [issue]),
    ]


def _judged(root: Path) -> list[Target]:
    """Make step times that others measured: traces, and logs of TensorBoard."""
    project = root / "judged"
    project.mkdir()
    noise = {"sigma": 0.01, "degrees_of_freedom": 30}
    slow = {"tolerance": 0.03, "baseline": [[0.1] * 20] * 5, "launches": [[0.2] * 20] * 5, "noise": noise}
    good = {**slow, "launches": slow["baseline"]}
    (project / "traces.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in (good, slow)))
    for name, level in (("old", 0.5), ("new", 0.7)):
        for number in (1, 2, 3):
            _write_log(project / f"{name}-{number}", level, number)
    against = [word for number in (1, 2, 3) for word in ("--baseline", f"old-{number}")]
    logs = ("judge", "new-1", "new-2", "new-3", *against)
    traces = ("judge", "traces.jsonl")
    both = [logs, (*logs, "--json")]
    return [
        Target("judged", "traces.jsonl", "traces", [traces, (*traces, "--json")]),
        Target("judged", "new-1/events.tfevents", "log", both),
        Target("judged", "old-1/events.tfevents", "log", both),
    ]


def _write_log(directory: Path, level: float, seed: int) -> None:
    """Write an event file as Megatron's SummaryWriter does."""
    writer = EventFileWriter(str(directory))
    for step in range(40):
        seconds = level * (1 + 0.004 * ((7 * step + seed) % 5 - 2))
        summary = Summary(value=[Summary.Value(tag=MEGATRON_TAG, simple_value=seconds)])
        writer.add_event(Event(step=step, wall_time=1.0, summary=summary))
    writer.close()
    (file,) = directory.iterdir()
    file.rename(directory / "events.tfevents")


def _launches(root: Path) -> list[Target]:
    """Make what launches leave: of a rank with a loss of NaN, of one that failed, and of one that died."""
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
