import importlib.util
import json
from functools import partial
from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.features.history import command, page
from tests.cli import commands
from tests.features.history.nights import TOKENS_PER_STEP, Level, write_history
from tests.samples import (
    COMMIT,
    make_baseline,
    make_case,
    make_figures,
    make_result,
    make_run,
    write_session,
)
from tests.synthetic import commit, git, make_repository

RUN = make_run(figures=make_figures(step_s_p50=0.25))


invoke = partial(commands.run, "history")
error_of = partial(commands.error_of, "history")


def in_store(session: str, *, commit: str | None = COMMIT, inject: str | None = None) -> Path:
    """Write a session into the store, like pytest."""
    result = make_result(RUN.replace(inject=inject), before=None)
    started_at = f"2026-01-{session}T00:00:00+00:00"
    return write_session(Path(".perfsuite/runs", session), result, commit=commit, started_at=started_at)


def test_names_a_store_or_history_without_a_session() -> None:
    assert "no session in .perfsuite/runs: measure first (pytest bench_cases)" in error_of("add")
    assert "no history in .perfsuite/history" in error_of("list")


def test_add_takes_only_new_sessions() -> None:
    in_store("01")
    assert "added: .perfsuite/history/cpu-test-2c/" in invoke("add").output
    in_store("02")
    added = invoke("add").output
    assert "already added: .perfsuite/runs/01/results.json" in added
    assert added.count("\nadded: ") == 1
    assert "20260102T000000Z" in added
    assert "2 series in 2 sessions" in invoke("trend").output


def test_add_fails_if_nothing_named_can_be_kept() -> None:
    bad = in_store("01", commit=None)
    in_store("02", inject="slowdown=10%")
    good = in_store("03")
    assert f"nothing to keep in {bad}" in error_of("add", bad, status=1)
    added = invoke("add", "--history", "kept").output
    assert f"left out of {bad}: the session has no commit" in added
    assert f"left out of .perfsuite/runs/02/results.json: {make_case().id}: a fault" in added
    assert added.count("added: kept/") == 1
    invoke("add", bad, good)


def test_add_names_broken_files_and_takes_others() -> None:
    Path("broken.json").write_text("{")
    in_store("01").rename("[bold]x.json")
    added = invoke("add", "broken.json", "[bold]x.json", "--history", "[h]", status=2).output
    assert "broken.json: not JSON" in added
    assert "added: [h]/cpu-test-2c/" in added
    assert "already added: [bold]x.json" in invoke("add", "[bold]x.json", "--history", "[h]").output


def test_failures_refuses_unknown_hardware() -> None:
    invoke("add", write_session(Path("night"), make_result(RUN)))
    said = commands.error_of("history", "failures", "--hardware-class", "h1000*")
    assert ".perfsuite/history has no session on h1000*. See: perfsuite history list" in said


LATER = "2026-01-02 0123abcd"


@pytest.fixture
def four_nights() -> None:
    """Add four nights: a failure in shadow mode, a pass that takes it back, a failure, and another pass."""
    good = make_result(RUN, before=None, judged_by="a")
    good = good.replace(verdict=good.verdict.replace(outcome="passed"))
    slow = good.replace(verdict=good.verdict.replace(outcome="regressed"))
    for day, result in enumerate((slow.replace(shadow=True), good, slow, good.replace(judged_by="b")), 1):
        started_at = f"2026-01-0{day}T00:00:00+00:00"
        invoke("add", write_session(Path(f"night-{day}"), result, started_at=started_at))


@pytest.mark.usefixtures("four_nights")
def test_failures_shows_later_retractions() -> None:
    _, first, second, total = invoke("failures").output.splitlines()
    start = f"cpu-test-2c {make_case().id} 2026-01-0"
    assert commands.flat(first) == f"{start}1 0123abcd regressed (shadow) {LATER}"
    assert commands.flat(second) == f"{start}3 0123abcd regressed no"
    assert total.startswith("1 failure in 4 sessions, and 1 more in shadow mode. In 1 of these failures,")


@pytest.mark.usefixtures("four_nights")
def test_failures_prints_json() -> None:
    back, kept = commands.rows(invoke("failures", "--json").stdout)
    assert (back["verdict"], back["taken_back"], kept["taken_back"]) == ("regressed (shadow)", LATER, None)


@pytest.mark.usefixtures("four_nights")
def test_failures_refuses_an_unknown_case() -> None:
    unknown = invoke("failures", "--case", "nosuch*", status=2).output
    assert "has no case that matches 'nosuch*'. See: perfsuite history list" in " ".join(unknown.split())


