"""Tests of `perfsuite report`."""

from functools import partial
from pathlib import Path

from perfsuite import documents
from perfsuite.results.session_file import NodePreflight, SessionFile
from tests.cli import commands
from tests.report.test_nodes import FOUND
from tests.sessions import make_blind, make_session

run = partial(commands.run, "report")


def write(file: Path, session: SessionFile | None = None) -> Path:
    documents.write(file, session or make_session(3, lambda number: ("passed", "regressed", "crash")[number]))
    return file


def test_every_label_of_the_origin_is_set_off(tmp_path: Path) -> None:
    lines = run(write(tmp_path / "results.json")).stdout.splitlines()
    origin = lines[: lines.index("")]
    assert [line for line in origin if "  " not in line] == []


def test_terminal_shows_table_reasons_and_counts(tmp_path: Path) -> None:
    lines = run(write(tmp_path / "results.json")).stdout.splitlines()
    assert lines[:3] == [
        "hardware          h100-80gb-sxm (NVIDIA H100 80GB HBM3)",
        "torch             2.13.0",
        "commit            0123456789ab",
    ]
    assert sum(line.endswith("%  regressed") for line in lines) == 1
    assert any(line.startswith("  tokens/s: ") and line.endswith("2.9% allowed: regressed") for line in lines)
    assert any("RuntimeError: NCCL error" in line for line in lines)
    assert not any(": passed after" in line for line in lines)
    assert "it needs 2 nodes (processes per node: 8)" in lines[-2]
    assert lines[-1] == "1 failed, 1 regressed, 1 passed, 3 skipped"


def test_shows_what_was_found_about_nodes(tmp_path: Path) -> None:
    nodes = (NodePreflight(name="n1"), NodePreflight(name="n[2]", problems=("no [bold]route[/bold]",)))
    session = make_session(0).replace(
        preflights=(FOUND.replace(nodes=nodes),), status="interrupted", interrupted_case="[red]x[/red]"
    )
    shown = run(write(tmp_path / "r.json", session)).stdout
    assert "interrupted: [red]x[/red] was not judged" in shown
    assert "preflight of 2 nodes (Test CPU) in 9 s: 1 of them bad\n  node" in shown
    (bad,) = [line for line in shown.splitlines() if line.startswith("  n[2] ")]
    assert bad.endswith("no [bold]route[/bold]")


def test_what_passed_is_explained_on_request(tmp_path: Path) -> None:
    passed = make_session(1, lambda number: "passed")
    (blind,) = map(make_blind, passed.results)
    file = write(tmp_path / "results.json", passed.replace(results=(blind,)))
    short = run(file).stdout
    assert ": passed after" not in short
    assert "\nblind: in 1 of 1 case, noise hides" in short
    long = run(file, "-v").stdout
    assert ": passed after" in long
    assert "blind: this gate finds only changes of 32.4% or more" in long
    assert "noise hides" not in long


def test_joins_sessions_into_one_report(tmp_path: Path) -> None:
    out = tmp_path / "sub"
    shown = run(write(tmp_path / "a.json"), write(tmp_path / "b.json"), "--out", out)
    assert shown.stdout == ""
    names = ("index.html", "summary.md", "results.json", "results-2.json")
    assert shown.stderr == "".join(f"written: {out / name}\n" for name in names)
    assert {file.name for file in out.iterdir()} == {*names}
    assert (out / "index.html").read_text().startswith("<!DOCTYPE html>")
    text = (out / "summary.md").read_text()
    assert text.startswith("## perfsuite: 2 failed, 2 regressed, 2 passed, 6 skipped")


def test_defaults_to_the_newest_session(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert "no session in" in commands.error_of("report", "--store", tmp_path / "loop"), "it is not a store"
    message = commands.error_of("report", "--store", tmp_path)
    assert f"no session in {tmp_path / 'runs'}: measure first (pytest bench_cases), or name a" in message
    results = tmp_path / "compare" / "today" / "results.json"
    results.parent.mkdir(parents=True)
    results.write_text("{}")
    message = commands.error_of("report", "--store", tmp_path)
    assert f"name a results.json, such as the newest comparison: {results}" in message
    write(tmp_path / "runs" / "20260101-000000-000000" / "results.json", make_session(0))
    newest = write(tmp_path / "runs" / "20260102-000000-000000" / "results.json")
    (tmp_path / "runs" / "20260103-000000-000000").mkdir()  # nothing was measured in this session
    assert run("--store", tmp_path).stdout.endswith("1 failed, 1 regressed, 1 passed, 3 skipped\n")
    shown = run("--store", tmp_path, "--json").stdout
    assert SessionFile.model_validate_json(shown) == documents.read(newest, SessionFile)
    (tmp_path / "kept.json").write_text(shown)
    assert documents.read(tmp_path / "kept.json", SessionFile) == documents.read(newest, SessionFile)
    assert "--json excludes --out " in commands.error_of("report", newest, "--json", "--out", "out")
    newest.write_text('{"schema_version": 99}')
    unread = f"perfsuite report: {newest}: field schema_version: this perfsuite reads 1, got 99."
    assert commands.error_of("report", newest).startswith(unread)


def test_reports_name_an_unfinished_session(tmp_path: Path) -> None:
    session = make_session(1, lambda number: "passed").replace(status="running")
    file = write(tmp_path / "results.json", session)
    assert run(file).stdout.splitlines()[-1].startswith("running or killed, 1 passed")
