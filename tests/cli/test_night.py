from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.cli import night
from perfsuite.session.outputs import write_report
from tests.cli.commands import run
from tests.cli.test_github_issue import GOOD, NOISY, SLOW, crashed
from tests.sessions import make_session


class Night:
    """Stands in for the commands of a night: what they end with, and what pytest leaves."""

    def __init__(self) -> None:
        self.statuses: dict[str, int] = {}
        self.commands: list[list[str]] = []
        self.measured = 1
        self.reports = True

    def run(self, module: str, *arguments: str) -> int:
        self.commands.append([module, *arguments])
        if module == "pytest" and self.measured:
            session = make_session(self.measured)
            documents.write(Path(".perfsuite/runs/20260101-000000-000000/results.json"), session)
            if self.reports:
                write_report(Path("out"), session)
                documents.write(Path("out/results.json"), session)
        return self.statuses.get(arguments[0] if module == "perfsuite.cli" else module, 0)


@pytest.fixture
def tonight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Night:
    monkeypatch.chdir(tmp_path)
    Path("bench_cases").mkdir()
    made = Night()
    monkeypatch.setattr(night, "run", made.run)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "page"))
    return made


def test_a_night_looks_at_the_machine_and_the_gate_and_then_measures(tonight: Night) -> None:
    tonight.statuses = {"doctor": 3, "selftest": 3}  # a busy machine cannot tell, which ends no night
    said = run("night", "--hardware", "h100", "--shard=2/8", "--", "-k", "fsdp2", "--perf-min-judged=50%")
    doctor, selftest, pytest_ = tonight.commands
    assert doctor == ["perfsuite.cli", "doctor", "--quick", "--expect=h100"]
    assert selftest == ["perfsuite.cli", "selftest", "--framework=ddp"]
    assert pytest_[:4] == ["pytest", "bench_cases", "-m", "h100"]
    assert pytest_[-3:] == ["-k", "fsdp2", "--perf-min-judged=50%"], "they win over what comes before"
    assert {"--perf-report=out", "--perf-shard=2/8"} <= {*pytest_}
    assert "## perfsuite: 1 " in Path("page").read_text()
    assert "perfsuite history push out/results.json" in said.stderr


@pytest.mark.parametrize(("ended", "status"), [(0, 0), (1, 1), (2, 2), (4, 2), (5, 2), (-9, 2)])
def test_a_night_ends_as_pytest_does_and_with_2_where_nothing_was_judged(
    tonight: Night, ended: int, status: int
) -> None:
    tonight.statuses = {"pytest": ended}
    run("night", "--hardware", "cpu", status=status)


@pytest.mark.parametrize(
    ("command", "ended", "status"), [("doctor", 1, 2), ("doctor", 2, 2), ("selftest", 1, 1)]
)
def test_nothing_is_measured_on_a_bad_machine_or_by_a_blind_gate(
    tonight: Night, command: str, ended: int, status: int
) -> None:
    tonight.statuses = {command: ended}
    told = run("night", "--hardware", "cpu", "--selftest", "fake", status=status)
    assert f"nothing was measured, as perfsuite {command} ended with {ended}" in told.stderr
    assert tonight.commands[-1][:2] == ["perfsuite.cli", command]
    assert Path("page").read_text().startswith("Nothing was measured: see the log.\n")


def test_github_shows_what_is_worse_or_not_decided_next_to_the_file(
    tonight: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "::" not in run("night", "--hardware", "cpu").stdout
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert "::" not in run("night", "--hardware", "cpu").stdout, "all is well"
    worse = SLOW.replace(case_id="a,b:c", nodeid="bench_cases/test_x.py::test[1]")
    said = night.github_annotations(
        [GOOD, worse, NOISY, SLOW.replace(shadow=True), SLOW.replace(excused="waived")]
    )
    assert said[0].startswith(
        "::error file=bench_cases/test_x.py,title=regressed%3A a%2Cb%3Ac::tokens/s -49.4%25"
    )
    assert [line.partition(" ")[0] for line in said] == ["::error", "::warning", "::warning"]
    (line,) = night.github_annotations([crashed("50%\n::error::evil")])
    assert "\n" not in line


def test_a_night_that_was_cut_short_is_reported_once(tonight: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    tonight.reports = False
    with monkeypatch.context() as killed:
        killed.setattr(night, "_summarise", lambda summary, sessions: None)
        run("night", "--hardware", "cpu")
    run("night", "--hardware", "cpu", "--only-summary")
    assert Path("page").read_text().count("## perfsuite: 1 ") == 1
    assert documents.read(Path("out/results.json"), type(make_session(1))) == make_session(1)
    run("night", "--hardware", "cpu", "--only-summary")
    assert Path("page").read_text().count("## perfsuite: 1 ") == 1, "its page has it"


def test_the_report_of_an_earlier_night_is_not_tonight_s(tonight: Night) -> None:
    run("night", "--hardware", "cpu", "--only-summary")
    assert Path("page").read_text() == night.NOTHING.format(0)
    run("night", "--hardware", "cpu")
    tonight.statuses = {"doctor": 1}
    run("night", "--hardware", "cpu", status=2)
    run("night", "--hardware", "cpu", "--only-summary")
    assert Path("page").read_text().endswith(f"\n{night.NOTHING.format(1)}")
    assert Path("page").read_text().count("Nothing was measured") == 2
    assert [file.name for file in Path("out").iterdir()] == ["summary.md"]


def test_a_page_of_somebody_else_in_its_directory_stays(tonight: Night) -> None:
    documents.write_text(page := Path("out/index.html"), "<title>Ours</title>")
    refused = run("night", "--hardware", "cpu", status=2).stderr
    assert "--report=out: give a directory without an index.html of your own" in refused
    assert page.read_text() == "<title>Ours</title>"
    assert tonight.commands == []


def test_an_older_session_is_not_told_as_tonight_s(tonight: Night) -> None:
    tonight.run("pytest")
    tonight.measured = 0
    run("night", "--hardware", "cpu")
    assert Path("page").read_text().startswith("Nothing was measured: see the log.\n")


def test_without_transformers_the_self_test_trains_nothing(
    tonight: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(night, "find_spec", lambda name: None)
    run("night", "--hardware", "cpu")
    assert tonight.commands[1] == ["perfsuite.cli", "selftest", "--framework=fake"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--hardware", "h1000"), "--hardware h1000: did you mean 'h100'?"),
        (("--hardware", "cpu", "--cases", "nosuch"), "--cases nosuch: no such directory"),
        (("--hardware", "cpu", "--shard", "9/8"), "--shard=9/8: give the number of this job and of how many"),
    ],
)
def test_what_cannot_be_a_night_is_refused(tonight: Night, arguments: tuple[str, ...], words: str) -> None:
    assert words in " ".join(run("night", *arguments, status=2).stderr.split())
    assert tonight.commands == []
