"""docs/images/history.png: asv's page of a history that is measured here, commit by commit.

The repository trains bench_cases/scripts/train_copy.py, which from one commit on copies weights and
optimizer state after each step. What `perfsuite history trend` finds is printed, and the largest worsening
is marked on its page. It takes a quarter of an hour on a quiet machine; what was measured while others used
the cores is measured again.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlencode

from perfsuite import documents
from perfsuite.features.history.trend import trend
from perfsuite.results.session_file import SessionFile
from perfsuite.results.trend import Trend
from tests.browser import chromium, served
from tests.features.history.asv.local_scripts import use_local_scripts

COMMITS = 16
SLOWER = 9
"""How many there are, one a day, and the first that is slower."""
ATTEMPTS = 20
SCRIPT = Path(__file__).parents[3] / "bench_cases" / "scripts" / "train_copy.py"
STEP = "            optimizer.step()\n"
COPY = "checkpoint = copy.deepcopy([model.state_dict(), optimizer.state_dict()])"
SUITE = """
import pytest

from perfsuite import Case, Model, Script, Topology

TRAIN = Case(
    model=Model.named("copy-decoder"),
    framework=Script(path="train.py"),
    sequence_length=64,
    micro_batch=4,
    topology=Topology(processes_per_node=2),
    hardware="cpu",
    steps=150,
)


@pytest.mark.parametrize("case", [TRAIN, TRAIN.replace(micro_batch=8)])
def test_train(bench, case, monkeypatch):
    monkeypatch.setenv("MICRO_BATCH", str(case.micro_batch))
    bench(case)
"""
PICTURE = Path(__file__).parents[3] / "docs" / "images" / "history.png"
PERFSUITE = str(Path(sys.executable).with_name("perfsuite"))
BENCHMARKS = {
    "tokens/s": "copy-decoder.1x2.fp32.seconds_per_step",
    "peak memory": "copy-decoder.1x2.fp32.peak_memory",
}
WIDTH = 1140
HEIGHT = 690
OVERVIEW = 90
NO_SCROLLBARS = "::-webkit-scrollbar { display: none }"
DRAWN = "document.querySelectorAll('#main-graph .flot-y-axis .flot-tick-label').length > 1"


def main() -> None:
    """Measure at each commit, look for changes, and take the picture."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory).resolve()
        for number in range(1, COMMITS + 1):
            commit(root / "trainer", number)
            measure(root, number)
        of_history = ("--history", "history", "--repo", "trainer")
        run(PERFSUITE, "history", "publish", "pages", *of_history, cwd=root)
        run(PERFSUITE, "history", "trend", *of_history, cwd=root, statuses=(0, 1))
        picture(root / "pages" / "html", trend(root / "history", repo=root / "trainer"), PICTURE)


def commit(repo: Path, number: int) -> None:
    """Commit `number`, the last one today and each other a day before the next."""
    script = replaced(SCRIPT.read_text(), "default=4", 'default=int(os.environ["MICRO_BATCH"])')
    if number >= SLOWER:
        script = replaced(script, "import os\n", "import copy\nimport os\n")
        script = replaced(script, STEP, f"{STEP}            {COPY}\n")
    if number == 1:
        repo.mkdir(parents=True)
        run("git", "init", "--quiet", "--initial-branch=main", cwd=repo)
    (repo / "train.py").write_text(script)
    (repo / "test_train.py").write_text(SUITE)
    (repo / "NOTES.md").write_text(f"Notes of day {number}.\n")
    (repo / ".gitignore").write_text(".*\n__pycache__\n")
    date = f"{datetime.now(UTC) - timedelta(days=COMMITS - number):%Y-%m-%dT00:00:00Z}"
    ada = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    run("git", "add", "--all", cwd=repo)
    dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    run("git", *ada, "commit", "--quiet", f"--message=Day {number}", cwd=repo, variables=dates)


def replaced(text: str, old: str, new: str) -> str:
    """Raises ValueError unless `old` stands there once."""
    if text.count(old) != 1:
        raise ValueError(f"{old!r} stands {text.count(old)} times in {SCRIPT}, not once")
    return text.replace(old, new)


def measure(root: Path, number: int) -> None:
    """A session at the newest commit, into the history: three launches of each case, without a baseline.

    Raises SystemExit if the machine is not healthy for so long.
    """
    for attempt in range(ATTEMPTS):
        name = f"{number}-{attempt}"
        results = root / "results" / f"{name}.json"
        store = root / "stores" / name
        options = ("--quiet", "--benchmark-quiet", f"--perf-json={results}", f"--perf-store={store}")
        run(sys.executable, "-m", "pytest", *options, cwd=root / "trainer", statuses=(0, 1))
        if {result.outcome for result in documents.read(results, SessionFile).results} == {"recorded"}:
            return run(PERFSUITE, "history", "add", str(results), "--history", "history", cwd=root)
    raise SystemExit(f"commit {number} was not measured in {ATTEMPTS} attempts")


def picture(pages: Path, found: Trend, file: Path) -> None:
    """The graph in which the largest worsening is marked, with the page's controls, without its overview."""
    metric = found.failing[0].metric if found.failing else "tokens/s"
    worse = [finding for finding in found.failing if finding.metric == metric]
    marked = {f"{finding.first_commit[:8]}-{finding.last_commit[:8]}" for finding in worse}
    shown = {"x-axis-scale": "date", "y-axis-scale": "zoom", "commits": sorted(marked)}
    use_local_scripts(pages)
    with served(pages) as address, chromium() as browser:
        browser.screen(WIDTH, HEIGHT)
        browser.open(f"{address}/index.html#{BENCHMARKS[metric]}?{urlencode(shown, doseq=True)}")
        browser.wait(DRAWN)
        browser.evaluate(f"document.head.insertAdjacentHTML('beforeend', '<style>{NO_SCROLLBARS}</style>')")
        browser.wait_for_frame()
        browser.screenshot(file, without_last=OVERVIEW)


def run(*words: str, cwd: Path, variables: Mapping[str, str] = {}, statuses: Sequence[int] = (0,)) -> None:
    """A command, told and with its output. Raises SystemExit on another exit status."""
    print("$", Path(words[0]).name, *words[1:], flush=True)
    done = subprocess.run(words, cwd=cwd, env={**os.environ, **variables}, check=False)
    if done.returncode not in statuses:
        raise SystemExit(f"ended with {done.returncode}")


if __name__ == "__main__":
    main()
