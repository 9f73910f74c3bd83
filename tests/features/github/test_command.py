import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.features.github.command import commented, conclusion, fenced
from perfsuite.features.github.issue import LONGEST
from perfsuite.results.session_file import CaseChange, JudgeChanges, Measurement, Skipped
from tests.cli.commands import error_of, flat, run
from tests.features.github.test_issue import URL
from tests.gh import Gh
from tests.outcomes import GOOD, NOISY, SLOW, crashed
from tests.processes import executable
from tests.samples import COMMIT, make_session_file, write_session
from tests.synthetic import git


@pytest.fixture
def on_pull_request(gh: Gh, monkeypatch: pytest.MonkeyPatch) -> Gh:
    """Return a fake gh. This process is a job of pull request 12, which has no comments."""
    monkeypatch.setenv("GITHUB_REF", "refs/pull/12/merge")
    monkeypatch.delenv("HEAD_SHA", raising=False)
    comments(gh)
    return gh


HEAD = "c0ffee00" * 5
OLDER = "decaf000" * 5
MERGE = "badcab1e" * 5


def comments(gh: Gh, *comments: dict[str, Any]) -> None:
    commits = [{"oid": COMMIT}, {"oid": OLDER}, {"oid": HEAD}]
    gh.answers({"headRefOid": HEAD, "comments": comments, "commits": commits})


def answer(
    *results: Measurement, name: str = "dry", status: int = 0, words: Sequence[str] = (), **changes: Any
) -> str:
    file = write_session(Path(), *results, **changes)
    words = (str(file), "--run-url", URL, "--name", name, *words)
    return flat(run("github", "comment", *words, status=status).output)


def check_of(gh: Gh) -> dict[str, Any]:
    """Return the check that was sent last."""
    check: dict[str, Any] = json.loads(gh.calls.splitlines()[-1])
    return check


def test_answers_a_pull_request_with_a_check(on_pull_request: Gh) -> None:
    said = answer(GOOD, SLOW, name="h100", commit=HEAD)
    assert said.endswith(f"pull request 12: new comment, check h100 of {HEAD[:12]}: failure")
    assert "pr comment 12 --body-file -\n## perfsuite: 1 regressed, 1 passed" in on_pull_request.calls
    check = check_of(on_pull_request)
    assert (check["name"], check["head_sha"], check["conclusion"]) == ("h100", HEAD, "failure")
    assert check["output"]["title"] == "1 regressed, 1 passed"


def test_updates_only_our_own_comment(on_pull_request: Gh) -> None:
    at = "https://github.com/o/r/pull/12#issuecomment-"
    others = {"viewerDidAuthor": False, "body": "<!-- perfsuite: comment dry -->", "url": f"{at}1"}
    another = {"viewerDidAuthor": True, "body": "<!-- perfsuite: comment h100 -->", "url": f"{at}2"}
    comments(on_pull_request, others, another)
    assert "new comment" in answer(GOOD)
    ours = {**another, "body": "x <!-- perfsuite: comment dry -->", "url": f"{at}3"}
    comments(on_pull_request, others, another, ours)
    assert "updated comment" in answer(GOOD)
    assert re.findall("PATCH (.*) --field", on_pull_request.calls) == [
        "repos/{owner}/{repo}/issues/comments/3"
    ]


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
def test_check_is_green_if_all_was_judged(results: list[Measurement], meaning: str) -> None:
    assert conclusion([make_session_file(*results)]) == meaning


WORDS_OF_STATUS = {"interrupted": "interrupted", "running": "running or killed"}


def test_a_finished_session_is_green(on_pull_request: Gh) -> None:
    assert answer(GOOD).endswith("success")


@pytest.mark.parametrize("status", WORDS_OF_STATUS)
def test_unfinished_session_is_never_green(status: str) -> None:
    cut_short = make_session_file(GOOD, status=status)
    assert conclusion([cut_short]) == conclusion([make_session_file(GOOD), cut_short]) == "neutral"
    assert conclusion([make_session_file(SLOW, status=status)]) == "failure"


