"""The plugin as another repository uses it: `pip install perfsuite`, a test file, and nothing else."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from perfsuite import documents, measure
from perfsuite.analysis import collect
from perfsuite.case import torch_build
from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.dry import guard
from perfsuite.dry.machine import pretended
from perfsuite.errors import MachineError
from perfsuite.launch import local, lock
from perfsuite.launch.local import LocalLauncher
from perfsuite.launch.lock import MachineLock
from perfsuite.launch.quiet import Neighbours
from perfsuite.node.machine import gpu_machine
from perfsuite.results.counts import Counts, merged
from perfsuite.results.outcome import Outcome, Verdict
from perfsuite.results.run import Run
from perfsuite.results.session_file import SessionFile
from perfsuite.session import against_baseline, dry
from tests.processes import arguments
from tests.samples import DISTURBED, make_run
from tests.suite import CASES, OTHER, edit_baseline, local_baseline, read_json, run_cpu, waiver, with_fake

pytestmark = pytest.mark.launch


@pytest.mark.smoke("fake")
def test_the_first_run_records_and_the_second_compares(suite: pytest.Pytester) -> None:
    first = run_cpu(suite)
    assert first.ret == 0
    first.stdout.fnmatch_lines(
        [
            "perfsuite: [[]1/1] fake-llama-tiny-s64-b4-fp32-1x2 begins",
            "perfsuite: [[]1/1] fake-llama-tiny-s64-b4-fp32-1x2 recorded after 3 launches in * s",
            "*fake-llama-tiny-s64-b4-fp32-1x2*5?,*10.0*95.4 MiB*recorded*",
            "*1 recorded*",
        ]
    )
    second = run_cpu(suite, "-v", "--perf-json", "out.json")
    assert second.ret == 0
    second.stdout.fnmatch_lines(["*fake-llama-tiny-s64-b4-fp32-1x2*+0.0%*passed*"])
    (result,) = read_json(suite)["results"]
    assert result["framework"] == "fake"
    assert result["case_id"] == "fake-llama-tiny-s64-b4-fp32-1x2"
    assert result["outcome"] == "passed"
    assert result["figures"]["tokens_per_s"] == pytest.approx(51200, rel=0.02)
    assert [len(run["step_s"]) for run in result["runs"]] == [70]
    assert len(json.loads(local_baseline(suite).read_text())["launches"]) == 3
    kept = sorted((suite.path / ".perfsuite" / "runs").glob("*/results.json"))
    assert [documents.read(file, SessionFile).results[0].outcome for file in kept] == ["recorded", "passed"]
    assert kept[1].read_text() == (suite.path / "out.json").read_text()


def test_a_slowdown_regresses_fails_and_is_explained_and_reported(recorded: pytest.Pytester) -> None:
    recorded.makeini("[pytest]\nfilterwarnings = error")
    files = ("--junitxml=j.xml", "--perf-json=out.json", "--perf-report=out")
    slow = run_cpu(recorded, "--perf-inject", "slowdown=30%", *files)
    assert slow.ret == 1
    slow.stdout.fnmatch_lines(
        [
            "*fake-llama-tiny-s64-b4-fp32-1x2: regressed*",
            "*tokens/s: 39,*, baseline 51,*: 23.0% fewer (99 % interval *),*",
            "*1 regressed*",
        ]
    )
    (case,) = ElementTree.parse(recorded.path / "j.xml").iter("testcase")
    properties = {p.get("name"): p.get("value") for p in case.iter("property")}
    assert properties["perf_outcome"] == "regressed"
    assert properties["perf_framework"] == "fake"
    assert float(str(properties["perf_tokens_per_s"])) == pytest.approx(39200, rel=0.02)
    assert properties["perf_hardware_class"] == read_json(recorded)["machine"]["hardware_class"]
    assert properties["perf_launches"] == str(len(read_json(recorded)["results"][0]["runs"]))
    change, low, high = (
        float(str(properties[f"perf_tokens_per_s_{name}"]))
        for name in ("change", "change_low", "change_high")
    )
    assert low < change < high
    assert change == pytest.approx(1 / 1.3 - 1, abs=0.015)
    failure = case.find("failure")
    assert failure is not None
    assert "% fewer (99 % interval" in str(failure.text) + str(failure.get("message"))
    assert read_json(recorded)["results"][0]["verdict"]["checks"][0]["outcome"] == "regressed"
    page, summary = (recorded.path / "out" / name for name in ("index.html", "summary.md"))
    assert "<h1>1 regressed</h1>" in page.read_text()
    assert summary.read_text().startswith("## perfsuite: 1 regressed")


def test_an_arm_is_compared_with_this_environment_and_no_baseline_is_written(suite: pytest.Pytester) -> None:
    same = run_cpu(suite, "--perf-against=.", "--perf-json=out.json", "--perf-report=out")
    assert same.ret == 0
    same.stdout.fnmatch_lines(
        [
            "*tokens/s A *B *B vs A (99 %)*memory B vs A *pairs *verdict*",
            "fake-llama-tiny-s64-b4-fp32-1x2",
            "*0.0% (*3 of 3 *passed*",
            "*fake-llama-tiny-s64-b4-fp32-1x2: passed after 3 pairs of launches*",
            "*tokens/s: 51,*, arm A 51,*: 0.0% *",
        ]
    )
    told = read_json(suite)
    assert [arm["text"] for arm in told["arms"]] == [".", "."]
    assert len(told["results"][0]["before"]) == len(told["results"][0]["runs"]) == 3
    assert "B vs A" in (suite.path / "out" / "summary.md").read_text()
    assert {path.name for path in (suite.path / ".perfsuite").iterdir()} == {"compare"}
    slow = run_cpu(suite, "--perf-against=.", "--perf-inject=slowdown=30%", "--perf-max-pairs=5")
    assert slow.ret == 1
    slow.stdout.fnmatch_lines(["*23.0% fewer*", "*1 regressed*"])


def test_a_report_tells_what_was_skipped(suite: pytest.Pytester) -> None:
    suite.runpytest("-m", "a100", "--perf-report=out")
    assert "1 skipped" in (suite.path / "out" / "index.html").read_text()


def test_an_improvement_passes_and_is_said_or_fails_on_request(recorded: pytest.Pytester) -> None:
    edit_baseline(recorded, tokens_per_s=0.7)
    better = run_cpu(recorded, "-v")
    assert better.ret == 0
    better.stdout.fnmatch_lines(["*IMPROVED*", "*+42.9%*improved*", "*42.9% more*"])
    assert run_cpu(recorded, "--perf-strict=improved").ret == 1


def test_what_is_not_known_is_inconclusive_and_fails_on_request(recorded: pytest.Pytester) -> None:
    file = local_baseline(recorded)
    content = json.loads(file.read_text())
    accepted = {"by": "somebody", "date": "2026-01-01", "commit": None}
    file.write_text(json.dumps(content | {"launches": content["launches"][:1], "accepted": accepted}))
    result = run_cpu(recorded, "-v")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["*INCONCLUSIVE*", "*the noise between launches is unknown*", "*1 inconclusive*"]
    )
    assert run_cpu(recorded, "--perf-strict=inconclusive").ret == 1


def test_launches_are_bounded_from_below_and_above(suite: pytest.Pytester) -> None:
    run_cpu(suite, "--perf-min-launches=5")
    assert len(json.loads(local_baseline(suite).read_text())["launches"]) == 5
    run_cpu(suite, "--perf-min-launches=4", "--perf-json=out.json")
    assert len(read_json(suite)["results"][0]["runs"]) == 4


def test_a_quick_look_is_one_launch_and_no_regression(suite: pytest.Pytester) -> None:
    run_cpu(suite, "--perf-max-launches=1").stdout.fnmatch_lines(["*recorded in*"])
    run_cpu(suite)  # three launches, which tell their noise
    look = run_cpu(suite, "--perf-max-launches=1", "--perf-inject=slowdown=30%")
    assert look.ret == 0
    look.stdout.fnmatch_lines(
        ["*: inconclusive after 1 launch*", "*23.0% fewer*", "*inconclusive; 3 launches or more*"]
    )


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("crash", "*crash: RuntimeError: injected crash*"),
        ("nan", "*loss: the loss is nan at step 69*"),
        ("missing-metric", "*the baseline has it, this run does not*"),
        ("missing-rank", "*missing_report: no report from rank 1 of 2*"),
    ],
)
def test_a_broken_run_fails(recorded: pytest.Pytester, fault: str, said: str) -> None:
    broken = run_cpu(recorded, "--perf-inject", fault)
    assert broken.ret == 1
    broken.stdout.fnmatch_lines([said, "*1 failed*"])


@pytest.mark.fault("baseline is missing")
@pytest.mark.parametrize("option", ["--perf-inject=slowdown=30%", "--perf-missing-baseline=fail"])
def test_what_needs_a_baseline_fails_without_one(suite: pytest.Pytester, option: str) -> None:
    result = run_cpu(suite, option)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no baseline on cpu-*"])
    assert option.partition("=")[0] in str(result.stdout)
    assert not list(suite.path.glob(".perfsuite/baselines/*/*"))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"memory_mb": 100', '"memory_mb": 101', "*holds the baseline of fake-memory_mb101-*"),
        ("{", "", "{file}: not JSON*"),
    ],
    ids=["unlike settings", "corrupt"],
)
def test_a_baseline_that_is_none_of_this_case_is_said(
    recorded: pytest.Pytester, before: str, after: str, said: str
) -> None:
    local = local_baseline(recorded)
    local.write_text(local.read_text().replace(before, after))
    result = run_cpu(recorded)
    assert result.ret == 1
    result.stdout.fnmatch_lines([said.format(file=local.relative_to(recorded.path))])


def test_a_reviewed_baseline_comes_before_the_local_one(recorded: pytest.Pytester) -> None:
    local = local_baseline(recorded)
    reviewed = recorded.path / "baselines" / local.parent.name / local.name
    reviewed.parent.mkdir(parents=True)
    content = json.loads(local.read_text())
    for launch in content["launches"]:
        launch["figures"]["tokens_per_s"] *= 2
    reviewed.write_text(json.dumps(content))
    result = run_cpu(recorded)
    assert result.ret == 1
    result.stdout.fnmatch_lines([f"  baseline: baselines/{local.parent.name}/{local.name}"])


def test_what_this_machine_cannot_run_is_skipped_with_the_reason_and_is_not_a_pass(
    suite: pytest.Pytester,
) -> None:
    result = suite.runpytest("-m", "a100", "-rs", "--perf-json", "out.json")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["*nothing was measured*", "*it is meant for a100-80gb, this machine is cpu-*", "*1 skipped*"]
    )
    assert "meant for a100-80gb" in read_json(suite)["skipped"][0]["reason"]


def test_xdist_is_refused_with_the_reason(suite: pytest.Pytester) -> None:
    result = run_cpu(suite, "-n", "1", "-p", "no:cacheprovider")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*perfsuite does not run under pytest-xdist*Run without -n*"])


@pytest.mark.parametrize(
    ("mark", "chosen"), [("skip", ""), ("skip", "h100"), ("xfail", "h100"), ("skip", "not cpu")]
)
def test_a_test_that_lost_its_cases_fails_whatever_hardware_is_selected(
    suite: pytest.Pytester, mark: str, chosen: str
) -> None:
    suite.makepyfile(test_cases=CASES.replace("[FAKE, A100]", "[]"))
    suite.makeini(f"[pytest]\nempty_parameter_set_mark = {mark}\n")
    result = suite.runpytest("-m", chosen)
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no case: the parameters of this test are empty*"])


@pytest.mark.parametrize("arguments", [("-m", "not slow"), ("-m", "h100", "-k", "other")])
def test_who_deselects_a_test_by_its_own_mark_or_name_does_not_get_it_back(
    suite: pytest.Pytester, arguments: tuple[str, ...]
) -> None:
    marked = CASES.replace("[FAKE, A100]", "[]").replace(
        "@pytest.mark.param", "@pytest.mark.slow\n    @pytest.mark.param"
    )
    suite.makepyfile(test_cases=marked if "slow" in arguments[1] else CASES.replace("[FAKE, A100]", "[]"))
    suite.makeini("[pytest]\nmarkers = slow\n")
    assert suite.runpytest(*arguments).ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_an_error_of_another_plugin_at_the_end_loses_no_result(suite: pytest.Pytester) -> None:
    """pytest-benchmark opens its file there, in a directory that may be missing."""
    run_cpu(suite, "--benchmark-json=none/b.json", "--perf-json=out.json", "--perf-report=out")
    content = read_json(suite)
    assert content["status"] == "complete"
    assert [result["verdict"]["outcome"] for result in content["results"]] == ["recorded"]
    assert (suite.path / "out" / "index.html").exists()


def test_a_benchmark_of_others_needs_no_machine_that_could_be_measured_on(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def machine(self: object, shared: Path) -> None:
        raise MachineError("GPU 0 is split by MIG")

    monkeypatch.setattr(LocalLauncher, "machine", machine)
    suite.makepyfile(test_cases="def test_other(benchmark):\n    benchmark(len, 'abc')\n")
    result = suite.runpytest("--benchmark-json=b.json")
    assert result.ret == 0
    told = json.loads((suite.path / "b.json").read_text())
    assert "hardware" not in told["machine_info"]
    assert "frameworks" in told["machine_info"]


def test_one_case_in_two_tests_is_measured_twice(suite: pytest.Pytester) -> None:
    """The second launch dies; the reports of the first must not be taken for its own."""
    suite.makepyfile(
        test_cases=with_fake("""
        import dataclasses
        from perfsuite.plugin.collection import SESSION
        @pytest.mark.parametrize("case", [FAKE])
        def test_one(bench, case):
            bench(FAKE)
        @pytest.mark.parametrize("case", [FAKE.replace(micro_batch=8)])
        def test_two(bench, case, request):
            session = request.config.stash[SESSION]
            session.setup.options = dataclasses.replace(session.setup.options, inject="exit")
            bench(FAKE)
        """)
    )
    result = suite.runpytest()
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*crash: exit code 13*", "*1 failed*1 recorded*"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("pass", "*asked for bench and never called it: nothing was measured*"),
        ("bench(case); bench(case)", "*bench measures one case per test: parametrize*"),
    ],
)
def test_bench_is_called_exactly_once(suite: pytest.Pytester, body: str, said: str) -> None:
    suite.makepyfile(test_cases=CASES.replace(", A100", "").replace("bench(case)", body))
    result = suite.runpytest()
    assert result.ret == 1
    result.stdout.fnmatch_lines([said])


@pytest.mark.parametrize(("body", "outcome"), [("pytest.skip('not today')", "skipped"), ("1 / 0", "failed")])
def test_a_test_that_ends_before_it_measures_says_only_that(
    suite: pytest.Pytester, body: str, outcome: str
) -> None:
    suite.makepyfile(test_cases=CASES.replace(", A100", "").replace("bench(case)", body))
    result = suite.runpytest("-W", "ignore")
    result.assert_outcomes(**{outcome: 1})
    assert result.ret == 1, "nothing was measured"


def test_another_case_than_that_of_the_test_is_checked_too(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_cases=CASES.replace("bench(case)", "bench(case.replace(hardware='h100'))").replace(", A100", "")
    )
    result = run_cpu(suite, "-rs")
    result.stdout.fnmatch_lines(["*SKIPPED*it is meant for h100, this machine is cpu-*"])
    suite.makepyfile(
        test_cases=CASES.replace("A100]", "FAKE.replace(micro_batch=8)]").replace(
            "bench(case)", "bench(FAKE.replace(may_run_out_of_memory=case.micro_batch == 8))"
        )
    )
    result = suite.runpytest()
    result.stdout.fnmatch_lines(
        ["*two different cases have the id fake-*differ in may_run_out_of_memory*", "*1 failed, 1 recorded*"]
    )


def test_a_json_file_that_cannot_be_written_costs_no_figures(suite: pytest.Pytester) -> None:
    (suite.path / "file").write_text("")
    result = run_cpu(suite, "--perf-json", "file/out.json")
    assert result.ret == pytest.ExitCode.INTERNAL_ERROR
    result.stdout.fnmatch_lines(
        ["*95.4 MiB*recorded*", "*the results were not written*", "*cannot write *out.json*"]
    )


@pytest.fixture
def gpus_and_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = gpu_machine(["NVIDIA H200"], count=2, memory_bytes=2**37, driver=None)
    monkeypatch.setattr(local, "detect", lambda: gpus)
    monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.13.0+cpu", "cuda": None})


@pytest.mark.usefixtures("gpus_and_a_torch_without_cuda")
def test_a_torch_that_cannot_use_the_gpus_is_one_error_before_anything_is_launched(
    suite: pytest.Pytester,
) -> None:
    more = "[FAKE, *(FAKE.replace(framework=DDP(), hardware='gpu', micro_batch=b) for b in (1, 2, 3))]"
    suite.makepyfile(test_cases=CASES.replace("[FAKE, A100]", more))
    result = suite.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = [line for line in result.errlines if "torch" in line]
    assert len(said) == 1
    assert said[0].startswith("ERROR: torch 2.13.0+cpu is built without CUDA and cannot use the GPUs of this")
    assert not (suite.path / ".perfsuite").exists()
    assert run_cpu(suite).ret == 0


@pytest.mark.usefixtures("gpus_and_a_torch_without_cuda")
def test_a_torch_that_cannot_use_the_gpus_fails_a_case_that_a_test_makes_itself(
    suite: pytest.Pytester,
) -> None:
    inside = OTHER.replace("bench(case)", "bench(FAKE.replace(framework=DDP(), hardware='gpu'))")
    suite.makepyfile(test_cases=CASES.replace("[FAKE, A100]", "[A100]") + inside)
    result = suite.runpytest("--perf-json=out.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["torch 2.13.0+cpu is built without CUDA and cannot use the GPUs *"])
    (kept,) = read_json(suite)["results"]
    assert (kept["verdict"]["failure"], kept["runs"]) == ("error", [])


def test_a_gpu_that_cannot_be_read_is_one_error_without_a_traceback(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> Machine:
        raise MachineError("GPU 3 (00000000:5B:00.0) cannot be read: GPU is lost")

    monkeypatch.setattr(local, "detect", lost)
    result = run_cpu(suite, "--perf-json=out.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: GPU 3 (00000000:5B:00.0) cannot be read: GPU is lost"])
    assert "Traceback" not in str(result.stdout) + str(result.stderr)
    assert "INTERNALERROR" not in str(result.stdout) + str(result.stderr)


@pytest.fixture
def busy(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Others use the machine in every launch, and never stop."""

    def beside_others(*args: Any, **options: Any) -> Run:
        return collect.collect(*args, **options).replace(health=DISTURBED)

    monkeypatch.setattr(measure, "collect", beside_others)
    monkeypatch.setattr(Neighbours, "wait", lambda *args: False)
    return suite