@pytest.mark.usefixtures("four_nights")
def test_failures_can_begin_at_a_day() -> None:
    none = invoke("failures", "--since", "2026-01-04").output
    assert none.startswith("0 failures in 1 session, and 0 more in shadow mode")


@pytest.fixture
def two_days() -> None:
    """Add a session of each of two days."""
    for day in ("01", "02"):
        in_store(day)
    invoke("add")


@pytest.mark.usefixtures("two_days")
def test_list_shows_newest_figures() -> None:
    _, line = invoke("list").output.splitlines()
    days = "2026-01-01 0123abcd 2026-01-02 0123abcd"
    assert commands.flat(line) == f"cpu-test-2c {make_case().id} 2 {days} 250.0 64.0 MiB 2 recorded"


@pytest.mark.usefixtures("two_days")
def test_list_prints_json() -> None:
    (row,) = commands.rows(invoke("list", "--json").stdout)
    assert (row["case"], row["step_s_p50"], row["verdicts"]) == (make_case().id, 0.25, {"recorded": 2})
    assert (row["sessions"], row["peak_memory_bytes"]) == (2, 64 * 2**20)
    assert commands.rows(invoke("list", "--json", "--case=nope*").stdout) == []


@pytest.mark.usefixtures("two_days")
@pytest.mark.parametrize("option", ["--since=2026-02-01", "--case=nope*", "--hardware-class=h100*"])
def test_list_says_if_no_case_matches(option: str) -> None:
    assert "no case in .perfsuite/history matches" in invoke("list", option).output


def test_history_is_pushed_and_pulled_by_branch(clone: Path) -> None:
    first = in_store("01")
    none = in_store("02", commit=None)
    second = in_store("03")
    assert invoke("pull").output == "perfsuite-history is checked out in history (a new branch)\n"
    assert [file.name for file in Path("history").iterdir()] == [".git"]
    invoke("push", first)
    invoke("push", first)
    assert git(clone, "rev-list", "--count", "origin/perfsuite-history") == "1", "there was nothing new"
    invoke("push", none, status=1)
    printed = invoke("push", second, "--notify", "NOT_SET").output
    assert "--notify: nothing was posted: the variable NOT_SET is not set. Set it" in printed
    assert git(clone, "rev-parse", "--abbrev-ref", "HEAD") == "main"
    git(clone, "worktree", "remove", "history")
    git(clone, "branch", "-D", "perfsuite-history")
    assert invoke("pull").output == "perfsuite-history is checked out in history\n"
    assert "2 recorded" in invoke("list", "--history", "history").output


def test_pull_never_loses_local_files(clone: Path) -> None:
    git(clone, "worktree", "add", "--quiet", "-b", "feature", "feature")
    Path("other").mkdir()
    mine = [Path(directory, "mine") for directory in ("feature", "other", "history")]
    for file in mine[:2]:
        file.write_text("")
    git(clone, "config", "core.excludesFile", str(clone / "ignored"))
    (clone / "ignored").write_text("mine\n")
    message = "feature has feature checked out, not perfsuite-history. Give an empty directory"
    assert message in error_of("pull", "--history", "feature")
    assert "fatal: 'other' already exists" in error_of("pull", "--history", "other")
    invoke("push", in_store("01"))
    mine[2].write_text("")
    named = (
        "history contains 1 file that git ignores, such as mine: move them to another directory, or commit"
    )
    assert named in error_of("pull")
    (clone / "ignored").unlink()
    assert "contains modified or untracked files" in error_of("pull")
    assert all(file.exists() for file in mine)


def test_push_adds_files_that_git_ignores(clone: Path) -> None:
    (clone / ".git/info/exclude").write_text("*.json\n")
    invoke("push", in_store("01"))
    assert "cpu-test-2c" in git(clone, "ls-tree", "-r", "--name-only", "origin/perfsuite-history")
    invoke("pull")
    assert "1 recorded" in invoke("list", "--history", "history").output


def subjects(clone: Path) -> list[str]:
    return git(clone, "log", "--format=%s", "origin/perfsuite-history").splitlines()


def commit_to_history(name: str, text: str = "") -> None:
    (Path("history") / name).write_text(text)
    commit(Path("history"), f"add {name}")


def test_commits_of_a_failed_push_are_pushed_later(clone: Path) -> None:
    invoke("pull")
    commit_to_history("first")
    invoke("push", in_store("01"))
    assert subjects(clone) == ["Results of a night", "add first"]


@pytest.fixture
def another_job(clone: Path) -> None:
    """Let another job push to the history, while this clone has a commit that was never pushed."""
    invoke("push", in_store("01"))
    start = git(clone, "rev-parse", "perfsuite-history")
    commit_to_history("other", "theirs")
    git(clone, "push", "--quiet", "origin", "perfsuite-history")
    git(Path("history"), "reset", "--quiet", "--hard", start)
    commit_to_history("mine")


