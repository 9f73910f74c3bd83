from __future__ import annotations

import subprocess
from pathlib import Path

from perfsuite.results.rank_report import Observed
from tests.cli.baseline.launches import CASE, MACHINE, REVIEWED, accepted, invoke, keep, measured


def test_accept_writes_the_reviewed_file_and_says_what_to_commit(repository: Path) -> None:
    measured("1", 5)
    result = invoke("accept")
    assert result.exit_code == 0, result.output
    assert f"git add baselines/{MACHINE.hardware_class}/{CASE.id}.json" in result.output
    assert "tokens/s: new -> 50,150" in result.output
    assert "launches: new -> 5 of 1 session" in result.output
    held = accepted()
    assert len(held.launches) == 5
    assert held.accepted is not None
    assert held.accepted.by == "Ada"
    assert held.accepted.commit == subprocess.getoutput("git rev-parse HEAD")


def test_a_reviewed_file_that_cannot_be_read_refuses_its_own_case_alone(repository: Path) -> None:
    measured("1", 5)
    other = CASE.replace(micro_batch=3)
    keep("1", [run.replace(case=other) for run in measured("1", 5)])
    broken = REVIEWED.reviewed_file(MACHINE.hardware_class, CASE.id)
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    result = invoke("accept")
    assert result.exit_code == 1
    assert f"not accepted: {CASE.id} on {MACHINE.hardware_class}: {broken}: not JSON" in result.stderr
    written = broken.with_name(f"{other.id}.json")
    assert f"written: {written}\nReview and commit: git add {written}\n" in result.stdout
    assert broken.read_text() == "{"


def test_what_cannot_be_written_is_not_accepted(repository: Path) -> None:
    measured("1", 5)
    Path("file").write_text("")
    result = invoke("accept", "--baselines", "file")
    assert result.exit_code == 1
    assert f"not accepted: {CASE.id} on {MACHINE.hardware_class}: cannot write file/" in result.stderr


def test_what_looks_like_markup_is_shown_as_it_is(repository: Path) -> None:
    reason = "[torch 2.14] bump by github-actions[bot] [/x] :bug:"
    measured("1", 5, observed=Observed(settings={"a": "[/red]"}, environment={}))
    assert invoke("accept", "--reason", reason).exit_code == 0
    shown = invoke("show", CASE.id)
    assert shown.exit_code == 0
    assert f"  reason: {reason}\n" in shown.output
    assert "  settings: a=[/red]\n" in shown.output
    held = accepted()
    assert held.accepted is not None
    named = held.replace(accepted=held.accepted.replace(by="a[bot]"))
    REVIEWED.write_reviewed(named)
    assert "a[bot]" in " ".join(invoke("list").output.split())


def test_accept_without_runs_says_how_to_measure(repository: Path) -> None:
    result = invoke("accept", "fsdp-*")
    assert result.exit_code == 2
    assert "no measured run of a case matching 'fsdp-*'" in result.output
    assert "pytest bench_cases --perf-min-launches=5" in result.output


def test_a_corrupt_run_is_said_and_left_out(repository: Path) -> None:
    measured("1", 6)
    next(Path(".perfsuite").glob("runs/1/*/launch-1/run.json")).write_text("{")
    result = invoke("accept")
    assert result.exit_code == 0
    assert "left out:" in result.output
    assert "launch-1/run.json: not JSON" in result.output
    assert len(accepted().launches) == 5


def test_every_class_of_the_newest_session_is_accepted_or_the_one_that_is_named(repository: Path) -> None:
    """As cases of one node and of two, whose class has the interconnect, and what another machine was."""
    two = CASE.replace(topology=CASE.topology.replace(nodes=2))
    nodes = MACHINE.replace(hardware_class=f"{MACHINE.hardware_class}-ib400", nodes=2)
    old = MACHINE.replace(hardware_class="cpu-old-2c")
    measured("1", 5, machine=old)
    measured("2", 5)
    measured("2", 5, case=two, machine=nodes)
    files = [
        REVIEWED.reviewed_file(machine.hardware_class, case.id)
        for machine, case in ((old, CASE), (MACHINE, CASE), (nodes, two))
    ]
    assert invoke("accept").exit_code == 0
    assert [file.exists() for file in files] == [False, True, True]
    assert invoke("accept", "--hardware-class", old.hardware_class, "--reason", "x").exit_code == 0
    assert files[0].exists()
    missing = invoke("accept", "--hardware-class", "h100-80gb-sxm")
    assert (missing.exit_code, "on h100-80gb-sxm in" in missing.stderr) == (2, True)
