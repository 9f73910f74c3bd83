from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perfsuite.cli import app as cli
from perfsuite.errors import PublishError
from perfsuite.history.asv.export import export, publish
from tests.samples import make_case
from tests.synthetic import Level, make_repository, write_history

CASES = [make_case(hardware="h100", micro_batch=n) for n in (1, 2, 4, 8)]
SLOWER, FASTER, LARGER, SAME = range(4)
NIGHTS = 30


def levels(case: int, night: int) -> Level:
    """One case gets 10 % slower, one faster, one takes 3 % more memory, one stays as it is."""
    if case == SLOWER and night >= 15:
        return Level(step_s=1.1)
    if case == FASTER and night >= 10:
        return Level(step_s=0.9)
    if case == LARGER and night >= 20:
        return Level(memory=1.03)
    return Level()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of 30 nights."""
    root = tmp_path_factory.mktemp("history")
    commits = make_repository(root / "repo", NIGHTS)
    write_history(root / "history", commits, CASES, levels, noise=0.005)
    arguments = ["history", "publish", str(root / "out"), f"--history={root / 'history'}"]
    result = CliRunner().invoke(cli.app, [*arguments, f"--repo={root / 'repo'}"])
    assert result.exit_code == 0, result.output
    assert f"pages: {root / 'out' / 'html'}" in result.output
    return root


@pytest.mark.launch
def test_only_what_got_worse_is_on_the_regressions_page(published: Path) -> None:
    index = json.loads((published / "out/html/index.json").read_text())
    regressions = json.loads((published / "out/html/regressions.json").read_text())["regressions"]
    commits = dict(index["revision_to_hash"])
    found = {
        (entry[0].partition("(")[0], entry[3]): (commits[str(jump[1])], jump[3] / jump[2])
        for entry in regressions
        for jump in entry[6]
    }
    order = [commits[key] for key in sorted(commits, key=int)]
    assert found == {
        ("gpt2-tiny.1x2.fp32.seconds_per_token", SLOWER): (order[15], pytest.approx(1.1, rel=0.01)),
        ("gpt2-tiny.1x2.fp32.peak_memory", LARGER): (order[20], pytest.approx(1.03, rel=0.001)),
    }


@pytest.mark.launch
def test_every_night_is_on_the_pages(published: Path) -> None:
    index = json.loads((published / "out/html/index.json").read_text())
    assert len(index["revision_to_hash"]) == NIGHTS
    assert list(index["machines"]) == ["h100-80gb-sxm"]
    assert index["params"] == {"branch": ["main"], "machine": ["h100-80gb-sxm"]}
    graphs = list((published / "out/html/graphs").rglob("*seconds_per_step.json"))
    points = [json.loads(file.read_text()) for file in graphs if "summary" not in file.parts]
    assert [(len(series), len(series[0][1])) for series in points] == [(NIGHTS, len(CASES))]


@pytest.mark.launch
def test_a_commit_that_asv_leaves_out_is_an_error(published: Path) -> None:
    out = published / "out"
    with pytest.raises(PublishError, match=r"asv publish left out 1 of 1 commits, ffffffff for one: "):
        publish(out, commits=frozenset({"f" * 40}))


@pytest.mark.launch
def test_what_asv_says_is_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "asv.conf.json").write_text("{}")
    with pytest.raises(PublishError, match=r"asv publish in .* ended with 1: .*No version specified"):
        publish(tmp_path, commits=frozenset())


@pytest.mark.launch
def test_publish_names_what_it_leaves_out(tmp_path: Path) -> None:
    commits = make_repository(tmp_path / "repo", 3)
    write_history(tmp_path / "history", [*commits, "f" * 40], CASES[:1])
    exported = export(tmp_path / "history", tmp_path / "repo", tmp_path / "out")
    assert len(exported.unplaced) == 1
    result = CliRunner().invoke(
        cli.app,
        [
            *("history", "publish", str(tmp_path / "out"), f"--history={tmp_path / 'history'}"),
            f"--repo={tmp_path / 'repo'}",
        ],
    )
    assert result.exit_code == 0, result.output
    assert f"left out: commit ffffffffffff: not in {tmp_path / 'repo'}" in result.output
    assert "commits left out: 1, exported: 3" in result.output
    assert "0 written, 3 unchanged, 0 removed" in result.output
