import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from perfsuite.errors import ToolError
from perfsuite.features.history.asv.export import publish
from tests.features.history.asv.conftest import CASES, LARGER, NIGHTS, SLOWER, UNKNOWN, Published

pytestmark = pytest.mark.launch


def page(published: Published, name: str) -> Any:
    return json.loads((published.root / "out/html" / name).read_text())


def test_regressions_page_lists_only_regressions(published: Published) -> None:
    commits = page(published, "index.json")["revision_to_hash"]
    listed = {
        (entry[0].partition("(")[0], entry[3]): (commits[str(jump[1])], jump[3] / jump[2])
        for entry in page(published, "regressions.json")["regressions"]
        for jump in entry[6]
    }
    order = [commits[key] for key in sorted(commits, key=int)]
    assert listed == {
        ("gpt2-tiny.1x2.fp32.seconds_per_token", SLOWER): (order[15], pytest.approx(1.1, rel=0.01)),
        ("gpt2-tiny.1x2.fp32.peak_memory", LARGER): (order[20], pytest.approx(1.03, rel=0.001)),
    }


def test_every_night_is_on_the_pages(published: Published) -> None:
    index = page(published, "index.json")
    assert len(index["revision_to_hash"]) == NIGHTS
    assert list(index["machines"]) == ["h100-80gb-sxm"]
    assert index["params"] == {"branch": ["main"], "machine": ["h100-80gb-sxm"]}
    graphs = list((published.root / "out/html/graphs").rglob("*seconds_per_step.json"))
    points = [json.loads(file.read_text()) for file in graphs if "summary" not in file.parts]
    assert [(len(series), len(series[0][1])) for series in points] == [(NIGHTS, len(CASES))]


def test_names_commits_that_are_left_out(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    out = published.root / "out"
    assert f"left out: commit ffffffffffff: not in {published.root / 'repo'}" in published.output
    assert f"pages of {NIGHTS} commits, 1 left out: {out / 'html'}" in published.output
    made = subprocess.CompletedProcess([], returncode=0, stdout="", stderr="")
    # asv ends with status 0 although it wrote nothing: the earlier pages are still there.
    monkeypatch.setattr(subprocess, "run", lambda *_, **how: made)
    with pytest.raises(ToolError, match=r"asv publish left out 1 of 1 commits, such as ffffffff: "):
        publish(out, commits=frozenset({UNKNOWN}))


def test_our_page_is_beside_asvs_and_links_to_its_graphs(published: Published) -> None:
    pages = published.root / "out/html"
    text = (pages / "history.html").read_text()
    assert "<h1>4 cases, 2 worse</h1>" in text
    linked = set(re.findall(r'href="index.html#([^"]+)"', text))
    assert linked == {f"gpt2-tiny.1x2.fp32.{metric}" for metric in ("seconds_per_token", "peak_memory")}
    assert linked <= page(published, "index.json")["benchmarks"].keys()


def test_offline_page_says_what_is_missing(published: Published) -> None:
    """asv shows this page if it cannot load a script."""
    pages = published.root / "out/html"
    index = (pages / "index.html").read_text()
    assert 'window.location = "error.html"' in index
    loaded = set(re.findall(r'(?:src|href)="https://([^/]+)', index)) - {"github.com"}
    assert loaded
    text = (pages / "error.html").read_text()
    assert {host for host in loaded if f"<li>{host}</li>" in text} == loaded
    assert "perfsuite history trend" in text


def test_the_error_quotes_asv(tmp_path: Path) -> None:
    (tmp_path / "asv.py").write_text(
        "print('out'); raise SystemExit('No version specified')"
    )  # found instead of asv
    with pytest.raises(ToolError, match=r"asv publish in .* ended with 1: out\nNo version specified"):
        publish(tmp_path, commits=frozenset())