@pytest.mark.usefixtures("another_job")
def test_pushes_after_the_commits_of_another_job(clone: Path) -> None:
    invoke("push", in_store("02"))
    assert subjects(clone)[:3] == ["Results of a night", "add mine", "add other"]


@pytest.mark.usefixtures("another_job")
def test_a_contradiction_with_another_job_is_named(clone: Path) -> None:
    commit_to_history("other", "mine")
    assert "they conflict with those of origin" in error_of("pull")
    assert git(clone, "log", "-1", "--format=%s", "perfsuite-history") == "add other"


@pytest.mark.usefixtures("another_job")
def test_a_push_during_the_push_loses_nothing(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "pull", lambda history_dir: None)
    invoke("push", in_store("02"))
    assert subjects(clone)[:3] == ["Results of a night", "add mine", "add other"]


def test_a_first_night_may_keep_nothing(clone: Path) -> None:
    said = invoke("push", in_store("01", commit=None)).output
    assert "nothing to keep in .perfsuite/runs/01/results.json" in said
    assert "nothing was pushed: perfsuite-history is created with the first result that can be kept" in said
    assert git(clone, "ls-remote", "--heads", "origin") == ""
    assert invoke("trend", "--history", "history").output == ("history has no session yet\n")
    assert json.loads(invoke("trend", "--history", "history", "--json").stdout)["sessions"] == 0
    assert "no history in elsewhere" in error_of("trend", "--history", "elsewhere")
    invoke("push", in_store("02"))
    assert git(clone, "rev-list", "--count", "origin/perfsuite-history") == "1"


def test_first_push_of_an_unreadable_file_fails(clone: Path) -> None:
    Path("broken.json").write_text("{")
    assert "nothing was pushed" in invoke("push", "broken.json", status=2).output


def test_add_says_that_a_session_did_not_end(tmp_path: Path) -> None:
    file = write_session(tmp_path, make_result(RUN, before=None), status="interrupted")
    assert f"{file}: The session was interrupted" in invoke("add", file).output


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        (["trend"], "to find trends: it needs the package numpy"),
        (["publish", "--out", "out"], "to publish a history: it needs the package asv"),
    ],
    ids=["trend", "publish"],
)
def test_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, words: list[str], needs: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = commands.run("history", *words, status=2)
    assert result.stdout == ""
    install = "which is not installed: pip install 'perfsuite[history]'"
    assert result.stderr == f"perfsuite history: {needs}, {install}\n"


def test_publish_names_numpy_if_only_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "numpy" else find_spec(name)
    )
    assert "to publish a history: it needs the package numpy, which is not installed" in commands.error_of(
        "history", "publish", "--out", "out"
    )


@pytest.fixture(scope="module")
def regressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a repository and its history.

    In the history, a case became slower. A reviewed baseline accepts the new speed.
    """
    root = tmp_path_factory.mktemp("regressed")
    case = make_case(hardware="h100")
    commits = make_repository(root / "repo", 30)
    write_history(
        root / "history", commits, [case], lambda _, night: Level(step_s=1.1 if night >= 15 else 1.0)
    )
    accepted = make_baseline(make_run(case=case, figures=make_figures(tokens_per_s=TOKENS_PER_STEP / 0.11)))
    accepted = accepted.replace(recorded_at="2024-02-28T12:00:00+00:00")
    documents.write(root / "reviewed" / "h100-80gb-sxm" / f"{case.id}.json", accepted)
    return root


def published(root: Path, out: Path, *options: object) -> str:
    invoke("publish", "--out", out, "--history", root / "history", "--repo", root / "repo", *options)
    return (out / "html" / page.FILE).read_text()


@pytest.mark.launch
def test_published_page_reads_the_named_baselines(regressed: Path, tmp_path: Path) -> None:
    assert "1 case, 1 worse" in published(regressed, tmp_path / "a")
    accepted = published(regressed, tmp_path / "b", "--baselines", regressed / "reviewed")
    assert "worse, accepted" in accepted
    assert "1 case, none worse" in accepted


def test_help_does_not_list_what_workflows_call() -> None:
    shown = invoke("--help").stdout
    assert "publish" in shown
    assert "push" not in shown


def test_usage_names_the_results_in_capitals() -> None:
    assert " history add [OPTIONS] [RESULTS]..." in commands.flat(invoke("add", "--help").stdout)


def test_list_refuses_the_directory_of_cases() -> None:
    error = commands.error_of("--cases", "mine", "history", "list")
    assert "Invalid value for '--cases': " in error
    assert " does not use it. Leave it out" in error
