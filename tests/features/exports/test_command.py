import json
from functools import partial
from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.features.exports.formats import FORMATS
from perfsuite.results.session_file import SessionFile
from tests.cli import commands
from tests.cli.test_report import write
from tests.samples import ARMS, make_case, make_result, make_run, never_run
from tests.sessions import make_session

export = partial(commands.run, "export")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    session = make_session(2, lambda number: ("passed", "throttled")[number])
    return write(tmp_path / "runs" / "20260102-000000-000000" / "results.json", session)


@pytest.mark.parametrize("given", ["{results}", "{results.parent}", "--store {tmp}"])
@pytest.mark.parametrize("name", FORMATS)
def test_takes_a_file_a_directory_or_the_newest(name: str, results: Path, tmp_path: Path, given: str) -> None:
    write(tmp_path / "runs" / "20260101-000000-000000" / "results.json", make_session(0))
    wanted = FORMATS[name](documents.read(results, SessionFile))
    words = [word.format(results=results, tmp=tmp_path) for word in given.split()]
    assert export("--format", name, *words).stdout == wanted


def test_writes_a_file_and_names_what_it_omits(results: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "hud.json"
    shown = export("--format", "hud", results, "--out", target)
    assert shown.stdout == ""
    passed, throttled = (result.case_id for result in documents.read(results, SessionFile).results)
    measured = [record for record in json.loads(target.read_text()) if "benchmark_values" in record["metric"]]
    assert {record["model"]["name"] for record in measured} == {passed}
    assert shown.stderr == (
        f"{passed}: not counted, so it is unknown whether the work of a step has changed\n"
        f"no numbers for {throttled}: no launch on a healthy machine\n"
    )


def test_omits_dry_runs_from_outcomes(tmp_path: Path) -> None:
    launched = make_session(1)
    file = tmp_path / "results.json"
    dry = make_result(make_run(dry=True, case=make_case(sequence_length=32)), before=None)
    documents.write(file, launched.replace(results=(*launched.results, dry)))
    shown = export("--format", "openmetrics", file)
    assert shown.stdout == FORMATS["openmetrics"](launched)
    assert shown.stderr.startswith("left out: 1 dry run, because a dry run measures nothing\n")
    documents.write(file, make_session(0).replace(results=(never_run(),), dry=True))
    assert never_run().case_id not in export("--format", "openmetrics", file).stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--format hud {tmp}/arms.json", "compares two arms"),
        ("--format hud {tmp}/none.json", "cannot read {tmp}/none.json"),
        ("--format hud --store {tmp}/empty", "or name a results.json"),
        ("--format hud {results} --out {results}/under/a-file", "cannot write"),
        ("{results}", "Missing option '--format'"),
        ("{results} --format csv", "'csv' is not one of 'hud', 'openmetrics'"),
    ],
    ids=["arms", "no file", "no session", "no directory", "no format", "unknown format"],
)
def test_refuses_what_cannot_be_exported(results: Path, tmp_path: Path, words: str, reason: str) -> None:
    documents.write(tmp_path / "arms.json", make_session(1).replace(arms=ARMS))
    given = [word.format(tmp=tmp_path, results=results) for word in words.split()]
    assert reason.format(tmp=tmp_path) in commands.error_of("export", *given)


def test_an_export_names_an_unfinished_session(tmp_path: Path) -> None:
    session = make_session(1, lambda number: "passed").replace(status="running")
    file = write(tmp_path / "results.json", session)
    assert "The session is running, or was killed" in export(file, "--format", "hud").stderr
