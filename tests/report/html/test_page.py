import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import perfsuite
from perfsuite.report import markdown
from perfsuite.report.html.page import render
from perfsuite.report.nodes import title
from perfsuite.report.text import NONE
from perfsuite.results.metric import GATED
from perfsuite.results.outcome import WORST_FIRST
from perfsuite.results.rank_report import Failure, Observed
from perfsuite.results.run import DeviceHealth, Health
from perfsuite.results.session_file import Measurement, SessionFile, Skipped
from tests import counted, samples
from tests.counted import FACTS, make_check, make_counted, make_counts, make_dry, make_entries
from tests.report.test_nodes import FOUND
from tests.samples import judged, make_result, make_session_file, now
from tests.sessions import make_blind, make_gpu_result, make_session
from tests.traces import taken

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{ 7*7 }}"
VOID = {"meta", "link", "input", "br", "img"}
Attributes = list[tuple[str, str | None]]


class Page(HTMLParser):
    """Collects elements, ids and texts. Fails if tags do not match or if an id is used twice."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.ids = [attrs["id"] for _, attrs in self.elements if attrs.get("id")]
        assert self._open == []
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag: str, attrs: Attributes) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Attributes) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1] if self._open else "", data.strip()))

    def said(self, tag: str) -> list[str]:
        """Return the texts that are directly inside an element with this tag."""
        return [text for element, text in self.texts if element == tag]


def make_evil() -> SessionFile:
    """Return a session in which every text from data contains markup."""
    failure = Failure(kind="crash", message=EVIL, rank=0, traceback=EVIL)
    counts = make_counts(
        collectives=(counted.make_collective(kind=EVIL, dtype=EVIL),),
        device_copies={EVIL: 1},
        memory=counted.make_memory(at_peak={EVIL: 1}),
        compiled=counted.make_compiled(breaks={EVIL: 1}),
    )
    run = now().replace(
        notes=(EVIL,),
        observed=Observed(settings={EVIL: EVIL}, environment={"torch": EVIL}),
        started_at=EVIL,
        counts=make_entries(counts),
    )
    good = make_result(run, case_id=EVIL, nodeid=EVIL, directory=EVIL, baseline_file=EVIL)
    finding = counted.make_finding(field=EVIL, ranks=EVIL, sentence=EVIL)
    good = judged(
        good,
        explained=EVIL,
        counts=make_check(finding, unsteady=(EVIL,), notes=(EVIL,), baseline_file=EVIL),
        changed=(EVIL,),
        checks=tuple(check.replace(label=EVIL, note=EVIL) for check in good.verdict.checks),
    )
    session = make_session(0)
    return session.replace(
        results=(good, make_result(run.replace(failure=failure), case_id=EVIL)),
        skipped=(Skipped(nodeid=EVIL, case_id=EVIL, framework=EVIL, reason=EVIL),),
        machine=session.machine.replace(device_name=EVIL, hardware_class=EVIL),
        status="interrupted",
        **dict.fromkeys(("commit", "perfsuite", "started_at", "interrupted_case"), EVIL),
    )


def section(page: str, case: str) -> str:
    """Return the section of the case whose id begins with `case`."""
    [part] = re.findall(f'<section class="case" id="case-{case}.*?</section>', page, re.DOTALL)
    return str(part)


def of(*results: Measurement) -> str:
    """Return the page of a session of these cases."""
    return render([make_session(0).replace(results=results)])


def parsed(*results: Measurement) -> Page:
    return Page(of(*results))


@pytest.fixture(scope="module")
def page() -> str:
    return render([make_session()])


def test_every_link_and_label_has_a_target(page: str) -> None:
    parsed = Page(page)
    targets = {str(attrs["href"]) for tag, attrs in parsed.elements if tag == "a"}
    labels = {key for _, attrs in parsed.elements for key in (attrs.get("aria-labelledby") or "").split()}
    assert {target[1:] for target in targets if target} | labels <= set(parsed.ids)


@pytest.mark.parametrize("verdict", WORST_FIRST)
def test_every_verdict_has_a_color(verdict: str) -> None:
    style = (Path(perfsuite.__file__).parent / "report" / "html" / "templates" / "report.css").read_text()
    assert re.search(rf"\.{verdict.replace(' ', '-')}\b[^{{]*{{ color", style)


def test_every_chart_has_a_description_and_a_label(page: str) -> None:
    parsed = Page(page)
    charts = [attrs for tag, attrs in parsed.elements if tag == "svg"]
    assert len(parsed.said("desc")) == len(charts) > 50
    assert all(attrs["role"] == "img" and attrs["aria-labelledby"] for attrs in charts)


def test_every_table_has_a_caption_and_headings(page: str) -> None:
    headed = r'<caption><span>\S.*<th scope="col".*<th scope="row"'
    tables = re.findall(r"<table.*?</table>", page, re.DOTALL)
    assert tables
    assert [table for table in tables if not re.search(headed, table, re.DOTALL)] == []


def test_worst_verdicts_come_first_unfolded(page: str) -> None:
    parsed = Page(page)
    rows = [attrs["data-verdict"] for _, attrs in parsed.elements if "data-verdict" in attrs]
    assert rows == ["failed", *["regressed"] * 2, "unhealthy", "improved", "recorded", *["passed"] * 8]
    assert page.index('id="overview"') < page.index('class="case"')
    heading = "1 failed, 2 regressed, 1 unhealthy, 1 improved, 1 recorded, 8 passed, 3 skipped"
    assert parsed.said("h1") == [heading]
    folds = r'<section class="case".*?<details( open)?>\s*<summary>.*?"badge (\w+)"'
    folded = set(re.findall(folds, page, re.DOTALL))
    unfolded = {("failed", " open"), ("regressed", " open"), ("unhealthy", " open"), ("improved", " open")}
    assert {(outcome, is_open) for is_open, outcome in folded} == {
        *unfolded,
        ("recorded", ""),
        ("passed", ""),
    }


@pytest.fixture
def sharp_and_blind() -> str:
    """Return the page of a case that passed, and of another case that passed but is blind."""
    return of(make_gpu_result(2), make_blind(make_gpu_result(2)))


def test_headline_counts_blind_cases(sharp_and_blind: str) -> None:
    assert Page(sharp_and_blind).said("h1") == ["2 passed (1 blind), 3 skipped"]


def test_overview_marks_only_the_blind_case(sharp_and_blind: str) -> None:
    sharp, blind = re.findall(r'<tr data-case.*?data-verdict="passed">.*?</tr>', sharp_and_blind, re.DOTALL)
    assert "blind" not in sharp
    assert '<span class="badge blind">blind</span>' in blind
    assert '<td class="why">blind to changes of tokens/s below 32.4%</td>' in blind


def test_overview_marks_a_shared_machine() -> None:
    assert of(samples.make_shared()).count('<span class="badge shared">shared</span>') == 1


def test_a_known_issue_is_marked_and_folded() -> None:
    excused = of(make_gpu_result(1, "crash").replace(excused="known issue"))
    assert "<h1>1 known issue, 3 skipped</h1>" in excused
    assert 'class="badge known-issue"' in excused
    assert "<details><summary><h3" in re.sub(r">\s+<", "><", excused)


def test_page_requests_nothing_external(page: str) -> None:
    elements = Page(page).elements
    assert {tag for tag, _ in elements}.isdisjoint(("img", "iframe", "object", "embed"))
    sources = [
        attrs.get(name) or "data:"
        for tag, attrs in elements
        for name in ("src", "srcset", "action", "style", *(("href",) if tag == "link" else ()))
    ]
    assert [source for source in sources if not source.startswith("data:")] == []
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", page)


@pytest.fixture(scope="module")
def policy(page: str) -> dict[str, str]:
    """Return what the page allows, by directive of its content security policy."""
    [text] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    return dict(part.split(" ", 1) for part in text.replace("&#39;", "'").split("; "))


def test_the_policy_allows_only_inline_data(policy: dict[str, str]) -> None:
    assert (policy["default-src"], policy["img-src"]) == ("'none'", "data:")


@pytest.mark.parametrize("kind", ["script", "style"])
def test_the_policy_allows_only_the_pages_own_code(page: str, policy: dict[str, str], kind: str) -> None:
    [text] = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    assert policy[f"{kind}-src"] == f"'sha256-{digest}'"


def test_markup_in_data_stays_text() -> None:
    parsed = Page(render([make_evil()]))
    assert [tag for tag, _ in parsed.elements].count("script") == 1
    assert not [tag for tag, attrs in parsed.elements if tag == "img" or "onerror" in attrs]
    assert "49" not in " ".join(text for _, text in parsed.texts if "alert" in text)
    assert EVIL in parsed.said("pre")[0]


def test_a_case_shows_every_section(page: str) -> None:
    part = section(page, "fake-gpt2-xl-s256-b1-")
    said = Page(part)
    assert said.said("h4") == [
        *("Metrics", "What to do next", "Counts of a step", "Changed since the baseline", "Steps and loss"),
        *("Launches and memory", "Spans of the run", "Health of the machine"),
        *("Settings and environment", "Commit and files"),
    ]
    assert "torch: 2.12.1 -&gt; 2.13.0" in part
    assert part.count('<svg class="chart"') == 3 + 1 + len(GATED)
    again = "pytest 'bench_cases/test_llama.py::test_llama[fake-gpt2-xl"
    assert any(text.startswith(again) for text in said.said("pre"))


def test_a_crashed_case_shows_its_failure_only(page: str) -> None:
    crashed = section(page, "fake-llama-3.2-1b-s256-b1-")
    assert ("crash: NCCL error" in crashed, "Changed since the baseline" in crashed) == (True, False)


def test_a_case_that_never_ran_shows_the_reason_only() -> None:
    never = of(samples.never_run())
    assert ("no baseline on cpu-test-2c" in never, "Counts of a step" in never) == (True, False)


def test_a_session_without_results_has_no_overview() -> None:
    page = render([make_session(0)])
    is_said = ("Nothing was measured." in page, "3 skipped" in page, 'id="overview"' in page)
    assert is_said == (True, True, False)


def test_a_column_without_values_is_left_out() -> None:
    some = parsed(make_result(now()), make_result(now(mfu=None)))
    none = parsed(make_result(now(mfu=None)))
    assert ("MFU" in some.said("th"), "MFU" in none.said("th")) == (True, False)


NOTHING_CHANGED = judged(make_gpu_result(2), changed=(), unhealthy_launches=(1,))


@pytest.mark.parametrize(
    ("reasons", "heading"), [(("launch 1 set aside: x",), "Launches set aside"), (("a", "b"), "Why")]
)
def test_reasons_have_a_heading(reasons: tuple[str, ...], heading: str) -> None:
    assert heading in parsed(judged(NOTHING_CHANGED, reasons=reasons)).said("h4")


def test_says_if_nothing_changed() -> None:
    assert "The workers observed no difference in the environment." in of(NOTHING_CHANGED)


def test_says_if_a_verdict_is_corrected() -> None:
    checks = tuple(check.replace(probe_exponent=0.8) for check in NOTHING_CHANGED.verdict.checks)
    corrected = "The verdict is also corrected for the machine"
    pages = (of(NOTHING_CHANGED), of(judged(NOTHING_CHANGED, checks=checks)))
    assert [corrected in page for page in pages] == [False, True]


def test_several_sessions_on_one_page() -> None:
    first = make_session(2, lambda number: "passed")
    other = first.replace(status="interrupted", interrupted_case="lost-case")
    page = render([first, other.replace(results=(make_result(now()), *other.results))])
    assert Page(page).ids
    assert page.count('class="facts"') == 2 + 5
    assert "lost-case was not judged" in page
    assert (">hardware</th>" in page, ">hardware</th>" in of(make_result(now()))) == (True, False)
    assert page.count(':2"') > 0


def test_counts_are_a_table_beside_the_baseline() -> None:
    page = parsed(judged(make_counted(), explained=counted.EXPLAINED))
    assert "Compared with the baseline: regressed." in page.said("p")
    assert {"29.9 GiB", "59.8 GiB", "+29.9 GiB", "11,891"} <= set(page.said("td"))


@pytest.mark.parametrize(
    "result",
    [judged(make_counted(), explained=counted.EXPLAINED), judged(make_counted(), counts=None)],
    ids=["judged", "not judged"],
)
def test_counts_have_a_summary_of_the_step(result: Measurement) -> None:
    step = "Ranks 0-63: 551.0 TFLOP, 59.9 GiB in collectives, at most 41.0 GiB live"
    assert step in parsed(result).said("summary")


def test_counts_of_eight_unlike_ranks_are_shown() -> None:
    unlike = [make_counts(host_reads={"forward": rank}) for rank in range(10)]
    text = of(make_counted(counts=make_entries(*unlike)))
    assert re.findall(r'<details class="ranks"( open)?><summary>(Rank \d+):', text) == [
        (" open" if rank == 0 else "", f"Rank {rank}") for rank in range(8)
    ]
    assert "The counts of 2 more ranks are in results.json." in Page(text).said("p")


def test_counts_that_passed_are_folded() -> None:
    equal = of(make_counted(make_check(outcome="passed").replace(findings=())))
    assert '<details class="ranks"><summary>' in equal
    assert "are in results.json" not in equal


@pytest.fixture(scope="module")
def dry_page() -> str:
    return render([make_session_file(make_dry(dry_facts=FACTS))])


def test_a_dry_run_has_no_section_of_launches(dry_page: str) -> None:
    assert Page(dry_page).said("h4") == [
        "What to do next",
        "Predicted memory and speed",
        "Counts of a step",
        "Spans of the run",
        "Commit and files",
    ]


def test_a_dry_run_says_what_it_is(dry_page: str) -> None:
    page = Page(dry_page)
    assert "This was a dry run as if on h100-80gb-sxm. Nothing was computed." in page.said("p")
    assert '<span class="badge dry-run">dry run</span>' in dry_page
    assert re.search(r"counted in dry runs that\s+computed nothing", dry_page)


def test_a_dry_run_suggests_a_dry_run(dry_page: str) -> None:
    command = f"perfsuite dry-run --device=cuda {counted.FULL_SIZE.id}"
    assert Page(dry_page).said("pre")[-1] == command


def test_a_dry_run_has_no_columns_of_measurements(dry_page: str) -> None:
    page = Page(dry_page)
    assert [heading for heading in page.said("th") if heading in ("computed", "tokens/s", "launches")] == [
        "computed"
    ]
    assert "nan" not in " ".join(text for _, text in page.texts).split()
    assert "vs\N{NO-BREAK SPACE}baseline" not in dry_page


def test_arm_comparison_shows_both_arms_launches() -> None:
    result = samples.make_compared().replace(profile=taken(), profile_before=taken())
    page = render([make_session_file(result, arms=samples.ARMS)])
    said = Page(page)
    headings = [heading for heading in said.said("h4") if "Launches" in heading]
    assert headings == ["Launches and memory", "Launches of arm A"]
    assert {"Different from arm A", "Profile of a step"} <= set(said.said("h4"))
    assert "nvjet_gemm" in said.said("th")
    assert "B vs A (99%)" in page
    assert re.search(r">arm B</th>\s*<th[^>]*>arm A</th>", page)


@pytest.fixture(scope="module")
def with_preflight() -> SessionFile:
    card = DeviceHealth(index=0, sm_clock_mhz=1755, throttled={"SwPowerCap": 0.5})
    health = Health(samples=4, seconds=2, steps=4, devices=(card,), notes=("PCIe width <x8>",))
    good, bad = FOUND.nodes
    return make_session_file(preflights=(FOUND.replace(nodes=(good.replace(health=health), bad)),))


@pytest.mark.parametrize(
    "text", [title(FOUND), "0.0812 TFLOP/s", "1,755 MHz", "n1: PCIe width &lt;x8&gt;", "route to [n1]"]
)
def test_preflight_is_a_table_with_notes(with_preflight: SessionFile, text: str) -> None:
    assert text in render([with_preflight])


def test_preflight_is_a_table_in_markdown(with_preflight: SessionFile) -> None:
    short = markdown.render([with_preflight])
    assert title(FOUND) in short
    assert f"| n2 |{f' {NONE} |' * 5} crash: no route to &#91;n1&#93;; copy is slow |" in short


def test_without_a_preflight_nodes_have_no_table() -> None:
    assert "Nodes before the first launch" not in render([make_session(1)])


def test_cases_have_short_names_and_whole_ids() -> None:
    result = make_result(now())
    text = of(result)
    [name] = Page(text).said("a")[1:]
    assert name == "fake · gpt2-tiny · 1x2"
    assert text.count(f'title="{result.case_id}"') == 2
    assert result.case_id in Page(text).said("dd")


def test_the_cause_is_shown_once_above_the_metrics() -> None:
    text = of(judged(make_counted(), explained="twice the bytes"))
    assert re.search(r'class="quiet folded">.*</summary>\s*<p class="explained">twice the bytes</p>', text)
    assert '<span class="quiet folded">' not in of(make_result(now()))