@pytest.mark.fault("others use the machine")
def test_a_machine_that_others_use_measures_nothing_and_says_what_to_do(busy: pytest.Pytester) -> None:
    result = run_cpu(busy)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "perfsuite: launch 1 of fake-* is no evidence: other processes used 60% of *; seen: *",
            "perfsuite: [[]1/1] fake-* unhealthy in * s",
            "*unhealthy (shared)",
            "*nothing was judged: what was measured is no evidence*",
            "Others used the machine. --perf-wait-quiet=SECONDS waits longer*--perf-allow-shared shows*",
        ]
    )
    assert not list(busy.path.glob(".perfsuite/baselines/*/*"))


@pytest.fixture
def timed(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Four cases, each of which takes 100 s by a clock of its own; the third regresses."""
    clock = [0.0]
    monkeypatch.setattr("perfsuite.session.plan.monotonic", lambda: clock[0])

    def measured(case: Case, *args: Any, runs: list[Run]) -> tuple[list[Run], Verdict]:
        args[-1].on_launch(case, 1)
        runs.append(make_run(case=case, duration_s=100))
        clock[0] += 100
        return runs, Verdict(outcome="regressed" if case.micro_batch == 3 else "passed", launches=1)

    monkeypatch.setattr(against_baseline, "measure", measured)
    four = "[FAKE.replace(micro_batch=number) for number in (1, 2, 3, 4)]"
    suite.makepyfile(test_cases=CASES.replace("[FAKE, A100]", four))
    return suite


def test_a_budget_takes_what_failed_and_what_was_not_measured_for_longest_and_tells_the_rest(
    timed: pytest.Pytester,
) -> None:
    def measured() -> list[int]:
        return [each["runs"][0]["case"]["micro_batch"] for each in read_json(timed)["results"]]

    first = run_cpu(timed, "--perf-budget=150s", "--perf-json=out.json", "--perf-report=out")
    first.stdout.fnmatch_lines(
        ["*perfsuite: the budget is used up*", "2 cases not reached within*", "  fake-*: too little is left*"]
    )
    began = measured()
    assert len(began) == 2, "of the second nobody knew what it costs"
    summary = (timed.path / "out" / "summary.md").read_text()
    assert "2 not reached" in summary
    assert "launches 3.3 min" in summary
    run_cpu(timed, "--perf-budget=300s", "--perf-json=out.json")
    again = measured()
    assert ({1, 2, 3, 4} - {*began}) <= {*again}
    assert len(again) == 3
    assert again[0] == 3 if 3 in began else again[2] in began
    last = run_cpu(timed, "--perf-budget=250s", "--perf-json=out.json", "--perf-min-judged=60%")
    assert measured()[0] == 3, "what regressed comes first"
    last.stdout.fnmatch_lines(["*2 of 4 cases judged, --perf-min-judged asks for 60%: not a pass"])
    none = run_cpu(timed, "--perf-budget=99s")
    assert none.ret == pytest.ExitCode.TESTS_FAILED
    none.stdout.fnmatch_lines(["*: never within 99 s, as it takes about 1.7 min: give 2min or more"])


def test_jobs_share_the_cases(timed: pytest.Pytester) -> None:
    found = []
    for number in (1, 2, 3):
        run_cpu(timed, f"--perf-shard={number}/3", "--perf-json=out.json")
        found.append([each["runs"][0]["case"]["micro_batch"] for each in read_json(timed)["results"]])
    assert sorted(itertools.chain(*found)) == [1, 2, 3, 4]
    assert sorted(map(len, found)) == [1, 1, 2]
    alone = run_cpu(timed, "--perf-shard=5/5", "--perf-json=out.json")
    alone.stdout.fnmatch_lines(["*4 deselected*"])
    assert alone.ret == 0, "a job too many is no error"
    assert run_cpu(timed, "--perf-shard=1/2", "-k", "nothing").ret == pytest.ExitCode.NO_TESTS_COLLECTED


def find(monkeypatch: pytest.MonkeyPatch, *outcomes: Outcome) -> None:
    """Stand in for launches of cases whose micro-batches are 1, 2, ...: these are their verdicts."""

    def measured(case: Case, *args: Any, runs: list[Run]) -> tuple[list[Run], Verdict]:
        args[-1].on_launch(case, 1)
        runs.append(make_run(case=case))
        return runs, Verdict(outcome=outcomes[case.micro_batch - 1], launches=1)

    monkeypatch.setattr(against_baseline, "measure", measured)


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ((), 0, "1 of 3 cases judged"),
        (("--perf-min-judged=33%",), 0, "1 of 3 cases judged"),
        (("--perf-min-judged=34%",), 1, "1 of 3 cases judged, --perf-min-judged asks for 34%: not a pass"),
    ],
)
def test_how_many_cases_were_judged_is_the_last_line_and_too_few_fail(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], status: int, said: str
) -> None:
    find(monkeypatch, "inconclusive", "unhealthy", "passed")
    three = "[FAKE.replace(micro_batch=number) for number in (1, 2, 3)]"
    suite.makepyfile(test_cases=CASES.replace("[FAKE, A100]", three))
    result = run_cpu(suite, *given)
    assert result.ret == status
    assert result.outlines[-2] == said


def test_that_nothing_was_counted_on_request_is_said_once(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    find(monkeypatch, "passed", "passed")
    two = "[FAKE.replace(micro_batch=number) for number in (1, 2)]"
    suite.makepyfile(test_cases=CASES.replace("[FAKE, A100]", two))
    told = run_cpu(suite, "--perf-no-counts").outlines
    assert (
        sum("--perf-no-counts: what a step does was neither counted nor judged" in line for line in told) == 1
    )
    assert not any("not counted" in line for line in told)


def test_figures_of_a_shared_machine_are_shown_on_request(busy: pytest.Pytester) -> None:
    result = run_cpu(busy, "--perf-allow-shared", "--perf-json=out.json")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "*fake-llama-tiny-s64-b4-fp32-1x2*5?,*unhealthy (shared)",
            "--perf-allow-shared: 1 case measured while others used the machine: figures are shown, "
            "and counts alone are judged and recorded",
            "*1 unhealthy*",
        ]
    )
    result.stdout.no_fnmatch_line("*what was measured is no evidence*")
    assert read_json(busy)["results"][0]["shared"] is True
    assert not list(busy.path.glob(".perfsuite/baselines/*/*"))


@pytest.fixture
def held() -> Iterator[MachineLock]:
    """Let go whatever a test says: the next session of this process would wait for it without end."""
    machine_lock = MachineLock()
    machine_lock.take(print)
    yield machine_lock
    machine_lock.release()


@pytest.mark.fault("another session measures")
def test_two_sessions_measure_one_after_the_other(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, held: MachineLock
) -> None:
    assert suite.runpytest("--collect-only").ret == 0
    assert run_cpu(suite, "--perf-missing-baseline=fail").ret == 1, "it launches nothing"

    def written(descriptor: int, length: int, offset: int) -> bytes:
        held.release()  # it ends just now
        return b"pid 7 of somebody"

    monkeypatch.setattr(os, "pread", written)
    monkeypatch.setattr(lock, "POLL_S", 0)
    queued = run_cpu(suite)
    assert queued.ret == 0
    queued.stdout.fnmatch_lines(
        [
            "perfsuite: waiting for another session on this machine: pid 7 of somebody",
            "perfsuite: [[]1/1] fake-* begins",
        ]
    )
    held.take(print)  # the session let go


@pytest.mark.parametrize("on_ci", [False, True])
def test_a_failure_prints_its_text_once(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, on_ci: bool
) -> None:
    """On CI, pytest repeats the whole text in its own short summary; ours is what stands above it."""
    monkeypatch.setenv("CI", "true") if on_ci else monkeypatch.delenv("CI", raising=False)
    suite.makepyfile(
        test_cases=CASES.replace("[FAKE, A100]", "[FAKE.replace(framework=Script(path='none.py'))]")
    )
    result = suite.runpytest()
    assert result.ret == 1
    above, summary = str(result.stdout).split("short test summary info")
    assert above.count("No such file or directory") == 1
    assert summary.count("No such file or directory") <= 1
    result.stdout.no_fnmatch_line("*During handling of the above exception*")


def test_what_passed_is_one_line_and_all_that_is_blind_another(recorded: pytest.Pytester) -> None:
    content = json.loads(local_baseline(recorded).read_text())
    for launch, factor in zip(content["launches"], (0.97, 1.0, 1.03), strict=True):
        launch["figures"]["peak_memory_bytes"] *= factor
    local_baseline(recorded).write_text(json.dumps(content))
    short = run_cpu(recorded, "--perf-min-launches=3", "--perf-max-launches=3")
    short.stdout.fnmatch_lines(["blind: in 1 of 1 case noise hides changes as large as the tolerance*"])
    short.stdout.no_fnmatch_line("*: passed after*")
    long = run_cpu(recorded, "-v", "--perf-min-launches=3", "--perf-max-launches=3")
    long.stdout.fnmatch_lines(["*: passed after*", "*peak memory: *", "*blind: this*"])
    long.stdout.no_fnmatch_line("blind: in 1 of 1*")


@pytest.mark.fault("store is read-only")
def test_a_store_that_cannot_be_written_is_said(suite: pytest.Pytester) -> None:
    (suite.path / "file").write_text("")
    result = run_cpu(suite, "--perf-store", "file/store")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*cannot write *file/store/*: Not a directory*"])


@pytest.mark.fault("anything else fails in pytest's process")
def test_an_error_that_nobody_expected_stands_in_every_report(suite: pytest.Pytester) -> None:
    """One before the launch, one in it; a third case is measured."""
    suite.makepyfile(
        test_cases=with_fake("""
        from perfsuite.session import against_baseline, dry
        real = against_baseline.measure
        def measure(case, *args, **options):
            return real(case, *args, **options) if case.micro_batch != 2 else {}["in a launch"]
        against_baseline.measure = measure
        def unsupported(self, case, machine):
            return None if case.micro_batch != 3 else {}["before"]
        Fake.unsupported = unsupported
        @pytest.mark.parametrize("case", [FAKE.replace(micro_batch=batch) for batch in (2, 3, 4)])
        def test_it(bench, case):
            bench(case)
        """)
    )
    result = suite.runpytest_subprocess(
        "--perf-json=out.json", "--perf-report=out", "--perf-record-launches=1"
    )
    assert result.ret == 1
    content = read_json(suite)
    found = [(each["outcome"], each["verdict"]["failure"]) for each in content["results"]]
    assert found == [("failed", "error"), ("failed", "error"), ("recorded", None)]
    reasons = [each["verdict"]["reasons"][0] for each in content["results"][:2]]
    for batch, words, reason in zip((2, 3), ("in a launch", "before"), reasons, strict=True):
        case_id = f"fake-llama-tiny-s64-b{batch}-fp32-1x2"
        assert f"KeyError: '{words}' (its traceback: " in reason
        assert (
            f'{{}}["{words}"]'
            in next(suite.path.glob(f".perfsuite/runs/*/{case_id}/traceback.txt")).read_text()
        )
        for name in ("index.html", "summary.md"):
            assert case_id in (suite.path / "out" / name).read_text()
        result.stdout.fnmatch_lines([f"{case_id} *failed"])


@pytest.mark.fault("Ctrl-C")
def test_ctrl_c_keeps_what_was_measured_and_leaves_nothing(suite: pytest.Pytester) -> None:
    """A second case hangs; the interrupt comes while it does."""
    suite.makepyfile(
        test_cases=with_fake("""
        import os, signal, threading, time
        from pathlib import Path
        from dataclasses import replace
        from perfsuite.session import against_baseline, dry
        @pytest.mark.parametrize("case", [FAKE])
        def test_one(bench, case):
            bench(case)
        @pytest.mark.parametrize("case", [FAKE.replace(micro_batch=8)])
        def test_two(bench, case, monkeypatch):
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
            def measure(*args, **options):
                *others, how = args
                return real(*others, replace(how, inject="hang"), **options)
            real = against_baseline.measure
            monkeypatch.setattr(against_baseline, "measure", measure)
            def interrupt():
                while not list(Path(".perfsuite").glob("runs/*/fake-*b8*/launch-1/rank-1.log")):
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGINT)
            threading.Thread(target=interrupt, daemon=True).start()
            bench(case)
        """)
    )
    result = suite.runpytest_subprocess("-W", "error", "--perf-json=out.json", "--perf-report=out")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    content = read_json(suite)
    assert content["status"] == "interrupted"
    assert [r["outcome"] for r in content["results"]] == ["recorded"]
    assert content["interrupted_case"] == "fake-llama-tiny-s64-b8-fp32-1x2"
    for name in ("index.html", "summary.md"):
        assert "fake-llama-tiny-s64-b8-fp32-1x2 was not judged" in (suite.path / "out" / name).read_text()
    result.stdout.fnmatch_lines(["*fake-llama-tiny-s64-b4*recorded*"])
    assert not [p for p in psutil.process_iter() if str(suite.path) in " ".join(arguments(p))]


@pytest.mark.parametrize("launch", [1, 2])
def test_launches_before_a_ctrl_c_in_the_first_case_are_kept(suite: pytest.Pytester, launch: int) -> None:
    suite.makepyfile(
        test_cases=with_fake(f"""
        import os, signal, threading, time
        from pathlib import Path
        @pytest.mark.parametrize("case", [FAKE.replace(framework=Fake(step_ms=5))])
        def test_one(bench, case):
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
            def interrupt():
                while not list(Path(".perfsuite").glob("runs/*/*/launch-{launch}/rank-1.log")):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGINT)
            threading.Thread(target=interrupt, daemon=True).start()
            bench(case)
        """)
    )
    result = suite.runpytest_subprocess("--perf-record-launches=50")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines([f"*perfsuite: nothing was {'judged' if launch > 1 else '*'} ==*"])
    (file,) = suite.path.glob(".perfsuite/runs/*/results.json")
    content = json.loads(file.read_text())
    assert (content["status"], content["results"]) == ("interrupted", [])
    assert content["interrupted_case"] == "fake-step_ms5-llama-tiny-s64-b4-fp32-1x2"
    assert len(content["interrupted_launches"]) >= launch - 1


def test_a_first_look_takes_one_launch_and_what_it_left_is_recorded_anew(suite: pytest.Pytester) -> None:
    """One launch tells no noise: every later session would be inconclusive."""
    run_cpu(suite, "--perf-record-launches=1")
    assert len(json.loads(local_baseline(suite).read_text())["launches"]) == 1
    run_cpu(suite).stdout.fnmatch_lines(["*1 recorded*"])
    assert len(json.loads(local_baseline(suite).read_text())["launches"]) == 3
    run_cpu(suite, "--perf-record-launches=1").stdout.fnmatch_lines(["*1 passed*"])


def test_a_known_issue_is_still_there_or_gone(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_cases=CASES.replace(
            "[FAKE, A100]",
            '[FAKE.replace(known_issue={"url": "https://example.org/209", "failure": "crash"})]',
        )
    )
    recorded = run_cpu(suite)
    recorded.stdout.fnmatch_lines(["*known issue gone: https://example.org/209: take known_issue from*"])
    assert recorded.ret == 0
    crashing = run_cpu(suite, "-rx", "--perf-inject", "crash", "--perf-json=out.json")
    crashing.stdout.fnmatch_lines(["*XFAIL*known issue: crash: RuntimeError: injected crash*", "*1 xfailed*"])
    assert crashing.ret == 0
    assert read_json(suite)["results"][0]["excused"] == "known issue"


def test_a_waived_regression_passes_and_is_shown_as_such_everywhere(recorded: pytest.Pytester) -> None:
    waivers = recorded.path / "perf-waivers.toml"
    waivers.write_text(waiver(tolerated="40%", metric="tokens*"))
    files = ("--junitxml=j.xml", "--perf-json=out.json", "--perf-report=out")
    slow = run_cpu(recorded, "-rx", "--perf-inject", "slowdown=30%", *files)
    assert slow.ret == 0
    told = "waived: tokens/s -2*%: 40% tolerated until 2999-12-31, @me, https://example.org/1"
    slow.stdout.fnmatch_lines(
        [f"*fake-llama-tiny-s64-b4-fp32-1x2: {told}*", "*XFAIL*waived: *", "*1 xfailed*"]
    )
    (result,) = read_json(recorded)["results"]
    assert (result["outcome"], result["excused"]) == ("regressed", "waived")
    (case,) = ElementTree.parse(recorded.path / "j.xml").iter("testcase")
    skipped = case.find("skipped")
    assert skipped is not None
    assert "40% tolerated until 2999-12-31, @me" in str(skipped.get("message"))
    page, summary = ((recorded.path / "out" / name).read_text() for name in ("index.html", "summary.md"))
    assert "<h1>1 waived" in page
    assert "40% tolerated until 2999-12-31, @me, https://example.org/1" in page
    assert summary.startswith("## perfsuite: 1 waived")
    assert "40% tolerated until 2999-12-31, &#64;me, https://example.org/1" in summary

    waivers.write_text(waiver(tolerated="10%", metric="tokens*"))
    beyond = run_cpu(recorded, "--perf-inject", "slowdown=30%", "--perf-report=out")
    assert beyond.ret == 1
    beyond.stdout.fnmatch_lines(["*not waived: tokens/s -2*%: beyond the waiver of tokens* for fake-*: 10%*"])
    assert "not waived: tokens/s" in (recorded.path / "out" / "summary.md").read_text()

    waivers.write_text(waiver(tolerated="10%", case="fsdp-*"))
    run_cpu(recorded).stdout.fnmatch_lines(
        ["note: perf-waivers.toml: *fsdp-?* matches none of the 2 cases here"]
    )
    waivers.write_text("[[waiver]]")
    bad = run_cpu(recorded)
    assert bad.ret == pytest.ExitCode.USAGE_ERROR
    bad.stderr.fnmatch_lines(["ERROR: *perf-waivers.toml: waiver.0.case: Field required*"])


def test_in_shadow_mode_nothing_fails_and_the_end_says_what_would_have(recorded: pytest.Pytester) -> None:
    recorded.makeini("[pytest]\nperf_shadow = true")
    files = ("--junitxml=j.xml", "--perf-json=out.json", "--perf-report=out")
    slow = run_cpu(recorded, "-rx", "--perf-inject", "slowdown=30%", *files)
    assert slow.ret == 0
    slow.stdout.fnmatch_lines(
        [
            "*fake-llama-tiny-s64-b4-fp32-1x2*regressed (shadow)*",
            "*fake-llama-tiny-s64-b4-fp32-1x2: regressed (shadow) after*",
            "--perf-shadow: 1 of 1 case would have failed",
            "XFAIL * regressed (shadow): tokens/s -2*",
            "*1 xfailed*",
        ]
    )
    (result,) = read_json(recorded)["results"]
    assert (result["outcome"], result["excused"], result["shadow"]) == ("regressed", None, True)
    assert read_json(recorded)["conditions"]["options"]["--perf-shadow"] == "yes"
    (case,) = ElementTree.parse(recorded.path / "j.xml").iter("testcase")
    assert case.find("failure") is None
    skipped = case.find("skipped")
    assert skipped is not None
    assert str(skipped.get("message")).startswith("regressed (shadow)")
    page, summary = ((recorded.path / "out" / name).read_text() for name in ("index.html", "summary.md"))
    assert "<h1>1 regressed (1 shadow" in page  # and maybe blind, on a noisy machine
    assert "regressed (shadow)" in summary

    good = run_cpu(recorded)
    assert good.ret == 0
    good.stdout.fnmatch_lines(["--perf-shadow: 0 of 1 case would have failed", "*1 passed*"])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--perf-inject=crash", "XFAIL * failed (shadow): crash*"),
        ("--perf-missing-baseline=fail", "XFAIL * failed (shadow): no baseline*"),
        ("--perf-min-judged=100%", "perfsuite: too few*"),
    ],
)
def test_in_shadow_mode_a_failed_case_and_a_session_without_verdicts_fail_nothing(
    suite: pytest.Pytester, option: str, said: str
) -> None:
    if "crash" in option:
        run_cpu(suite)
    first = run_cpu(suite, "-rx", "--perf-shadow", option)
    assert first.ret == 0
    first.stdout.fnmatch_lines([f"*{said}"])
    would = 0 if "judged" in option else 1
    first.stdout.fnmatch_lines([f"--perf-shadow: {would} of 1 case would have failed"])


def test_in_shadow_mode_what_cannot_be_measured_fails_nothing_and_a_wrong_test_does(
    recorded: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, said in ((MachineError("no machine"), "no machine"), (ValueError("bug"), "ValueError: bug*")):

        def broken(*args: object, error: Exception = error, **options: object) -> Any:
            raise error

        monkeypatch.setattr(against_baseline, "measure", broken)
        shadow = run_cpu(recorded, "-rx", "--perf-shadow")
        assert shadow.ret == 0
        shadow.stdout.fnmatch_lines(
            ["--perf-shadow: 1 of 1 case would have failed", f"XFAIL * failed (shadow): {said}"]
        )
    recorded.makepyfile(test_cases=CASES.replace("bench(case)", "assert not case"))
    wrong = run_cpu(recorded, "--perf-shadow")
    assert wrong.ret == 1
    wrong.stdout.fnmatch_lines(["*1 failed*"])


@pytest.mark.smoke
def test_another_repository_needs_only_the_package(tmp_path: Path) -> None:
    """A fresh interpreter, another directory, no conftest: the entry point alone brings the fixture."""
    (tmp_path / "test_theirs.py").write_text(
        "import perfsuite, pytest\n"
        "CASE = perfsuite.Case(model='gpt2-tiny', framework='fake', sequence_length=32, micro_batch=1,\n"
        "    topology={'processes_per_node': 1}, hardware='cpu')\n"
        "@pytest.mark.parametrize('case', [CASE, CASE.replace(micro_batch=2)])\n"
        "def test_theirs(bench, case):\n"
        "    assert bench(case).verdict.outcome == 'recorded'\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "cpu", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 recorded" in done.stdout


DRY_CASES = CASES.replace('hardware="cpu"', 'hardware="h100"').replace("framework=Fake()", "framework=DDP()")


@pytest.fixture
def dry_flops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for the processes of dry runs: what the next one counts."""
    flops = [100]

    def dry_run(case: Case, directory: Path, **options: Any) -> Run:
        counts = merged({0: Counts(flops={"forward": flops[-1]})})
        machine = pretended(case)[0]
        return make_run(case=case, machine=machine, dry=True, step_s=(), window=(0, 0), counts=counts)

    monkeypatch.setattr(dry, "dry_run", dry_run)
    monkeypatch.setattr(guard, "why_not", lambda: None)
    return flops