@pytest.mark.parametrize(("status", "word"), WORDS_OF_STATUS.items())
def test_a_comment_names_an_unfinished_session(on_pull_request: Gh, status: str, word: str) -> None:
    documents.write(Path("cut.json"), make_session_file(GOOD, status=status))
    run("github", "comment", "cut.json", "--run-url", URL)
    assert check_of(on_pull_request)["conclusion"] == "neutral"
    assert check_of(on_pull_request)["output"]["title"] == f"{word}, 1 passed"
    assert f"## perfsuite: {word}, 1 passed" in on_pull_request.calls


def test_changed_judge_files_are_reported_first(on_pull_request: Gh) -> None:
    changes = JudgeChanges(
        base=OLDER, sentences=("waiver of * on tokens/s added", "conftest.py added: 1 line")
    )
    answer(GOOD, judge_changes=changes)
    branch = "This branch changes the files that judge it, compared with decaf000deca:"
    heading = f"## perfsuite: 1 passed\n\n**{branch}**\n"
    assert (
        f"{heading}\n- waiver of &#42; on tokens/s added\n- conftest.py added: 1 line\n"
        in on_pull_request.calls
    )
    assert (
        check_of(on_pull_request)["output"]["title"]
        == "1 passed; this branch changes the files that judge it"
    )


def test_missing_results_are_not_green() -> None:
    assert conclusion([]) == "neutral"
    assert conclusion([make_session_file(GOOD), make_session_file()]) == "neutral"


def test_comparison_that_lost_a_case_is_not_green() -> None:
    lost = CaseChange(case_id="gone", nodeid="test_it.py::test_it[gone]", kind="deleted")
    unasked = lost.replace(asked=False)
    assert conclusion([make_session_file(GOOD, case_changes=(lost,))]) == "neutral"
    assert (
        conclusion([make_session_file(GOOD, cases_unknown="arm A's cases could not be collected")])
        == "neutral"
    )
    assert conclusion([make_session_file(GOOD, case_changes=(unasked,))]) == "success"


def test_baseline_without_case_is_not_green() -> None:
    assert conclusion([make_session_file(GOOD, unclaimed=("llama-8b: deselected",))]) == "neutral"


def test_checks_the_measured_commit(on_pull_request: Gh) -> None:
    assert "check dry of decaf000deca: success" in answer(GOOD, commit=OLDER)
    assert check_of(on_pull_request)["head_sha"] == OLDER
    moved = "Measured: decaf000deca. The pull request is now at c0ffee00c0ff, which was not measured."
    assert f"--body-file -\n**{moved}**\n" in on_pull_request.calls
    answer(GOOD, commit=MERGE, words=("--commit", "f" * 40))
    assert check_of(on_pull_request)["head_sha"] == "f" * 40


def test_merge_into_base_measured_its_second_parent(on_pull_request: Gh) -> None:
    on_pull_request.knows_commit("b" * 40, OLDER)
    answer(GOOD, commit=MERGE)
    assert check_of(on_pull_request)["head_sha"] == OLDER


def test_a_merge_inside_a_pull_request_is_checked_itself(on_pull_request: Gh) -> None:
    on_pull_request.knows_commit(OLDER, HEAD)
    answer(GOOD, commit=COMMIT)
    assert check_of(on_pull_request)["head_sha"] == COMMIT


@pytest.mark.parametrize("parents", [(), ("b" * 40,), ("b" * 40, "a" * 40), (OLDER, "a" * 40)])
def test_a_commit_of_another_branch_gets_no_check(on_pull_request: Gh, parents: Sequence[str]) -> None:
    on_pull_request.knows_commit(*parents)
    said = answer(GOOD, commit=MERGE, status=2)
    assert f"the results are of commit {MERGE[:12]}, which is not a commit or merge of pull request" in said
    assert "With --commit, give the commit that was measured" in said
    assert "check-runs" not in on_pull_request.calls


def test_refuses_results_of_an_unclear_commit(on_pull_request: Gh) -> None:
    assert "the results are of commit None, but a check is attached to exactly one measured" in answer(
        GOOD, commit=None, status=2
    )
    files = [write_session(Path(name), GOOD, commit=commit) for name, commit in (("a", HEAD), ("b", OLDER))]
    assert "of commit c0ffee00c0ff, decaf000deca, but a check is attached" in error_of(
        "github", "comment", *files, "--run-url", URL
    )
    bad = answer(GOOD, words=("--commit", "main"), status=2)
    assert "--commit 'main': expected a full commit hash of 40 hexadecimal digits" in bad


