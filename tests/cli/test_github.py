from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.cli.github import commented, conclusion, fenced
from perfsuite.cli.github_issue import LONGEST
from perfsuite.git import git
from perfsuite.results.session_file import Measurement, SessionFile, Skipped
from tests.cli.commands import run
from tests.cli.test_github_issue import GOOD, NOISY, SLOW, crashed
from tests.samples import write_session
from tests.synthetic import make_repository

URL = "https://example.org/runs/1"
GH = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$1 $2" in
  "pr view") cat "$TOLD" ;;
  "pr comment" | "pr create" | "api --method") cat >> "$CALLS"; echo "https://example.org/made" ;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a stand-in for gh was called with, and what came on its standard input."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gh").write_text(GH)
    (tmp_path / "bin" / "gh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    tell(tmp_path)
    return tmp_path / "calls"


def tell(tmp_path: Path, *comments: dict[str, Any]) -> None:
    (tmp_path / "told").write_text(json.dumps({"headRefOid": "c0ffee", "comments": comments}))


def answer(*results: Measurement, status: int = 0, **options: str) -> str:
    file = write_session(Path("session.json"), *results)
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = run("github", "comment", str(file), "--run-url", URL, *words, status=status)
    return str(done.output)


def test_a_pull_request_is_answered_by_a_comment_and_a_check(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_REF", "refs/pull/12/merge")
    assert answer(GOOD, SLOW, name="h100").endswith("pull request 12: new comment, check h100: failure\n")
    said = calls.read_text()
    assert "pr comment 12 --body-file -\n## perfsuite: 1 regressed, 1 passed" in said
    check = json.loads(said.splitlines()[-1])
    assert (check["name"], check["head_sha"], check["conclusion"]) == ("h100", "c0ffee", "failure")
    assert check["output"]["title"] == "1 regressed, 1 passed"


def test_our_own_comment_of_that_name_is_brought_up_to_date_and_no_other(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    at = "https://github.com/o/r/pull/12#issuecomment-"
    others = {"viewerDidAuthor": False, "body": "<!-- perfsuite: comment dry -->", "url": f"{at}1"}
    another = {"viewerDidAuthor": True, "body": "<!-- perfsuite: comment h100 -->", "url": f"{at}2"}
    tell(tmp_path, others, another)
    assert "new comment" in answer(GOOD, name="dry", pull_request="12")
    tell(tmp_path, others, another, {**another, "body": "x <!-- perfsuite: comment dry -->", "url": f"{at}3"})
    assert "comment brought up to date" in answer(GOOD, name="dry", pull_request="12")
    patched = re.findall("PATCH (.*) --field", calls.read_text())
    assert patched == ["repos/{owner}/{repo}/issues/comments/3"]


@pytest.mark.parametrize(
    ("results", "meaning"),
    [
        ([GOOD], "success"),
        ([GOOD, NOISY], "neutral"),
        ([], "neutral"),
        ([NOISY, SLOW], "failure"),
        ([crashed("x")], "failure"),
        ([GOOD, SLOW.replace(excused="waived")], "success"),
        ([GOOD, SLOW.replace(shadow=True)], "success"),
    ],
)
def test_a_check_is_red_only_for_what_fails_and_green_only_if_all_was_judged(
    results: list[Measurement], meaning: str
) -> None:
    assert conclusion(results) == meaning


def test_text_of_others_is_shown_and_mentions_nobody(tmp_path: Path) -> None:
    evil = "@octocat <script> </details> #1 <!-- ``` [a](http://b)"
    session = documents.read(write_session(tmp_path / "s.json", crashed(evil)), SessionFile)
    text = commented([session], URL, "<!-- perfsuite: comment x -->")
    assert "@\u200boctocat" in text
    for markup in ("@octocat", "&#64;octocat", "<script", "#1 ", "&#35;1", "```", "[a]("):
        assert markup not in text
    assert text.count("<!--") == 1
    assert text.count("<details>") == text.count("</details>")


def test_a_comment_is_cut_at_what_github_takes_with_its_folds_closed(tmp_path: Path) -> None:
    skip = Skipped(nodeid="n", case_id="c", framework="f", reason="r")
    many = [skip.replace(case_id=f"{number}-{'x' * 500}") for number in range(300)]
    session = documents.read(write_session(tmp_path / "s.json", GOOD, skipped=tuple(many)), SessionFile)
    text = commented([session], URL, "<!-- perfsuite: comment x -->")
    assert LONGEST - 600 < len(text) < LONGEST + 100
    assert text.count("<details>") == 2, "what passed is folded, too"
    assert text.endswith(f"\nThe rest is cut.\n</details>\n\n[The job]({URL})\n<!-- perfsuite: comment x -->")
    assert text.count("</details>") == 2
    assert text.endswith(f"[The job]({URL})\n<!-- perfsuite: comment x -->")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a --> b", "pull_request": "1"}, "--name 'a --> b': expected up to 60 letters"),
        ({}, "GITHUB_REF is 'refs/heads/main', which is no pull request: give --pull-request NUMBER"),
    ],
)
def test_bad_names_and_jobs_of_no_pull_request_are_refused(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_REF", "refs/heads/main")
    assert message in answer(GOOD, status=2, **options)
    assert not calls.exists()


def test_an_answer_of_gh_that_is_no_json_is_told(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "told").write_text("Not logged in")
    assert "gh pr view printed no JSON" in answer(GOOD, status=2, pull_request="3")


@pytest.fixture
def clone(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with an origin and a baseline that is not committed."""
    here = tmp_path / "clone"
    make_repository(here, 1)
    git("init", "--quiet", "--bare", str(tmp_path / "origin"), cwd=here)
    git("remote", "add", "origin", str(tmp_path / "origin"), cwd=here)
    monkeypatch.chdir(here)
    return here


def propose(*words: str, status: int = 0) -> str:
    given = ("--hardware", "h100", "--reason", "torch 2.14, see @octocat", *words)
    return str(run("github", "propose", *given, status=status).output)


def test_new_baselines_become_a_pull_request_with_the_figures(clone: Path, calls: Path) -> None:
    documents.write_text(clone / "baselines/h100/case.json", "{}")
    documents.write_text(clone / "out/before-after.txt", "case\n```\n@octocat 1 -> 2")
    assert propose().endswith("https://example.org/made\n")
    assert git("show", "--name-only", "--format=%s", "HEAD", cwd=clone).split("\n\n") == [
        "Baselines of h100",
        "baselines/h100/case.json\n",
    ]
    branch = git("rev-parse", "--abbrev-ref", "HEAD", cwd=clone).strip()
    assert branch.startswith("baselines-h100-20")
    assert branch in git("ls-remote", "--heads", "origin", cwd=clone)
    said = calls.read_text()
    assert f"pr create --title Baselines of h100 --body-file - --head {branch}\n" in said
    assert "torch 2.14, see @\u200boctocat\n\n````text\ncase\n```\n@octocat 1 -> 2\n````\n" in said


def test_of_an_artifact_only_baselines_are_taken_and_no_link_is_followed(
    clone: Path, calls: Path, tmp_path: Path
) -> None:
    """Code of anybody may have run on the machine that measured."""
    secret = tmp_path / "secret"
    secret.write_text("the token")
    measured = clone / "out" / "measured"
    for name in ("Makefile", "baselines/conftest.py", "baselines/cpu/case.json", "case.json"):
        documents.write_text(measured / name, "evil: ;")
    (measured / "out").mkdir()
    (measured / "baselines" / "link.json").symlink_to(secret)
    (measured / "baselines" / "dir").symlink_to(tmp_path)
    (measured / "out" / "before-after.txt").symlink_to(secret)
    (clone / ".git" / "info" / "exclude").write_text("out/\n")
    propose("--measured", "out/measured", "--out", "out/measured/out")
    assert git("show", "--name-only", "--format=", "HEAD", cwd=clone) == "baselines/cpu/case.json\n"
    assert git("status", "--porcelain", cwd=clone) == ""
    assert "the token" not in calls.read_text()


def test_without_anything_new_no_pull_request_is_opened(clone: Path, calls: Path) -> None:
    assert "nothing in baselines differs from the commit" in propose(status=2)
    assert "there is no directory out/baselines" in propose("--measured", "out", status=2)
    absolute = ("--measured", "out", "--baselines", str(clone))
    assert "give it relative to the repository" in propose(*absolute, status=2)
    assert "pr create" not in calls.read_text()


def test_a_proposal_takes_nothing_else_along_and_begins_nothing_without_gh(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents.write_text(clone / "baselines/h100/case.json", "{}")
    (clone / "mine").write_text("")
    git("add", "mine", cwd=clone)
    branch = git("branch", "--show-current", cwd=clone)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", path.partition(":")[2])
    if shutil.which("gh") is None:
        assert "gh, GitHub's command line, cannot be started" in propose(status=2)
        assert git("branch", "--show-current", cwd=clone) == branch
    monkeypatch.setenv("PATH", path)
    propose()
    assert git("show", "--name-only", "--format=", "HEAD", cwd=clone) == "baselines/h100/case.json\n"
    assert git("status", "--porcelain", cwd=clone) == "A  mine\n"


def test_a_proposal_says_what_and_why(clone: Path) -> None:
    for name, given in (("hardware", {"reason": "x"}), ("reason", {"hardware": "h100"})):
        words = [f"--{name}= ", *(f"--{key}={value}" for key, value in given.items())]
        told = run("github", "propose", *words, status=2).output
        assert f"--{name} is empty: say what was measured, and why" in told


def test_a_block_of_code_ends_where_it_should() -> None:
    assert fenced("a\n") == "```text\na\n```"
    assert fenced("````\n") == "`````text\n````\n`````"
