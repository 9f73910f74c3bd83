"""Test sessions with `--perf-reference`, as a user would run them."""

import sys
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import CaseFile
from perfsuite.launch.job import Job, OnProgress, no_progress
from perfsuite.results.rank_report import Failure, Observed
from perfsuite.session import reference
from perfsuite.verdict import comparability
from tests.simulated import Rewrites
from tests.suite import CASES, batches, launching_with, read_json, run_cpu, write_cases

JSON = ("--perf-json", "out.json")
CODE = Observed(settings={}, environment={"torch": "2.13.0"}, code="0123456789ab")
OBSERVED = launching_with(Rewrites(observed=CODE))
"""A plugin with which all ranks observe the same code. Simulated ranks alone observe none."""


@pytest.fixture
def recorded(suite: pytest.Pytester, simulated: None) -> pytest.Pytester:
    """Return a suite of four cases with local baselines of one session."""
    write_cases(suite, batches(4, 8, 16, 32))
    run_cpu(suite, plugins=[OBSERVED])
    return suite


def reference_of(suite: pytest.Pytester) -> dict[str, Any]:
    facts: dict[str, Any] = read_json(suite)["reference"]
    return facts


def test_a_reference_is_launched_beside_the_cases(recorded: pytest.Pytester) -> None:
    result = run_cpu(recorded, "--perf-reference", ".", *JSON, plugins=[OBSERVED])
    result.stdout.fnmatch_lines(
        [
            "*cases launched with the reference .: fake-*",
            "*[[]4/4] fake-* passed*",
            "The reference is as fast*",
        ]
    )
    facts = reference_of(recorded)
    assert [len(canary["runs"]) for canary in facts["canaries"]] == [1, 1, 1, 1]
    assert {change["metric"] for change in facts["changes"]} >= {"tokens_per_s", "tokens_per_s_mean"}
    assert len([*recorded.path.glob(".perfsuite/runs/*/reference/fake-*/launch-1/run.json")]) == 4


def test_slower_code_is_slower_than_the_reference(recorded: pytest.Pytester) -> None:
    options = ("--perf-reference", ".", "--perf-inject=slowdown=40%", *JSON)
    result = run_cpu(recorded, *options, status=1, plugins=[OBSERVED])
    result.stdout.fnmatch_lines(["fake-llama-tiny-s64-b4-fp32-1x2 is 2?.?% slower than tonight's reference."])
    speed = read_json(recorded)["results"][0]["verdict"]["checks"][0]
    assert (speed["metric"], speed["outcome"]) == ("tokens_per_s", "regressed")
    assert speed["against_reference"]["change"] == pytest.approx(-0.286, abs=0.03)
    assert [len(canary["runs"]) for canary in reference_of(recorded)["canaries"]] == [3, 3, 3, 3]


class Slower(Rewrites):
    """Injects a slowdown into every launch, also into those of the reference, like a slower machine."""

    def launch(self, job: Job, on_progress: OnProgress = no_progress) -> Failure | None:
        request = documents.read(job.run_dir.case, CaseFile)
        documents.write(job.run_dir.case, request.replace(inject="slowdown=40%"))
        return super().launch(job, on_progress)


def test_a_slower_machine_fails_no_case(recorded: pytest.Pytester) -> None:
    plugins = [launching_with(Slower(observed=CODE))]
    result = run_cpu(recorded, "--perf-reference", ".", plugins=plugins)
    result.stdout.fnmatch_lines(
        ["4 of 4 cases are 2?.?% slower tonight, and so is the reference (2?.?%, *): the machine,"]
    )


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        ("/no/such/python", "there is no interpreter /no/such/python"),
        ("v0:uv.lock", "is not a commit of"),
    ],
)
def test_a_reference_that_is_gone_does_not_end_the_night(
    recorded: pytest.Pytester, arm: str, said: str
) -> None:
    result = run_cpu(recorded, "--perf-reference", arm, *JSON, plugins=[OBSERVED])
    result.stdout.fnmatch_lines(["*cases are judged without it: --perf-reference*", "*4 passed*"])
    facts = reference_of(recorded)
    assert said in facts["problems"][0]
    assert (facts["canaries"], facts["changes"]) == ([], [])


def test_canaries_need_a_reference(suite: pytest.Pytester) -> None:
    result = suite.runpytest("--perf-canaries=3")
    result.stderr.fnmatch_lines(["*--perf-canaries needs --perf-reference: add it*"])


def test_a_session_with_a_reference_is_not_resumed(recorded: pytest.Pytester) -> None:
    run_cpu(recorded, "--perf-reference", ".", plugins=[OBSERVED])
    result = run_cpu(recorded, "--perf-resume", plugins=[OBSERVED])
    result.stdout.fnmatch_lines(["*--perf-resume begins a new session*"])


@pytest.mark.launch
@pytest.mark.timeout(900)
def test_a_real_reference_runs_and_may_crash(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first reference is this interpreter, and the second cannot import torch."""
    for module in (reference, comparability):
        monkeypatch.setattr(module, "launch_problems", lambda run, baseline: [])
    quickly = "DDP(), steps=10, max_warmup_steps=4"
    suite.makepyfile(test_cases=CASES.replace("Fake()", quickly).replace("timeout_s=60", "timeout_s=600"))
    once = ("--perf-record-launches=1", "--perf-max-launches=1", "--perf-wait-quiet=0", *JSON)
    run_cpu(suite, *once)
    run_cpu(suite, f"--perf-reference={sys.executable}", *once)
    [canary] = reference_of(suite)["canaries"]
    [run] = read_json(suite)["results"][0]["runs"]
    assert (canary["unused"], len(canary["runs"])) == (None, 1)
    assert canary["runs"][0]["observed"]["code"] == run["observed"]["code"]

    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise RuntimeError('no torch tonight')")
    result = run_cpu(suite, f"--perf-reference=PYTHONPATH={tmp_path / 'broken'}", *once)
    result.stdout.fnmatch_lines(["The launches of ddp-*with the reference are not*"])
    [canary] = reference_of(suite)["canaries"]
    assert "ended with exit code 1" in canary["unused"]
    assert read_json(suite)["results"][0]["verdict"]["failure"] is None
