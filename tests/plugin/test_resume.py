"""Tests of a session that was cut short and continues with `--perf-resume`, as a user would run it."""

import json
import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from perfsuite import documents
from tests.suite import local_baseline, read_json, write_cases
from tests.synthetic import commit

pytestmark = pytest.mark.launch

NIGHTLY = 18
EXPECTED = {
    None: ("passed", None),
    "crash": ("failed", "crash"),
    "exit": ("failed", "crash"),
    "oom": ("failed", "out_of_memory"),
    "nan": ("failed", "loss"),
    "loss": ("failed", "loss"),
    "missing-rank": ("failed", "missing_report"),
    "missing-metric": ("failed", "missing_metric"),
    "leak=60%": ("regressed", None),
    "slowdown=60%": ("regressed", None),
}
"""The outcome and the kind of failure for each injected fault."""
SAID = (
    "crash: RuntimeError: injected crash",
    "loss: the loss is nan at step 69",
    "the baseline has this metric, but this run does not",
    "missing_report: no report from rank 1 of 2",
)
"""Parts of the messages of some of the failures above."""
FAULTS = dict(
    zip(random.Random(13).sample(range(1, NIGHTLY + 1), NIGHTLY // 2), filter(None, EXPECTED), strict=True)
)
"""The fault that is injected into half of the cases, by the seed of the case."""
KILLED_AT = 11
"""The number of the case, counted from 1, in whose launch pytest is killed."""

WITH_FAULTS = """
    import json, os, pytest, signal, threading, time
    from pathlib import Path
    from perfsuite import documents
    from perfsuite.case.case import CaseFile
    from perfsuite.launch.local import LocalLauncher
    from tests import simulated

    FAULTS = json.loads(Path("faults.json").read_text())

    def launch(self, job, on_progress):
        is_last = str(job.case.seed) == os.environ.get("KILLED_AT")
        fault = "hang" if is_last else FAULTS.get(str(job.case.seed))
        request = documents.read(job.run_dir.case, CaseFile).replace(inject=fault)
        documents.write(job.run_dir.case, request)
        if not is_last:
            return simulated.launch(self, job)
        threading.Thread(target=kill, args=(job.run_dir.rank_log(1),), daemon=True).start()
        return simulated.REAL(self, job, on_progress)

    def kill(log):
        while not log.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    simulated.patch(pytest.MonkeyPatch())
    LocalLauncher.launch = launch
"""


@pytest.fixture
def night(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return a repository with 18 short cases. They have baselines, and half of them have a fault."""
    write_cases(suite, f"[FAKE.replace(seed=seed) for seed in range(1, {NIGHTLY} + 1)]")
    suite.makeconftest(WITH_FAULTS)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (suite.path / "faults.json").write_text("{}")
    (suite.path / ".gitignore").write_text(".perfsuite\n*.json\n__pycache__\n.pytest_cache\n.benchmarks\n")
    subprocess.run(["git", "init", "--quiet", suite.path], check=True)
    commit(suite.path)
    assert suite.runpytest_subprocess("-q", "-k", "seed1-1x2").ret == 0
    give_all_the_baseline_of_the_first(suite)
    (suite.path / "faults.json").write_text(json.dumps(FAULTS))
    return suite


def give_all_the_baseline_of_the_first(suite: pytest.Pytester) -> None:
    """The cases differ only in the seed, which does not change any value by more than the noise."""
    first = local_baseline(suite)
    content = json.loads(first.read_text())
    del content["digest"]
    for seed in range(2, NIGHTLY + 1):
        content["case"]["seed"] = seed
        sealed = documents.sealed(content)
        first.with_name(first.name.replace("seed1-", f"seed{seed}-")).write_text(json.dumps(sealed))


def verdicts(suite: pytest.Pytester, name: str) -> dict[str, tuple[str, str | None]]:
    """Return the outcome and the kind of failure of each case in a results file."""
    results = read_json(suite, name)["results"]
    return {result["case_id"]: (result["outcome"], result["verdict"]["failure"]) for result in results}


def expected() -> dict[str, tuple[str, str | None]]:
    return {
        f"fake-llama-tiny-s64-b4-fp32-seed{seed}-1x2": EXPECTED[FAULTS.get(seed)]
        for seed in range(1, NIGHTLY + 1)
    }


def launches(suite: pytest.Pytester) -> Sequence[Path]:
    """Return the directories of all launches of the newest session."""
    return sorted(max(suite.path.glob(".perfsuite/runs/*")).glob("*/launch-*"))


@pytest.mark.nightly
@pytest.mark.fault("metric is missing")
@pytest.mark.fault("pytest is killed")
def test_resumed_night_ends_as_an_unbroken_one(
    night: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = night.runpytest_subprocess("-q", "--perf-json=whole.json")
    assert whole.ret == 1
    assert verdicts(night, "whole.json") == expected()
    output = " ".join(whole.stdout.str().split())
    for said in SAID:
        assert said in output

    monkeypatch.setenv("KILLED_AT", str(KILLED_AT))
    night.runpytest_subprocess("-q")
    killed = json.loads(max(night.path.glob(".perfsuite/runs/*/results.json")).read_text())
    assert (killed["status"], len(killed["results"])) == ("running", KILLED_AT - 1)
    assert killed["interrupted_case"] == f"fake-llama-tiny-s64-b4-fp32-seed{KILLED_AT}-1x2"
    here = [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(night.path)]
    _, alive = psutil.wait_procs([process for process in here if process.pid != os.getpid()], timeout=20)
    assert alive == []
    before = launches(night)

    monkeypatch.delenv("KILLED_AT")
    resumed = night.runpytest_subprocess("-q", "--perf-resume", "--perf-json=resumed.json")
    assert resumed.ret == 1
    assert verdicts(night, "resumed.json") == expected()
    again = [seed for seed, fault in FAULTS.items() if fault == "missing-rank" and seed < KILLED_AT]
    kept = KILLED_AT - 1 - len(again)
    resumed.stdout.fnmatch_lines(
        [f"perfsuite: --perf-resume continues *, with {kept} cases already measured"]
    )
    resumed.stdout.fnmatch_lines([f"perfsuite: [[]1/{NIGHTLY - kept}] *"])
    parts = [(part["status"], part["cases"]) for part in read_json(night, "resumed.json")["parts"]]
    assert parts == [("interrupted", KILLED_AT - 1), ("complete", NIGHTLY - kept)]
    new = {path.parent.name for path in launches(night) if path not in before}
    assert len(new) == NIGHTLY - kept
    assert resumed.parseoutcomes() == whole.parseoutcomes()