def test_dry_runs_are_judged_by_counts_whatever_this_machine_is(
    suite: pytest.Pytester, dry_flops: list[int]
) -> None:
    suite.makepyfile(test_cases=DRY_CASES)
    first = suite.runpytest("--perf-dry")
    assert first.ret == 0
    first.stdout.fnmatch_lines(["*ddp-llama-tiny-s64-b4-fp32-1x2*recorded*", "*2 recorded*"])
    folders = {file.parent.name for file in suite.path.glob(".perfsuite/baselines/counts/*/*.json")}
    assert folders == {"dry-sm80", "dry-sm90"}
    second = suite.runpytest("--perf-dry", "-m", "h100", "--perf-json", "out.json")
    assert second.ret == 0
    second.stdout.fnmatch_lines(["*ddp-llama-tiny-s64-b4-fp32-1x2*passed*"])
    (result,) = read_json(suite)["results"]
    assert result["runs"][0]["dry"] is True
    dry_flops.append(200)
    worse = suite.runpytest("--perf-dry", "-m", "h100")
    assert worse.ret == 1
    worse.stdout.fnmatch_lines(["*ddp-llama-tiny-s64-b4-fp32-1x2: regressed*", "*forward*100*200*"])


def test_a_dry_run_needs_no_machine_that_could_be_measured_on(
    suite: pytest.Pytester, dry_flops: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def machine(self: object, shared: Path) -> None:
        raise MachineError("GPU 0 is split by MIG")

    monkeypatch.setattr(LocalLauncher, "machine", machine)
    suite.makepyfile(test_cases=DRY_CASES)
    assert suite.runpytest("--perf-dry", "--perf-json=out.json").ret == 0
    assert read_json(suite)["machine"]["note"] == "GPU 0 is split by MIG"


def test_a_dry_run_is_not_profiled_whatever_the_ini_file_says(
    suite: pytest.Pytester, dry_flops: list[int]
) -> None:
    suite.makepyfile(test_cases=DRY_CASES)
    options = ("--perf-dry", "-m", "h100", "--perf-json", "out.json")
    assert suite.runpytest(*options, "-o", "perf_explain=true").ret == 0
    (result,) = read_json(suite)["results"]
    assert result["verdict"]["outcome"] == "recorded"
    assert "profile" not in result or result["profile"] is None


def test_dry_runs_want_a_baseline_on_request(suite: pytest.Pytester, dry_flops: list[int]) -> None:
    suite.makepyfile(test_cases=DRY_CASES)
    result = suite.runpytest("--perf-dry", "-m", "h100", "--perf-missing-baseline=fail")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no baseline of counts for dry-sm90*"])
    assert "--perf-missing-baseline=fail" in str(result.stdout)


def test_what_cannot_be_run_dry_is_skipped_with_the_reason(suite: pytest.Pytester) -> None:
    result = run_cpu(suite, "--perf-dry", "-rs")
    result.stdout.fnmatch_lines(["SKIPPED*not by a dry run: fake does not say how it builds*"])
    assert result.ret == 1  # not a pass


def test_dry_runs_may_run_side_by_side(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_cases=DRY_CASES.replace('hardware="h100"', 'hardware="cpu"'))
    result = suite.runpytest_subprocess(
        "--perf-dry", "-m", "cpu", "-n", "1", "--benchmark-disable", "--perf-json", "out.json"
    )
    assert result.ret == 0, result.outlines
    result.stdout.fnmatch_lines(["*ddp-llama-tiny-s64-b4-fp32-1x2*recorded*", "*1 recorded*"])
    (case,) = read_json(suite)["results"]
    assert case["runs"][0]["counts"][0]["ranks"] == [0]


def test_dry_runs_side_by_side_of_nothing_are_never_green(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_cases=CASES.replace('hardware="cpu"', 'hardware="h100"'))
    result = suite.runpytest_subprocess(
        "--perf-dry", "-m", "h100", "-n", "1", "--benchmark-disable", "--perf-json", "out.json"
    )
    assert result.ret == 1, result.outlines
    skipped = documents.read(suite.path / "out.json", SessionFile).skipped
    assert len(skipped) == 1
