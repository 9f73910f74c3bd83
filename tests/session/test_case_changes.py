"""Tests that a comparison notices the cases of arm A that arm B no longer has.

They use real repositories, with changes like those in pull requests.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from perfsuite.case.case import Case, CollectedTest, KnownIssue, Topology
from perfsuite.case.model import Model
from perfsuite.launch.arm import HERE, Arm, resolve
from perfsuite.results.session_file import CaseChange, lost_cases
from perfsuite.session.case_changes import (
    Selection,
    _changes,
    case_changes,
    differences,
)
from tests.samples import make_case, make_result, make_run
from tests.synthetic import commit, git

FILE = """
import pytest
from perfsuite import Case, Fake, Topology

CASE = Case(model="llama-tiny", framework=Fake(), sequence_length=64, micro_batch=4, hardware="cpu",
            topology=Topology(processes_per_node=2))

@pytest.mark.parametrize("case", [CASE, CASE.replace(micro_batch=2)])
def test_it(bench, case):
    bench(case)
"""
B4, B2, B1 = (f"fake-llama-tiny-s64-b{size}-fp32-1x2" for size in (4, 2, 1))
DROPS = """
def pytest_collection_modifyitems(items):
    items[:] = [each for each in items if "b2" not in each.name]
"""


def of_test(case: Case, name: str = "test_it", **changes: Any) -> CollectedTest:
    nodeid = f"bench_cases/test_a.py::{name}[{case.id}]"
    return CollectedTest(**{"nodeid": nodeid, "case": case, "marks": tuple(case.markers), **changes})


def told(a: list[CollectedTest], b: list[CollectedTest]) -> list[tuple[str, str, str]]:
    return [(change.case_id, change.kind, change.difference) for change in _changes(a, b, asked=True)]


SMALL = make_case(micro_batch=2)
LARGE = make_case(micro_batch=4)


def test_equal_cases_are_no_change() -> None:
    both = [of_test(SMALL), of_test(LARGE)]
    assert told(both, [*reversed(both)]) == []
    assert told([], both) == []


def test_a_case_without_a_successor_is_deleted() -> None:
    assert told([of_test(SMALL), of_test(LARGE)], [of_test(LARGE)]) == [(SMALL.id, "deleted", "")]
    in_another_test = of_test(make_case(micro_batch=1), "test_other")
    assert told([of_test(SMALL)], [in_another_test]) == [(SMALL.id, "deleted", "")]


def test_nearest_new_case_replaces_the_old_one() -> None:
    less = LARGE.replace(steps=10)
    other = SMALL.replace(seed=7, learning_rate=1e-4)
    changes = told([of_test(SMALL), of_test(LARGE)], [of_test(less), of_test(other)])
    assert changes == [
        (SMALL.id, "changed", f"{other.id}: learning_rate 0.001 -> 0.0001, seed 0 -> 7"),
        (LARGE.id, "changed", f"{less.id}: steps 20 -> 10"),
    ]


def test_many_cases_are_matched_by_position() -> None:
    """To compare every pair would take minutes."""
    then = [of_test(SMALL.replace(micro_batch=size)) for size in range(1, 301)]
    now = [of_test(test.case.replace(steps=10)) for test in then]
    changes = told(then, now)
    assert [kind for _, kind, _ in changes] == ["changed"] * 300
    assert all(words.endswith(": steps 20 -> 10") for _, _, words in changes)
    _, _, first = told(then, now[::-1])[0]
    assert first.endswith(": micro_batch 1 -> 300, steps 20 -> 10")


def test_matches_cases_within_their_own_test() -> None:
    then = [of_test(SMALL.replace(micro_batch=size), f"test_{size}") for size in range(1, 301)]
    now = [of_test(test.case.replace(steps=10), f"test_{test.case.micro_batch}") for test in then[::-1]]
    assert all(words.endswith(": steps 20 -> 10") for _, _, words in told(then, now))


def test_sees_changes_that_the_id_hides() -> None:
    issue = KnownIssue(url="https://example.org/1", failure="crash")
    excused = SMALL.replace(known_issue=issue, may_run_out_of_memory=True)
    ((_, kind, words),) = told([of_test(SMALL)], [of_test(excused)])
    assert kind == "changed"
    assert "may_run_out_of_memory False -> True" in words
    assert "known_issue" in words
    (excuse,) = _changes([of_test(SMALL)], [of_test(excused)], asked=True)
    assert lost_cases([excuse], [make_result(make_run(case=SMALL))]) == (), "the work is the same"
    moved = SMALL.replace(hardware=("h100",))
    assert told([of_test(SMALL)], [of_test(moved)]) == [(SMALL.id, "re-marked", "cpu -> h100")]


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"left_out": "skipped: too slow"}, "skipped", "too slow"),
        ({"left_out": "skipped"}, "skipped", ""),
        ({"left_out": "deselected"}, "deselected", ""),
        ({"left_out": "deselected", "marks": ("cpu", "slow")}, "re-marked", "cpu -> cpu, slow"),
    ],
)
def test_omitted_case_of_arm_b_has_its_reason(changes: dict[str, Any], kind: str, words: str) -> None:
    assert told([of_test(SMALL)], [of_test(SMALL, **changes)]) == [(SMALL.id, kind, words)]
    assert told([of_test(SMALL, left_out="skipped")], [of_test(SMALL, **changes)]) == []


def test_other_work_under_the_same_id_was_not_compared() -> None:
    """The name of a configuration file is in the id, but its text is not."""
    two, four = (
        SMALL.replace(
            model=Model.from_config({"model_type": "llama", "num_hidden_layers": layers}, name="ours")
        )
        for layers in (2, 4)
    )
    assert two.id == four.id
    (change,) = _changes([of_test(two)], [of_test(four)], asked=False)
    assert lost_cases([change], [make_result(make_run(case=four))]) == (change,)


def test_names_fields_by_path_and_cuts_many() -> None:
    assert differences(SMALL, SMALL.replace(topology=Topology(processes_per_node=1))) == (
        "topology.processes_per_node 2 -> 1"
    )
    assert differences(SMALL, SMALL.replace(model="gpt2-large")) == "model.name gpt2-tiny -> gpt2-large"
    many = SMALL.replace(steps=10, seed=1, micro_batch=1, precision="bf16", compile=True, timeout_s=9.0)
    assert differences(SMALL, many).endswith("and 1 more")


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a repository whose branch main has two cases, and make it the current directory."""
    repo = tmp_path / "repo"
    (repo / "bench_cases").mkdir(parents=True)
    git(repo, "init", "--quiet", "--initial-branch=main")
    (repo / "bench_cases/test_a.py").write_text(FILE)
    (repo / ".gitignore").write_text(".perfsuite\n__pycache__\n.pytest_cache\n")
    commit(repo, "first")
    monkeypatch.chdir(repo)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # the inner pytest runs are not workers of xdist
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")
    return repo


