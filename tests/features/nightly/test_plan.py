"""Tests of `perfsuite night --plan`."""

from pathlib import Path

import pytest

from perfsuite.case.case import Topology
from perfsuite.results.outcome import Verdict
from tests.cli.commands import error_of, hold, rows, run
from tests.samples import make_case, make_result, make_run, write_session

GPU = make_case(hardware="h100", topology=Topology(processes_per_node=8))
CASES = [GPU.replace(micro_batch=size) for size in (1, 2, 3)]


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, *CASES)
    results = [make_result(make_run(case=case, duration_s=1800), before=None) for case in CASES[:2]]
    write_session(tmp_path / ".perfsuite" / "runs" / "1", *results)


def plan(*words: str) -> str:
    return run("night", "--plan", "--hardware", "h100", *words).stdout


def test_plan_shows_costs_and_reach_of_a_budget() -> None:
    printed = plan("--budget", "1h")
    head, first, second, third, total = [line.split() for line in printed.splitlines() if line.strip()]
    assert head[:3] == ["case", "last", "measured"]
    assert first[1:] == ["recorded", "2026-01-02", "30.0", "4.0", "30.0", "min"]
    assert second[1:] == ["recorded", "2026-01-02", "30.0", "4.0", "60.0", "min"]
    assert third[1:] == ["never", "~30.0", "~4.0", "not", "reached"]
    assert " ".join(total) == "2 cases of 3 within 1h: 60.0 min, 8.0 GPU hours"


def test_plan_prints_json() -> None:
    first_row, _, last_row = rows(plan("--budget", "1h", "--json"))
    assert first_row.pop("case") in {CASES[0].id, CASES[1].id}
    past = {"outcome": "recorded", "day": "2026-01-02"}
    assert first_row == {**past, "expected_s": 1800, "gpu_hours": 4, "reached_after_s": 1800}
    assert (last_row["outcome"], last_row["reached_after_s"]) == (None, None)


def test_plan_without_a_budget_reaches_every_case() -> None:
    assert "3 cases: 90.0 min, 12.0 GPU hours" in plan()


def test_plan_names_a_case_that_never_fits(tmp_path: Path) -> None:
    longer = make_result(make_run(case=CASES[2], duration_s=5400), before=None)
    write_session(tmp_path / ".perfsuite" / "runs" / "2", longer)
    never = (
        "not reached: it never fits into the budget of 60.0 min, because it takes about 90.0 min. Give 90min"
    )
    assert f"{CASES[2].id}: {never}" in plan("--budget", "1h")


def test_costs_are_unknown_without_earlier_results(tmp_path: Path) -> None:
    printed = run("night", "--plan", "--hardware", "h100", "--store", tmp_path / "elsewhere").stdout
    rows_of_cases = [line for line in printed.splitlines() if line.strip().startswith(CASES[0].id[:10])]
    assert [line.count("not known") for line in rows_of_cases] == [3, 3, 3]
    assert printed.endswith("3 cases: no cost is known\n")
    assert "0.0" not in printed


def test_unknown_cost_hides_later_start_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of the third case is unknown, because no case with its number of GPUs has been measured."""
    verdict = Verdict(outcome="passed", launches=1)
    passed = [make_result(make_run(case=case, duration_s=1800), verdict=verdict) for case in CASES[:2]]
    write_session(tmp_path / ".perfsuite" / "runs" / "2", *passed)
    hold(monkeypatch, *CASES[:2], GPU.replace(topology=Topology(processes_per_node=4)))
    printed = run("night", "--plan", "--hardware", "h100").stdout
    assert printed.endswith("3 cases: 60.0 min, 8.0 GPU hours and 1 case of unknown cost\n")
    first, *others = rows(run("night", "--plan", "--hardware", "h100", "--json").stdout)
    assert first["expected_s"] is None
    assert [row["reached_after_s"] for row in (first, *others)] == [None, None, None]
    within = run("night", "--plan", "--hardware", "h100", "--budget", "40min").stdout
    assert within.endswith("2 cases of 3 within 40min: 30.0 min, 4.0 GPU hours and 1 case of unknown cost\n")
    assert within.count("not reached") == 1


def test_refuses_a_plan_with_bad_options() -> None:
    assert "--hardware h1000: did you mean 'h100'?" in error_of("night", "--plan", "--hardware", "h1000")
    soon = error_of("night", "--plan", "--hardware", "h100", "--budget", "soon")
    assert "--budget=soon: give a time above 0 in s, min or h" in soon
    nosuch = error_of("night", "--plan", "--hardware", "h100", "--cases", "nosuch")
    assert "--cases nosuch: no such directory" in nosuch


def test_plans_the_cases_of_one_job() -> None:
    night = ("night", "--plan", "--hardware", "h100", "--json")
    first, second = (rows(run(*night, "--shard", f"{number}/2").stdout) for number in (1, 2))
    assert (len(first), len(second)) == (2, 1)
    assert {row["case"] for row in (*first, *second)} == {case.id for case in CASES}


def test_a_plan_writes_no_report() -> None:
    Path("out").touch()
    assert len(rows(run("night", "--plan", "--hardware", "h100", "--json").stdout)) == 3


@pytest.mark.parametrize("more", [("--only-summary",), ("--", "-x")])
def test_refuses_what_a_plan_would_ignore(more: tuple[str, ...]) -> None:
    assert "a plan launches nothing" in error_of("night", "--plan", "--hardware", "h100", *more)
