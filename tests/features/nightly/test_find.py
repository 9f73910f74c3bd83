"""Tests of `perfsuite night --find`, which plans a night that can find a change of a given size."""

import math
import random
from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.case.case import Topology
from perfsuite.features.nightly import find
from perfsuite.inputs.ini import BASELINES
from perfsuite.results.baseline import Baseline, from_runs
from perfsuite.results.store import BaselineStore, Store
from tests.cli.commands import error_of, hold, rows, run
from tests.features.nightly.interpreter import Interpreter
from tests.samples import make_case, make_figures, make_gpu_machine, make_result, make_run, write_session

GPU = make_case(hardware="h100", topology=Topology(processes_per_node=8))
CASES = [GPU.replace(micro_batch=size) for size in range(1, 9)]
H100 = make_gpu_machine().hardware_class
PLAN = ("night", "--plan", "--hardware", "h100", "--find")


def accept(
    *,
    sessions: int = 3,
    launches: int = 5,
    session: float = 0.01,
    within: float = 0.001,
    sigma: float = 0.002,
) -> None:
    """Write a baseline for each case, measured on a machine with these standard deviations."""
    draw = random.Random(0)
    shifts = [draw.gauss(0, session) for _ in range(sessions)]
    for case in CASES:
        runs = []
        for shift in shifts:
            level = shift + draw.gauss(0, within)
            for _ in range(launches):
                speed = 1000 * math.exp(-level - draw.gauss(0, sigma))
                figures = make_figures(tokens_per_s=speed, probe_s_p50=None)
                runs.append(make_run(case=case, figures=figures, machine=make_gpu_machine()))
        names = [str(number) for number in range(sessions) for _ in range(launches)]
        baseline = from_runs(runs, sessions=names)
        documents.write(BASELINES / baseline.hardware_class / f"{case.id}.json", baseline)


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide cases and an earlier session, in which a launch took half an hour on eight GPUs."""
    hold(monkeypatch, *CASES)
    results = [make_result(make_run(case=case, duration_s=1800), before=None) for case in CASES]
    write_session(tmp_path / ".perfsuite" / "runs" / "1", *results)


def printed(*words: str) -> str:
    return " ".join(run(*PLAN, *words).stdout.split())


def test_states_launches_noise_reference_and_cost() -> None:
    accept()
    text = printed("3%")
    assert "15 of 3 sessions 3 " in text
    assert f"noise of tokens/s on {H100}: 0.2% between launches; between sessions: " in text
    assert "reference: 1 launch of each of 2 canary cases: " in text
    assert "cost: 10 to 26 launches, 300.0 to 780.0 min, 40.0 to 104.0 GPU hours, of which 8.0" in text
    assert "not reached" not in text


def test_json_has_a_row_for_each_case() -> None:
    accept()
    listed = rows(run(*PLAN, "3%", "--json").stdout)
    assert [row["case"] for row in listed] == [case.id for case in CASES]
    first = listed[0]
    assert first["reached"] is True
    assert 0.01 < first["finds"] <= 0.03
    assert (first["launches"], first["most_s"], first["most_gpu_hours"]) == (3, 5400, 12)
    assert sum(row["canary_launches"] for row in listed) == 2


def test_names_the_cases_that_need_pairs() -> None:
    accept(within=0.01)
    text = printed("2%")
    assert "The noise of a case within a session hides a change of 2.0% in all cases, however " in text
    assert "in pairs of launches (perfsuite compare): 5 pairs are enough" in text
    assert "It keeps its tolerance, because it cannot find a change of 2.0% in every case." in text


def test_names_the_cases_with_too_few_launches() -> None:
    accept(sigma=0.004)
    few = CASES[2].id
    file = BASELINES / H100 / f"{few}.json"
    baseline = documents.read(file, Baseline)
    documents.write(file, baseline.replace(launches=baseline.launches[::5]))
    assert f"A change of 3.0% cannot be found in {few}: accept baselines with more launches" in printed("3%")


def test_not_even_pairs_find_very_small_changes() -> None:
    accept(sigma=0.02)
    assert "Not even a comparison in pairs of launches (perfsuite compare)" in printed("1%")


def test_asks_for_sessions_if_there_is_only_one() -> None:
    accept(sessions=1, launches=10)
    text = printed("3%")
    assert "this plan assumes that sessions do not differ" in text
    assert "0.2% between launches; between sessions: unknown: accept baselines of two sessions" in text
    assert "no reference" in text


def test_names_cases_without_a_baseline() -> None:
    accept()
    file = next((BASELINES / H100).glob(f"{CASES[3].id}.json"))
    file.unlink()
    assert f"not planned, because these cases have no baseline: {CASES[3].id}" in printed("3%")


def test_a_case_that_was_never_launched_has_no_cost(tmp_path: Path) -> None:
    accept()
    listed = rows(run(*PLAN, "3%", "--json", "--store", tmp_path / "elsewhere").stdout)
    assert {row["most_gpu_hours"] for row in listed} == {None}
    assert "and 8 cases of unknown cost" in printed("3%", "--store", str(tmp_path / "elsewhere"))


def test_refuses_what_cannot_be_planned() -> None:
    assert "none of these cases has a baseline in baselines" in error_of(*PLAN, "3%")
    accept(sessions=1, launches=1)
    assert "do not show the noise between launches. Accept baselines of 5" in error_of(*PLAN, "3%")
    accept()
    (BASELINES / "a100").mkdir()
    (BASELINES / "a100" / f"{CASES[0].id}.json").write_text("{}")
    assert f"have baselines on a100, {H100}, but this machine has another class" in error_of(*PLAN, "3%")


@pytest.mark.parametrize("share", ["0%", "60%", "small"])
def test_refuses_a_change_out_of_range(share: str) -> None:
    assert "expected more than 0% and up to 50%" in error_of(*PLAN, share)


@pytest.mark.parametrize("plan", [(), ("--plan",)])
def test_a_budget_cannot_hold_a_plan(plan: tuple[str, ...]) -> None:
    accept()
    words = ("night", "--hardware", "h100", "--find", "2%", "--budget", "1h", *plan)
    assert "--find cannot be combined with --budget" in error_of(*words)


@pytest.mark.parametrize("has_reference", [True, False])
def test_a_night_states_its_plan_and_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_reference: bool
) -> None:
    accept()
    interpreter = Interpreter(tmp_path / "interpreter", monkeypatch)
    reference = ("--", "--perf-reference=image=base") if has_reference else ()
    printed = run("night", "--hardware", "h100", "--find", "3%", *reference).stdout
    assert "cost: " in printed
    planned = {"--perf-max-launches=3", "--perf-tolerance=3%", "--perf-canaries=2"}
    measured = interpreter.commands[-1]
    assert (planned <= {*measured}) == has_reference
    assert "--perf-baselines=baselines" in measured
    assert ("If 2 canary cases were also launched with a reference" in printed) != has_reference


def finding(share: float, *, has_reference: bool) -> find.FindPlan:
    store = Store(Path(".perfsuite"))
    return find.planned_to_find(CASES, store, BaselineStore(BASELINES), share, has_reference=has_reference)


def test_the_night_uses_the_plan() -> None:
    accept()
    assert finding(0.03, has_reference=True).pytest_options() == [
        "--perf-max-launches=3",
        "--perf-tolerance=3%",
        "--perf-canaries=2",
    ]


def test_a_larger_change_keeps_the_usual_tolerance() -> None:
    """Otherwise a night that is to find 10% would pass what a night without a plan finds."""
    accept()
    plan = finding(0.10, has_reference=True)
    assert not plan.plan.unreached
    assert not any(option.startswith("--perf-tolerance") for option in plan.pytest_options())


def test_a_plan_keeps_a_smaller_tolerance_of_the_ini_file() -> None:
    accept()
    Path("pytest.ini").write_text("[pytest]\nperf_tolerance = 2%\n")
    assert "--perf-tolerance=3%" not in finding(0.03, has_reference=True).pytest_options()


def test_an_unreached_plan_keeps_the_usual_tolerance() -> None:
    accept(within=0.01)
    assert finding(0.02, has_reference=False).pytest_options() == ["--perf-max-launches=6"]


def test_says_what_a_reference_would_find() -> None:
    accept()
    text = " ".join(find.sentences(finding(0.03, has_reference=False)))
    assert "launched with a reference, this night would find a change of 3.0% in 8 more cases" in text
