from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from perfsuite.cli.app import GONE
from perfsuite.results import baseline
from perfsuite.results.store import BaselineStore
from tests.cli.commands import run
from tests.samples import make_case, make_run


@pytest.mark.parametrize("framework", ["nosuch", "fsdp", "script"])
def test_an_error_is_one_line_and_status_2(framework: str) -> None:
    result = run("selftest", "--framework", framework, status=2)
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("perfsuite selftest: Case: framework: ")


def test_commands_look_where_pytests_ini_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pytest.ini").write_text("[pytest]\nperf_store = mine\nperf_baselines = perf/baselines\n")
    kept = BaselineStore(Path("perf/baselines"), Path("mine/baselines"))
    kept.write_reviewed(baseline.from_runs([make_run()] * 3))
    kept.write_local(baseline.from_runs([make_run(case=make_case(micro_batch=5))] * 3))
    shown = run("baseline", "list")
    assert make_case().id in shown.stdout
    assert make_case(micro_batch=5).id in shown.stdout
    shown = run("baseline", "list", "--baselines", "baselines", "--store", "other")
    assert make_case().id not in shown.stdout, "an option wins"


def test_a_link_to_itself_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert "no session in" in run("report", "--store", tmp_path / "loop", status=2).stderr


def test_help_names_the_exit_statuses() -> None:
    assert "Exit status: 0, or 1 for a finding" in " ".join(run("--help").stdout.split())


@pytest.mark.parametrize(
    ("words", "package", "purpose"),
    [
        (["history", "trend"], "numpy", "to look for trends"),
        (["history", "publish", "out"], "asv", "to publish a history"),
    ],
)
def test_a_command_whose_package_is_missing_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, words: list[str], package: str, purpose: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    result = run(*words, status=2)
    assert result.stdout == ""
    assert result.stderr == (
        f"perfsuite {words[0]}: {purpose}: it needs the package {package}, which is not installed: "
        "pip install 'perfsuite[history]'\n"
    )


@pytest.mark.parametrize("gone", GONE)
def test_what_is_gone_says_what_replaces_it(gone: str) -> None:
    done = run(*gone.split(), "thing", status=2)
    assert done.stdout == ""
    assert f"there is no `perfsuite {gone}` any more: {GONE[gone]}" in done.stderr
