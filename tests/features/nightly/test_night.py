"""Tests of `perfsuite night`. All commands that it runs are replaced."""

import sys
from functools import partial
from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.features.nightly.night import report_line
from perfsuite.results.session_file import SessionFile
from tests.cli import commands
from tests.cli.commands import error_of
from tests.features.nightly.interpreter import SESSION, Interpreter

PAGE = Path("page")


@pytest.fixture
def tonight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Interpreter:
    """Return the interpreter of a night that launches nothing."""
    Path("bench_cases").mkdir()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / PAGE))
    return Interpreter(tmp_path / "interpreter", monkeypatch)


run = partial(commands.run, "night", "--hardware", "cpu")


def test_night_checks_machine_and_gate_first(tonight: Interpreter) -> None:
    tonight.end_with(doctor=3, selftest=3)  # on a busy machine, the night goes on
    options = ("--shard=2/8", "--budget=2h", "--", "-k", "fsdp2", "--perf-min-judged=50%")
    said = commands.run("night", "--hardware", "h100", *options)
    doctor, selftest, pytest_ = tonight.commands
    assert doctor == ["perfsuite.cli", "doctor", "--quick", "--expect=h100"]
    assert selftest == ["perfsuite.cli", "selftest", "--framework=ddp"]
    assert pytest_[:4] == ["pytest", "bench_cases", "-m", "h100"]
    assert pytest_[-3:] == ["-k", "fsdp2", "--perf-min-judged=50%"], "later options override earlier ones"
    assert {"--perf-report=out", "--perf-shard=2/8", "--perf-budget=2h"} <= {*pytest_}
    assert "## perfsuite: 1 " in PAGE.read_text()
    kept = "; to keep the results: perfsuite history push out/results.json"
    assert f"report: out/index.html{kept}\n" in said.stderr


def test_trains_nothing_without_transformers(tonight: Interpreter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    run()
    assert tonight.commands[-2] == ["perfsuite.cli", "selftest", "--framework=fake"]


def test_names_history_only_where_it_exists() -> None:
    assert report_line(Path("out"), ["night"]) == "report: out/index.html"
    kept = "; to keep the results: perfsuite history push out/results.json"
    assert report_line(Path("out"), ["history", "night"]) == f"report: out/index.html{kept}"


@pytest.mark.parametrize(("ended", "status"), [(0, 0), (1, 1), (2, 2), (4, 2), (5, 2), (-9, 2)])
def test_a_night_ends_as_pytest_does(tonight: Interpreter, ended: int, status: int) -> None:
    tonight.end_with(pytest=ended)
    run(status=status)


def test_a_session_that_was_cut_short_is_no_success(tonight: Interpreter) -> None:
    tonight.cut_short()
    assert "pytest ended with 0 before the end of its session" in run(status=1).stderr
    assert "## perfsuite: running or killed, " in PAGE.read_text()


@pytest.mark.parametrize(
    ("command", "ended", "status"),
    [("doctor", 1, 2), ("doctor", 2, 2), ("selftest", 1, 1), ("selftest", 2, 2)],
)
def test_bad_machine_or_blind_gate_ends_a_night(
    tonight: Interpreter, command: str, ended: int, status: int
) -> None:
    tonight.end_with(**{command: ended})
    errors = run("--selftest", "fake", status=status).stderr
    assert f"nothing was measured: perfsuite {command} ended with {ended}" in errors
    assert tonight.commands[-1][:2] == ["perfsuite.cli", command]
    assert PAGE.read_text().startswith(f"Nothing was measured: perfsuite {command} ended with {ended}\n")


def test_finds_pytests_refusals_before_checks(tonight: Interpreter) -> None:
    tonight.refuse("ERROR: *x* [y]")
    assert "nothing was measured: pytest cannot collect the cases: ERROR: *x* [y]" in run(status=2).stderr
    assert tonight.commands == []
    assert PAGE.read_text().startswith(
        "Nothing was measured: pytest cannot collect the cases: ERROR: &#42;x&#42;"
    )
    tonight.accept()
    run("-k", "fsdp2")
    assert tonight.asked == tonight.commands[-1][1:], "the question is about the selected cases"


def test_github_gets_no_annotation_without_a_finding(
    tonight: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert "::" not in run().stdout


def test_page_names_an_error_in_the_plan(tonight: Interpreter) -> None:
    errors = run("--find=2%", status=2).stderr
    assert "-m cpu selects no case in bench_cases" in errors
    assert "Nothing was measured: -m cpu selects no case in bench_cases" in PAGE.read_text()


def test_reports_an_interrupted_night_once(tonight: Interpreter) -> None:
    run()
    tonight.forget_report()  # as if the night had been killed before its report
    PAGE.unlink()
    run("--only-summary")
    assert PAGE.read_text().count("## perfsuite: 1 ") == 1
    assert documents.read(Path("out/results.json"), SessionFile) == SESSION
    run("--only-summary")
    assert PAGE.read_text().count("## perfsuite: 1 ") == 1, "the page has the summary already"


def test_ignores_the_report_of_an_earlier_night(tonight: Interpreter) -> None:
    run("--only-summary")
    assert PAGE.read_text().startswith("Nothing was measured: the night did not begin\n")
    run()
    tonight.end_with(doctor=1)
    run(status=2)
    run("--only-summary")
    last = PAGE.read_text().split("Nothing was measured: ")
    assert [text.splitlines()[0] for text in last[1:]] == [
        "the night did not begin",
        "perfsuite doctor ended with 1",
    ]
    assert [file.name for file in Path("out").iterdir()] == ["summary.md"]
    tonight.end_with()
    tonight.measure_nothing()
    assert "pytest ended with 0 and wrote no report" in run(status=2).stderr
    assert PAGE.read_text().count("Nothing was measured") == 3, "an older session does not count"


def test_a_refused_option_replaces_the_earlier_report(tonight: Interpreter) -> None:
    run()
    PAGE.unlink()
    error_of("night", "--hardware", "cpu", "--budget", "soon")
    assert [file.name for file in Path("out").iterdir()] == ["summary.md"]
    assert PAGE.read_text().startswith("Nothing was measured: --budget=soon: give a time above 0")
    run("--only-summary")
    assert PAGE.read_text().count("Nothing was measured") == 1, "the page has the reason already"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("night --hardware h1000", "--hardware h1000: did you mean 'h100'?"),
        ("night --hardware cpu --cases nosuch", "--cases nosuch: no such directory"),
        (
            "night --hardware cpu --shard 9/8",
            "--shard=9/8: give the number of this job and the number of jobs",
        ),
        ("night --hardware cpu --out mine", "--out=mine: give another directory (perfsuite did not write"),
        ("night --hardware cpu --budget soon", "--budget=soon: give a time above 0 in s, min or h"),
        ("night --hardware cpu --json", "--json needs --plan (a night writes results.json)"),
    ],
)
def test_refuses_bad_options_and_runs_nothing(tonight: Interpreter, command: str, words: str) -> None:
    page = Path("mine/index.html")
    documents.write_text(page, "<title>Ours</title>")
    assert words in error_of(*command.split())
    assert tonight.commands == []
    assert page.read_text() == "<title>Ours</title>"