MARK = "<!-- perfsuite: comment x -->"


QUOTED = commented(
    [make_session_file(crashed("@octocat <script> </details> #1 <!-- ``` [a](http://b)"))], URL, MARK
)


@pytest.mark.parametrize("markup", ["@octocat", "&#64;octocat", "<script", "#1 ", "&#35;1", "```", "[a]("])
def test_quoted_text_mentions_nobody(markup: str) -> None:
    assert markup not in QUOTED


def test_quoted_text_keeps_its_words_and_our_markup() -> None:
    assert "@\u200boctocat" in QUOTED
    assert QUOTED.count("<!--") == 1
    assert QUOTED.count("<details>") == QUOTED.count("</details>")


def test_cut_comment_closes_its_folds() -> None:
    skips = (
        Skipped(nodeid="n", case_id=f"{number}-{'x' * 500}", framework="f", reason="r")
        for number in range(300)
    )
    text = commented([make_session_file(GOOD, skipped=tuple(skips))], URL, MARK)
    assert LONGEST - 600 < len(text) < LONGEST + 100
    assert text.count("<details>") == text.count("</details>") == 2, "one fold has the passed cases"
    assert text.endswith(f"\nThe rest is left out.\n</details>\n\n[The job]({URL})\n{MARK}")


def test_says_why_it_cannot_answer(on_pull_request: Gh, monkeypatch: pytest.MonkeyPatch) -> None:
    (on_pull_request.program.parent / "answer").write_text("Not logged in")
    assert "gh pr view did not print JSON" in answer(GOOD, status=2)
    monkeypatch.setenv("GITHUB_REF", "refs/heads/main")
    assert "--name 'a --> b': expected up to 60 letters" in answer(GOOD, name="a --> b", status=2)
    no_pull_request = (
        "GITHUB_REF is 'refs/heads/main', which is not a pull request: give --pull-request NUMBER"
    )
    assert no_pull_request in answer(GOOD, status=2)
    monkeypatch.setenv("GITHUB_REF", "refs/pull/12/merge")
    answer(GOOD, name="a --> b", status=2)
    assert on_pull_request.calls.count("\n") == 1, "only the first call asked GitHub"
    comments(on_pull_request)
    words = ("github", "comment", "results.json", "--run-url", URL, "--pull-request", "3")
    assert f"pull request 3: new comment, check perfsuite of {COMMIT[:12]}: success" in run(*words).output


NEW = Path("baselines/h100/case.json")


def propose(*words: str, status: int = 0) -> str:
    given = ("--hardware", "h100", "--reason", "torch 2.14, see @octocat", *words)
    return flat(run("github", "propose", *given, status=status).output)


def committed() -> str:
    """Return the files of the newest commit."""
    return git(Path(), "show", "--name-only", "--format=", "HEAD")


@pytest.fixture
def proposed(clone: Path, gh: Gh) -> str:
    """Propose a new baseline and a table while a file of the user is staged. Return the output."""
    documents.write_text(NEW, "{}")
    documents.write_text(Path("out/before-after.txt"), "case\n```\n@octocat 1 -> 2")
    Path("mine").write_text("")
    git(clone, "add", "mine")
    return propose()


@pytest.mark.usefixtures("proposed")
def test_only_new_baselines_are_committed(clone: Path) -> None:
    assert committed() == str(NEW)
    assert git(clone, "status", "--porcelain", "--untracked-files=no") == "A  mine"
    assert git(clone, "show", "--no-patch", "--format=%s") == "Baselines of h100"


def test_new_baselines_become_a_pull_request(clone: Path, gh: Gh, proposed: str) -> None:
    assert proposed.endswith("https://example.org/made")
    branch = git(clone, "rev-parse", "--abbrev-ref", "HEAD")
    assert branch.startswith("baselines-h100-20")
    assert branch in git(clone, "ls-remote", "--heads", "origin")
    assert f"pr create --title Baselines of h100 --head {branch} --body-file -\n" in gh.calls


