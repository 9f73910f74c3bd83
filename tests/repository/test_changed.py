from pathlib import Path

import pytest

from tests.changed import affected_tests, changed_files
from tests.synthetic import commit, git


@pytest.mark.launch
def test_lists_committed_changed_deleted_and_new(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    for name in ("same", "edited", "deleted", "moved"):
        (tmp_path / name).write_text(name)
    commit(tmp_path)
    git(tmp_path, "switch", "--quiet", "-c", "other")
    git(tmp_path, "mv", "moved", "here")
    commit(tmp_path)
    (tmp_path / "edited").write_text("anew")
    (tmp_path / "deleted").unlink()
    (tmp_path / "new").touch()
    assert changed_files("main", tmp_path) == {"edited", "deleted", "moved", "here", "new"}


def test_tests_changed_rooms_and_their_importers() -> None:
    tests = affected_tests(["perfsuite/report/text.py"])
    assert {"tests/report", "tests/cli", "tests/plugin", "tests/session"} <= set(tests)
    assert not {"tests/verdict", "tests/launch", "tests/case", "tests/inputs/test_git.py"} & set(tests)


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("perfsuite/report/html/templates/page.html", {"tests/report", "tests/cli"}),
        ("perfsuite/report/gone.py", {"tests/report", "tests/cli"}),
        ("perfsuite/inputs/git.py", {"tests/inputs", "tests/session"}),
        ("tests/session/test_plan.py", {"tests/session/test_plan.py"}),
        ("tests/traces.py", {"tests/analysis/test_trace.py"}),
        ("tests/conftest.py", {"tests"}),
        ("pyproject.toml", {"tests"}),
        ("docs/index.md", {"tests/pages/test_docs.py"}),
        ("Makefile", {"tests/repository/test_workflows.py"}),
    ],
)
def test_any_file_has_its_tests(file: str, tests: set[str]) -> None:
    assert tests <= set(affected_tests([file]))


def test_a_file_that_no_test_reads_has_none() -> None:
    assert affected_tests(["CHANGELOG.md", "tests/session/test_gone.py"]) == []