def arms(repo: Path, text: str = "main") -> tuple[Arm, Arm]:
    return resolve("--a", text, root=repo, store=repo / ".perfsuite"), HERE


def found(repo: Path, *words: str, text: str = "main") -> tuple[tuple[CaseChange, ...], str | None]:
    selection = Selection(paths=[Path("bench_cases")], words=words, is_directory_of_cases=True)
    return case_changes(arms(repo, text), selection, repo / ".perfsuite")


def edit(repo: Path, before: str, after: str) -> None:
    file = repo / "bench_cases/test_a.py"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


PARAMETERS = "[CASE, CASE.replace(micro_batch=2)]"


@pytest.mark.launch
@pytest.mark.parametrize(
    ("after", "kind", "words"),
    [
        ("[CASE]", "deleted", ""),
        pytest.param(
            "[CASE, CASE.replace(micro_batch=1)]",
            "changed",
            f"{B1}: micro_batch 2 -> 1",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            '[CASE, CASE.replace(micro_batch=2, hardware="h100")]',
            "re-marked",
            "cpu -> h100",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "[CASE, pytest.param(CASE.replace(micro_batch=2), marks=pytest.mark.skip('slow'))]",
            "skipped",
            "slow",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_case_that_a_branch_edits_is_listed(repo: Path, after: str, kind: str, words: str) -> None:
    edit(repo, PARAMETERS, after)
    ((change,), unknown) = found(repo, "-k", "b4 or b2")
    assert (change.case_id, change.kind, change.difference, unknown) == (B2, kind, words, None)
    assert change.nodeid == f"bench_cases/test_a.py::test_it[{B2}]"
    if kind == "re-marked":
        assert [listed.case_id for listed in found(repo, "-m", "cpu")[0]] == [B2]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("file", "text"), [("conftest.py", DROPS), ("pytest.ini", "[pytest]\naddopts = -k b4\n")]
)
def test_lists_cases_deselected_by_hook_or_option(repo: Path, file: str, text: str) -> None:
    (repo / file).write_text(text)
    ((change,), unknown) = found(repo, "-m", "cpu")
    assert (change.case_id, change.kind, unknown) == (B2, "deselected", None)


@pytest.mark.nightly
def test_inner_worktree_has_its_own_settings(repo: Path) -> None:
    """The worktree of arm A is inside arm B's directory, but arm B's settings must not affect it."""
    (repo / "sub").mkdir()
    (repo / "pytest.ini").write_text("[pytest]\naddopts = -k b4\n")
    commit(repo, "arm A has settings, arm B has none")
    (repo / "pytest.ini").unlink()
    assert found(repo, text="main") == ((), None), "arm A's settings exclude the smaller case"
    assert [change.case_id for change in found(repo, text="main~1")[0]] == []


@pytest.mark.nightly
def test_case_newly_on_main_is_not_lost(repo: Path) -> None:
    git(repo, "checkout", "--quiet", "-b", "feature")
    git(repo, "checkout", "--quiet", "main")
    edit(repo, PARAMETERS, PARAMETERS.replace("]", ", CASE.replace(micro_batch=1)]"))
    commit(repo, "a case more on main")
    git(repo, "checkout", "--quiet", "feature")
    edit(repo, PARAMETERS, "[CASE]")
    changes, unknown = found(repo)
    assert {change.case_id: change.kind for change in changes} == {B1: "new", B2: "deleted"}
    assert unknown is None


@pytest.mark.nightly
def test_no_common_commit_loses_all_missing(repo: Path) -> None:
    git(repo, "checkout", "--quiet", "--orphan", "other")
    edit(repo, PARAMETERS, "[CASE]")
    commit(repo, "another beginning")
    ((change,), _) = found(repo)
    assert (change.case_id, change.kind) == (B2, "deleted")


@pytest.mark.launch
def test_reports_uncollectable_cases_as_unknown(repo: Path) -> None:
    edit(repo, "import pytest", "import nosuch_module")
    commit(repo, "broken")
    edit(repo, "import nosuch_module", "import pytest")
    changes, unknown = found(repo)
    assert changes == ()
    assert unknown is not None
    why = "it is unknown which cases vanished, because arm A's cases could not be collected: "
    assert unknown.startswith(why)
    assert "No module named 'nosuch_module'" in unknown
    assert unknown.startswith("it is unknown which cases vanished, because arm ")


@pytest.mark.nightly
def test_node_id_loses_no_other_test_of_its_file(repo: Path) -> None:
    file = repo / "bench_cases/test_a.py"
    other = (
        FILE.partition("\n\n")[2]
        .replace("test_it", "test_b")
        .replace(PARAMETERS, "[CASE.replace(micro_batch=1)]")
    )
    other = other[other.index("@") :]
    file.write_text(FILE + other)
    commit(repo, "another test")
    edit(repo, other, "")
    edit(repo, PARAMETERS, "[CASE]")
    selection = Selection(paths=[file], names={file: ["test_it"]})
    ((change,), unknown) = case_changes(arms(repo), selection, repo / ".perfsuite")
    assert (change.case_id, change.kind, unknown) == (B2, "deleted", None)


@pytest.mark.nightly
def test_case_moved_elsewhere_is_not_lost(repo: Path) -> None:
    (repo / "perf").mkdir()
    os.rename("bench_cases/test_a.py", "perf/test_b.py")
    (repo / "bench_cases/test_a.py").write_text("")
    selection = Selection(paths=[Path("perf")], is_directory_of_cases=True)
    assert case_changes(arms(repo), selection, repo / ".perfsuite") == ((), None)


@pytest.mark.nightly
def test_a_renamed_directory_of_cases_is_found(repo: Path) -> None:
    git(repo, "rm", "--quiet", "-r", "--cached", "bench_cases")
    commit_of_nothing = commit_without_adding(repo)
    assert found(repo, text=commit_of_nothing) == ((), None)
    edit(repo, PARAMETERS, "[CASE]")
    os.rename("bench_cases", "perf")
    selection = Selection(paths=[Path("perf")], is_directory_of_cases=True)
    changes, unknown = case_changes(arms(repo, "main~1"), selection, repo / ".perfsuite")
    assert ([change.case_id for change in changes], unknown) == ([B2], None)


def commit_without_adding(repo: Path) -> str:
    git(repo, "-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "--quiet", "-m", "no cases")
    return git(repo, "rev-parse", "HEAD").strip()


def test_shared_working_tree_is_not_collected(tmp_path: Path) -> None:
    broken = Arm(python=str(tmp_path / "nosuch"), given={"X": "1"})
    assert case_changes((broken, HERE), Selection(), tmp_path) == ((), None)
