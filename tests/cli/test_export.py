from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.report.export import FORMATS
from perfsuite.results.session_file import SessionFile
from tests.cli import commands
from tests.samples import ARMS, make_case, make_result, make_run, never_run
from tests.sessions import make_session

run = partial(commands.run, "export")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    file = tmp_path / "runs" / "20260102-000000-000000" / "results.json"
    documents.write(file, make_session(2, lambda number: ("passed", "throttled")[number]))
    return file


@pytest.mark.parametrize("name", FORMATS)
def test_a_session_is_a_file_a_directory_or_the_newest_of_the_store(
    name: str, results: Path, tmp_path: Path
) -> None:
    documents.write(tmp_path / "runs" / "20260101-000000-000000" / "results.json", make_session(0))
    wanted = FORMATS[name](documents.read(results, SessionFile))
    for given in ((results,), (results.parent,), ("--store", tmp_path)):
        assert run("--format", name, *given).stdout == wanted


def test_a_file_is_written_and_what_is_left_out_is_named(results: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "hud.json"
    shown = run("--format", "hud", results, "--output", target)
    assert shown.stdout == ""
    passed, throttled = (each.case_id for each in documents.read(results, SessionFile).results)
    measured = [each for each in json.loads(target.read_text()) if "benchmark_values" in each["metric"]]
    assert {each["model"]["name"] for each in measured} == {passed}
    assert shown.stderr == (
        f"{passed}: not counted, so a step may do other work\n"
        f"no figures of {throttled}: no launch on a healthy machine\n"
    )


def test_a_dry_run_is_no_outcome_of_any_hardware(tmp_path: Path) -> None:
    launched = make_session(1)
    dry = make_result(make_run(dry=True, case=make_case(sequence_length=32)), before=None)
    file = tmp_path / "results.json"
    documents.write(file, launched.replace(results=(*launched.results, dry)))
    shown = run("--format", "openmetrics", file)
    assert shown.stdout == FORMATS["openmetrics"](launched)
    assert shown.stderr.startswith("left out: 1 dry run, which measured nothing\n")


def test_a_dry_run_that_was_refused_is_none_either(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    documents.write(file, make_session(0).replace(results=(never_run(),), dry=True))
    assert never_run().case_id not in run("--format", "openmetrics", file).stdout


def test_a_comparison_of_two_arms_is_refused(tmp_path: Path) -> None:
    documents.write(tmp_path / "results.json", make_session(1).replace(arms=ARMS))
    assert "compares two arms" in run("--format", "hud", tmp_path, status=2).stderr


def test_a_format_must_be_named_and_known(results: Path) -> None:
    for arguments in ((), ("--format", "csv")):
        run(results, *arguments, status=2)


def test_what_cannot_be_read_or_written_is_an_error(results: Path, tmp_path: Path) -> None:
    missing = run("--format", "hud", tmp_path / "none.json", status=2)
    assert f"cannot read {tmp_path / 'none.json'}" in missing.stderr
    assert "or name a results.json" in run("--format", "hud", "--store", tmp_path / "empty", status=2).stderr
    blocked = run("--format", "hud", results, "--output", results / "under" / "a-file", status=2)
    assert "cannot write" in blocked.stderr