@pytest.mark.parametrize("start", ["main", "HEAD"])
def test_names_the_branch_if_gh_fails(clone: Path, gh: Gh, start: str) -> None:
    git(clone, "checkout", "--quiet", *(["--detach"] if start == "HEAD" else []), start)
    documents.write_text(NEW, "{}")
    executable(gh.program, 'case "$1" in pr) echo "not permitted" >&2; exit 1 ;; esac')
    said = propose(status=2)
    [branch] = re.findall(r"refs/heads/(baselines-\S+)", git(clone, "ls-remote", "--heads", "origin"))
    pushed = f"gh pr create: not permitted. The baselines are pushed, in the branch {branch}. To open its"
    assert pushed in said
    command = f"gh pr create --title 'Baselines of h100' --head {branch} --body 'torch 2.14, see @octocat'"
    assert said.endswith(f"run: {command}")
    assert git(clone, "rev-parse", "--abbrev-ref", "HEAD") == start


@pytest.mark.usefixtures("proposed")
def test_a_pull_request_quotes_the_reason_and_the_table(gh: Gh) -> None:
    assert "torch 2.14, see @\u200boctocat\n\n````text\ncase\n```\n@octocat 1 -> 2\n````\n" in gh.calls


def test_takes_only_baselines_from_an_artifact(clone: Path, gh: Gh, tmp_path: Path) -> None:
    """The artifact is not trusted, because the machine that measured might have run anybody's code."""
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
    absolute = clone / "baselines"  # pytest's ini file gives an absolute path
    propose("--measured", "out/measured", "--out", "out/measured/out", "--baselines", str(absolute))
    assert committed() == "baselines/cpu/case.json"
    assert git(clone, "status", "--porcelain") == ""
    assert "the token" not in gh.calls


@pytest.fixture
def refused(clone: Path, gh: Gh) -> Iterator[None]:
    """Check that after the test, the branch is the same and that there is no pull request."""
    yield
    assert git(clone, "branch", "--show-current") == "main"
    assert "pr create" not in gh.calls


@pytest.mark.usefixtures("refused")
def test_a_pull_request_needs_changes() -> None:
    assert "nothing in baselines differs from the commit" in propose(status=2)


@pytest.mark.usefixtures("refused")
def test_a_pull_request_needs_measured_baselines() -> None:
    assert "there is no directory out/baselines" in propose("--measured", "out", status=2)


@pytest.mark.usefixtures("refused")
def test_a_pull_request_needs_a_path_in_the_repository(clone: Path) -> None:
    absolute = ("--measured", "out", "--baselines", str(clone.parent))
    assert "give a path relative to the repository" in propose(*absolute, status=2)


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(("name", "others"), [("hardware", "--reason=x"), ("reason", "--hardware=h100")])
def test_a_pull_request_needs_hardware_and_a_reason(name: str, others: str) -> None:
    message = error_of("github", "propose", f"--{name}= ", others)
    assert f"--{name} is empty: give the hardware that was measured, and the reason" in message


@pytest.mark.usefixtures("refused")
@pytest.mark.skipif(shutil.which("gh") is not None, reason="gh is installed")
def test_a_pull_request_needs_gh(gh: Gh) -> None:
    documents.write_text(NEW, "{}")
    gh.program.unlink()
    assert "gh, GitHub's command line, cannot be started" in propose(status=2)


def test_a_block_of_code_ends_where_it_should() -> None:
    assert fenced("a\n") == "```text\na\n```"
    assert fenced("````\n") == "`````text\n````\n`````"


@pytest.mark.parametrize("lacks", ["headRefOid", "comments", "commits"])
def test_reports_a_gh_answer_without_a_field(on_pull_request: Gh, lacks: str) -> None:
    whole = {"headRefOid": HEAD, "comments": [], "commits": [{"oid": HEAD}]}
    on_pull_request.answers({name: value for name, value in whole.items() if name != lacks})
    said = answer(GOOD, commit=HEAD, status=2)
    assert f"gh pr view printed an unexpected answer: {lacks}: Field required" in said
    on_pull_request.answers([])
    assert "gh pr view printed an unexpected answer" in answer(GOOD, commit=HEAD, status=2)


def test_help_does_not_list_what_workflows_call() -> None:
    commands = re.findall(r"^│ ([\w-]+) ", run("--help").stdout, re.MULTILINE)
    assert "report" in commands
    assert "github" not in commands
