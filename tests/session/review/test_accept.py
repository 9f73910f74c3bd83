from pathlib import Path
from typing import Any

from perfsuite import documents
from perfsuite.results.dry_facts import DryFacts
from perfsuite.results.rank_report import Failure, Observed
from perfsuite.results.session_file import SessionFile
from tests.analysis.step_time.test_forecast import step
from tests.cli import commands
from tests.samples import make_gpu_machine
from tests.session.review.launches import CASE, MACHINE, REVIEWED, accept, accepted, measured, told
from tests.synthetic import git

ON = f"{CASE.id} on {MACHINE.hardware_class}"


def test_accept_says_what_to_commit(repository: Path) -> None:
    result = accept("1", 5)
    assert f"git add baselines/{MACHINE.hardware_class}/{CASE.id}.json" in result
    assert "tokens/s: new -> 50,150" in result
    assert "launches: new -> 5 of 1 session" in result
    held = accepted()
    assert len(held.launches) == 5
    assert held.accepted is not None
    assert (held.accepted.by, held.accepted.commit) == ("Ada", git(repository, "rev-parse", "HEAD"))


def measured_at(session: str, commit: str, *, dirty: bool = False, **changes: Any) -> None:
    """Write a session of launches that ran the code of this commit."""
    measured(session, 5, **changes)
    file = Path(".perfsuite/runs", session, "results.json")
    documents.write(file, documents.read(file, SessionFile).replace(commit=commit, dirty=dirty))


def measured_commit() -> str | None:
    held = accepted().accepted
    assert held is not None
    return held.measured


def test_accept_records_the_commit_that_was_measured(repository: Path) -> None:
    """It differs from the current commit if somebody commits before accepting."""
    measured_at("1", "a" * 40)
    measured_at("2", "b" * 40)
    told("accept", "--sessions", "2")
    assert measured_commit() == "b" * 40


def test_launches_that_are_left_out_have_no_commit(repository: Path) -> None:
    measured_at("1", "a" * 40)
    measured_at("2", "b" * 40, failure=Failure(kind="crash", message="x"))
    told("accept", "--sessions", "2")
    assert measured_commit() == "a" * 40


def test_uncommitted_changes_were_measured_at_no_commit(repository: Path) -> None:
    measured_at("1", "a" * 40, dirty=True)
    told("accept")
    assert measured_commit() is None


def test_accept_keeps_the_expected_time_of_the_newest_session(repository: Path) -> None:
    for session, host in (("1", 1), ("2", 2)):
        measured(session, 5)
        file = Path(".perfsuite/runs", session, "results.json")
        content = documents.read(file, SessionFile)
        (result,) = content.results
        predicted = result.replace(prediction=DryFacts(expected=step(1, host)))
        documents.write(file, content.replace(results=(predicted,)))
    told("accept")
    assert accepted().expected == step(1, 2)
    accept("3", 5)
    assert accepted().expected is None


def test_broken_file_stops_only_its_own_case(repository: Path) -> None:
    other = CASE.replace(micro_batch=3)
    measured("1", 5, case=other)
    measured("1", 5)
    broken = REVIEWED.reviewed_file(MACHINE.hardware_class, CASE.id)
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    result = commands.run("baseline", "accept", status=1)
    assert f"not accepted: {ON}: {broken}: not JSON" in result.stderr
    written = broken.with_name(f"{other.id}.json")
    assert f"written: {written}\nReview and commit: git add {written}\n" in result.stdout
    assert broken.read_text() == "{"
    Path("file").write_text("")
    assert f"not accepted: {ON}: cannot write file/" in told("accept", "--baselines", "file", status=1)
    broken.unlink()
    Path(".perfsuite/runs/1", CASE.id, "launch-1/run.json").write_text("{")
    said = told("accept", CASE.id, status=1)
    assert "launch-1/run.json: not JSON" in said
    assert f"not accepted: {ON}: 4 healthy launches" in said


def test_what_looks_like_markup_is_shown_as_it_is(repository: Path) -> None:
    reason = "[torch 2.14] bump by github-actions[bot] [/x] :bug:"
    git(repository, "config", "user.name", "a[bot]")
    accept("1", 5, "--reason", reason, observed=Observed(settings={"a": "[/red]"}, environment={}))
    shown = told("show", CASE.id)
    assert f"  reason: {reason}\n" in shown
    assert "  settings: a=[/red]\n" in shown
    assert "by a[bot]" in commands.flat(told("list"))


def test_accepts_every_class_or_the_named_one(repository: Path) -> None:
    """The hardware classes are one node, two nodes (with their interconnect), and an earlier machine."""
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
    told("accept")
    assert [file.exists() for file in files] == [False, True, True]
    told("accept", "--hardware-class", old.hardware_class, "--reason", "x")
    assert files[0].exists()


def test_accept_without_runs_says_how_to_measure(repository: Path) -> None:
    measured("1", 5)
    gpu = make_gpu_machine().hardware_class
    for words, where in ((("fsdp-*",), "'fsdp-*' in"), (("--hardware-class", gpu), f"'*' on {gpu} in")):
        result = told("accept", *words, status=2)
        assert f"no measured run of a case matching {where} .perfsuite/runs" in result
        assert "pytest bench_cases --perf-min-launches=5" in result
