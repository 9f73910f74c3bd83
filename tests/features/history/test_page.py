import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from perfsuite.errors import FileError
from perfsuite.features.history import page
from perfsuite.features.history.sparkline import DOTS
from perfsuite.results.trend import Trend
from tests.features.history.nights import Level, write_history
from tests.report.html.test_page import EVIL, Page
from tests.samples import IMAGES, make_case
from tests.synthetic import make_repository

NIGHTS = 60
CASES = [make_case(hardware="h100", micro_batch=n) for n in (1, 2, 4)]
SLOWER, BACK, SAME = (case.id for case in CASES)
URL = "https://example.org/commit/"


def levels(case: int, night: int) -> Level:
    """Make the first case 3% slower from night 40 on. The second case uses 5% more memory for 25 nights."""
    return Level(
        step_s=1 + 0.03 * (case == 0 and night >= 40), memory=1 + 0.05 * (case == 1 and 20 <= night < 45)
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("history")
    commits = make_repository(root / "trainer", NIGHTS)
    torch = {False: {"torch": "2.13.0"}, True: {"torch": "2.14.0"}}
    write_history(root / "history", commits, CASES, levels, environment=lambda night: torch[night >= 40])
    return root


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    file = page.write(root, root / "history", root / "trainer", commit_url=URL)
    assert file == root / "history.html"
    return file.read_text()


def lines(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the changes of each case."""
    body = text[text.index("<tbody>") : text.index("</tbody>")]
    for part in body.split('<tr class="line')[1:]:
        changes = re.findall(r'<li class="(.*?)</li>', part)
        yield re.findall(r'<span class="name" title="(.*?)">', part)[0], changes


def test_the_worst_case_comes_first(text: str) -> None:
    assert [name for name, _ in lines(text)] == [SLOWER, BACK, SAME]
    assert Page(text).said("h1") == ["3 cases, 1 worse"]


def test_a_change_has_its_day_commit_and_cause(text: str) -> None:
    [(_, [change]), *_] = lines(text)
    commit = re.findall(rf'href="{URL}([0-9a-f]{{40}})">([0-9a-f]{{8}})</a>', change)
    assert [whole[:8] for whole, _ in commit] == [short for _, short in commit] != []
    plain = re.sub(r"<.*?>", "", change)
    assert re.fullmatch(
        r'worse">2024-02-10, \w{8}: tokens/s: -3\.\d% \(.*\), worse; torch: 2.13.0 -&gt; 2.14.0',
        plain,
    )


def test_the_legend_says_which_charts_have_dots(text: str) -> None:
    [legend] = [paragraph for paragraph in Page(text).said("p") if "Thick lines" in paragraph]
    assert f"In a chart of up to {DOTS} sessions, each dot is a session." in legend


def test_changes_are_listed_by_their_state(text: str) -> None:
    states = {name: [change.partition('"')[0] for change in changes] for name, changes in lines(text)}
    assert states == {SLOWER: ["worse"], BACK: ["better", "past"], SAME: []}


@pytest.mark.parametrize("kind", ["worse", "better", "past"])
def test_changes_are_marked_by_their_state(text: str, kind: str) -> None:
    assert text.count(f'<line class="change {kind}"') == 1


def test_each_metric_links_to_its_graph_at_asv(text: str) -> None:
    targets = [str(attrs["href"]) for tag, attrs in Page(text).elements if tag == "a"]
    graphs = {target for target in targets if target.startswith("index.html#")}
    group = "index.html#gpt2-tiny.1x2.fp32"
    assert graphs == {f"{group}.seconds_per_token", f"{group}.peak_memory"}


def test_the_page_needs_nothing_else(text: str) -> None:
    assert "<script" not in text
    assert not re.search(r"(src|srcset)=|@import|url\(", text)
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src &#39;none&#39;; img-src data:; style-src &#39;sha256-")


@pytest.mark.parametrize("url", ["#", "javascript:alert(1)//"])
def test_commits_without_an_address_are_plain_text(root: Path, url: str) -> None:
    plain = page.write(root, root / "history", root / "trainer", commit_url=url).read_text()
    assert re.search(r"2024-02-10, <code>[0-9a-f]{8}</code>", plain)
    assert "javascript" not in plain


def test_cases_of_samples_have_their_own_graph(tmp_path: Path) -> None:
    commits = make_repository(tmp_path / "trainer", 3)
    write_history(tmp_path / "history", commits, [IMAGES])
    plain = page.write(tmp_path, tmp_path / "history", tmp_path / "trainer").read_text()
    assert ".seconds_per_sample" in plain
    assert "samples/s</span>" in plain


def test_names_of_others_stay_text() -> None:
    nothing = Trend(since=date(2024, 1, 1), sessions=0, series=0, findings=(), unplaced={})
    text = page.render({}, nothing, parameters={}, title=EVIL)
    assert "<script" not in text
    assert Page(text).said("h1") == ["0 cases, none worse"]


def test_commits_of_other_branches_are_left_out(tmp_path: Path) -> None:
    commits = make_repository(tmp_path / "trainer", 2)
    write_history(tmp_path / "history", [*commits, "f" * 40], CASES)
    write_history(tmp_path / "other", ["f" * 40], CASES)
    text = page.write(tmp_path, tmp_path / "history", tmp_path / "trainer").read_text()
    assert "<dd>2</dd>" in text
    with pytest.raises(FileError, match="has no session whose commit is on main"):
        page.write(tmp_path, tmp_path / "other", tmp_path / "trainer")
