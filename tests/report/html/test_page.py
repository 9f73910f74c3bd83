from __future__ import annotations

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
from tests.counted import (
    EXPLAINED,
    FACTS,
    FULL_SIZE,
    make_check,
    make_collective,
    make_compiled,
    make_counted,
    make_counts,
    make_dry,
    make_entries,
    make_finding,
    make_memory,
)
from tests.report.test_nodes import FOUND
from tests.samples import (
    ARMS,
    judged,
    make_compared,
    make_result,
    make_session_file,
    make_shared,
    never_run,
    now,
)
from tests.sessions import make_blind, make_gpu_result, make_session
from tests.traces import taken

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{ 7*7 }}"
VOID = {"meta", "link", "input", "br", "img"}


class Page(HTMLParser):
    """Elements, ids and texts; fails on tags that do not fit together."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1] if self._open else "", data.strip()))

    def said(self, tag: str) -> list[str]:
        """Texts directly in elements of a kind."""
        return [text for element, text in self.texts if element == tag]


def make_evil() -> SessionFile:
    """Markup wherever text comes from data."""
    failure = Failure(kind="crash", message=EVIL, rank=0, traceback=EVIL)
    observed = Observed(settings={EVIL: EVIL}, environment={"torch": EVIL})
    evil_counts = make_counts(
        collectives=(make_collective(kind=EVIL, dtype=EVIL),),
        device_copies={EVIL: 1},
        memory=make_memory(at_peak={EVIL: 1}),
        compiled=make_compiled(breaks={EVIL: 1}),
    )
    counts = make_entries(evil_counts)
    run = now().replace(notes=(EVIL,), observed=observed, started_at=EVIL, counts=counts)
    good = make_result(run, case_id=EVIL, nodeid=EVIL, directory=EVIL, baseline_file=EVIL)
    finding = make_finding(field=EVIL, ranks=EVIL, sentence=EVIL)
    good = judged(
        good,
        explained=EVIL,
        counts=make_check(finding, unsteady=(EVIL,), notes=(EVIL,), baseline_file=EVIL),
        changed=(EVIL,),
        checks=tuple(check.replace(label=EVIL, note=EVIL) for check in good.verdict.checks),
    )
    bad = make_result(run.replace(failure=failure), case_id=EVIL)
    session = make_session(0)
    return session.replace(
        results=(good, bad),
        skipped=(Skipped(nodeid=EVIL, case_id=EVIL, framework=EVIL, reason=EVIL),),
        commit=EVIL,
        perfsuite=EVIL,
        started_at=EVIL,
        status="interrupted",
        interrupted_case=EVIL,
        machine=session.machine.replace(device_name=EVIL, hardware_class=EVIL),
    )


def section(page: str, case: str) -> str:
    """Of the case whose id begins so."""
    [part] = re.findall(f'<section class="case" id="case-{case}.*?</section>', page, re.DOTALL)
    return str(part)


def of(*results: Measurement) -> str:
    """The page of a session of these cases."""
    return render([make_session(0).replace(results=results)])


def parsed(*results: Measurement) -> Page:
    return Page(of(*results))


@pytest.fixture(scope="module")
def page() -> str:
    return render([make_session()])


def test_the_page_fits_together_and_ids_are_unique(page: str) -> None:
    parsed = Page(page)
    assert len(parsed.ids) == len(set(parsed.ids))
    targets = {attrs["href"] for tag, attrs in parsed.elements if tag == "a"}
    told = {key for _, attrs in parsed.elements for key in (attrs.get("aria-labelledby") or "").split()}
    assert {target[1:] for target in targets if target} | told <= set(parsed.ids)
    style = (Path(perfsuite.__file__).parent / "report" / "html" / "templates" / "report.css").read_text()
    for verdict in WORST_FIRST:
        assert re.search(rf"\.{verdict.replace(' ', '-')}\b[^{{]*{{ color", style)


def test_verdicts_come_first_and_the_worst_before_all(page: str) -> None:
    parsed = Page(page)
    rows = [attrs["data-verdict"] for _, attrs in parsed.elements if "data-verdict" in attrs]
    assert rows == ["failed", *["regressed"] * 2, "unhealthy", "improved", "recorded", *["passed"] * 8]
    assert page.index('id="overview"') < page.index('class="case"')
    told = "1 failed, 2 regressed, 1 unhealthy, 1 improved, 1 recorded, 8 passed, 3 skipped"
    assert parsed.said("h1") == [told]


def test_what_the_gate_is_blind_to_and_what_others_disturbed_is_marked_in_the_overview() -> None:
    page = of(make_gpu_result(2), make_blind(make_gpu_result(2)))
    assert Page(page).said("h1") == ["2 passed (1 blind), 3 skipped"]
    sharp, blind = re.findall(r'<tr data-case.*?data-verdict="passed">.*?</tr>', page, re.DOTALL)
    assert "blind" not in sharp
    assert '<span class="badge blind">blind</span>' in blind
    assert '<td class="why">blind to changes of tokens/s below 32.4%</td>' in blind
    assert of(make_shared()).count('<span class="badge shared">shared</span>') == 1


def test_what_needs_attention_is_unfolded(page: str) -> None:
    folds = r'<section class="case".*?<details( open)?>\s*<summary>.*?"badge (\w+)"'
    folded = {outcome for is_open, outcome in re.findall(folds, page, re.DOTALL) if not is_open}
    opened = {outcome for is_open, outcome in re.findall(folds, page, re.DOTALL) if is_open}
    assert (opened, folded) == ({"failed", "regressed", "unhealthy", "improved"}, {"recorded", "passed"})


def test_it_asks_for_nothing_from_elsewhere_and_allows_only_its_own_script_and_style(page: str) -> None:
    for tag, attrs in Page(page).elements:
        assert tag not in ("img", "iframe", "object", "embed")
        for name in ("src", "srcset", "action", "style") + (("href",) if tag == "link" else ()):
            assert (attrs.get(name) or "data:").startswith("data:")
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest", page)
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    allowed = dict(part.split(" ", 1) for part in policy.replace("&#39;", "'").split("; "))
    assert (allowed["default-src"], allowed["img-src"]) == ("'none'", "data:")
    for kind in ("script", "style"):
        [text] = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert allowed[f"{kind}-src"] == f"'sha256-{digest}'"


def test_markup_in_data_stays_text() -> None:
    page = render([make_evil()])
    parsed = Page(page)
    assert [tag for tag, _ in parsed.elements].count("script") == 1
    assert not [tag for tag, attrs in parsed.elements if tag == "img" or "onerror" in attrs]
    assert "49" not in " ".join(text for _, text in parsed.texts if "alert" in text)
    assert EVIL in parsed.said("pre")[0]
    assert len(parsed.ids) == len(set(parsed.ids))


def test_every_chart_has_a_title_and_a_description_and_every_table_a_caption(page: str) -> None:
    parsed = Page(page)
    charts = [attrs for tag, attrs in parsed.elements if tag == "svg"]
    assert len(charts) > 50
    assert all(attrs["role"] == "img" and attrs["aria-labelledby"] for attrs in charts)
    assert len(parsed.said("desc")) == len(charts)
    for table in re.findall(r"<table.*?</table>", page, re.DOTALL):
        assert re.search(r"<caption><span>\S", table)
        assert '<th scope="col"' in table
        assert '<th scope="row"' in table


def test_a_case_tells_all_there_is(page: str) -> None:
    part = section(page, "fake-gpt2-xl-s256-b1-")
    said = Page(part)
    assert said.said("h4") == [
        *("Metrics", "Counts of a step", "Changed since the baseline", "Steps and loss"),
        *("Launches and memory", "Health of the machine", "Settings and environment", "Measure it again"),
    ]
    assert "torch: 2.12.1 -&gt; 2.13.0" in part
    assert part.count('<svg class="chart"') == 3 + 1 + len(GATED)
    assert said.said("pre")[0].startswith("pytest 'bench_cases/test_llama.py::test_llama[fake-gpt2-xl")
    crashed = section(page, "fake-llama-3.2-1b-s256-b1-")
    assert ("crash: NCCL error" in crashed, "Changed since the baseline" in crashed) == (True, False)
    never = of(never_run())
    assert ("no baseline on cpu-test-2c" in never, "Counts of a step" in never) == (True, False)
    nothing = render([make_session(0)])
    told = ("Nothing was measured." in nothing, "3 skipped" in nothing, 'id="overview"' in nothing)
    assert told == (True, True, False)


def test_what_compares_says_if_nothing_changed_and_if_charts_are_not_corrected() -> None:
    plain = judged(make_gpu_result(2), changed=(), unhealthy_launches=(1,))
    for reasons, heading in ((("launch 1 set aside: x",), "Launches set aside"), (("a", "b"), "Why")):
        assert heading in parsed(judged(plain, reasons=reasons)).said("h4")
    assert "Nothing that the workers observed in their environment." in of(plain)
    corrected = "the verdict also corrects for the machine"
    assert corrected not in of(plain)
    checks = tuple(check.replace(probe_exponent=0.8) for check in plain.verdict.checks)
    assert corrected in of(judged(plain, checks=checks))


def test_several_sessions_on_one_page() -> None:
    first = make_session(2, lambda number: "passed")
    other = first.replace(machine=first.machine, status="interrupted", interrupted_case="lost-case")
    page = render([first, other.replace(results=(make_result(now()), *other.results))])
    parsed = Page(page)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert page.count('class="facts"') == 2 + 5
    assert "lost-case was not judged" in page
    assert ">hardware</th>" in page
    assert page.count(':2"') > 0


def test_a_figure_that_no_case_has_is_no_column() -> None:
    some, none = parsed(make_result(now()), make_result(now(mfu=None))), parsed(make_result(now(mfu=None)))
    assert ("MFU" in some.said("th"), "MFU" in none.said("th")) == (True, False)


def test_an_excused_failure_is_no_red_one_and_folded() -> None:
    excused = of(make_gpu_result(1, "crash").replace(excused="known issue"))
    assert "<h1>1 known issue, 3 skipped</h1>" in excused
    assert 'class="badge known-issue"' in excused
    assert "<details><summary><h3" in re.sub(r">\s+<", "><", excused)


def test_counts_are_tables_whether_they_were_judged_or_not() -> None:
    told, step = make_counted(), "Ranks 0-63: 551.0 TFLOP, 59.9 GiB in collectives, at most 41.0 GiB live"
    page = parsed(judged(told, explained=EXPLAINED))
    assert "Compared with the baseline: regressed." in page.said("p")
    assert {"29.9 GiB", "59.8 GiB", "+29.9 GiB", "11,891"} <= set(page.said("td"))
    for each in (page, parsed(judged(told, counts=None))):
        assert step in each.said("summary")


def test_unlike_ranks_are_shown_each_under_its_name_and_the_first_is_open() -> None:
    unlike = [make_counts(host_reads={"forward": rank}) for rank in range(10)]
    text = of(make_counted(counts=make_entries(*unlike)))
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    assert re.findall(r'<details class="ranks"( open)?><summary>(Rank \d+):', text) == [
        (" open" if rank == 0 else "", f"Rank {rank}") for rank in range(8)
    ]
    assert "The step of 2 ranks more is in results.json." in page.said("p")
    equal = make_counted(make_check(outcome="passed").replace(findings=()))
    assert '<details class="ranks"><summary>' in of(equal)
    assert "more is in results.json" not in of(equal)


def test_a_dry_run_shows_no_table_of_launches_and_says_what_it_is() -> None:
    text = render([make_session(0).replace(results=(make_dry(dry_facts=FACTS),), skipped=())])
    page = Page(text)
    assert page.said("h4") == ["Memory and speed, predicted", "Counts of a step", "Count it again"]
    assert "A dry run as if on h100-80gb-sxm: nothing was computed." in page.said("p")
    assert page.said("pre") == [f"perfsuite dry-run --device=cuda {FULL_SIZE.id}"]
    assert '<span class="badge dry-run">dry run</span>' in text
    headings = [heading for heading in page.said("th") if heading in ("computed", "tokens/s", "launches")]
    assert headings == ["computed"]
    assert re.search(r"counted in dry runs that\s+computed nothing", text)
    assert "nan" not in " ".join(text for _, text in page.texts).split()
    assert "vs\N{NO-BREAK SPACE}baseline" not in text


def test_a_comparison_of_arms_shows_the_launches_of_both() -> None:
    result = make_compared().replace(profile=taken(), profile_before=taken())
    page = render([make_session_file(result, arms=ARMS)])
    said = Page(page)
    headings = [heading for heading in said.said("h4") if "Launches" in heading]
    assert headings == ["Launches and memory", "Launches of arm A"]
    assert {"Not as in arm A", "Profile of a step"} <= set(said.said("h4"))
    assert "nvjet_gemm" in said.said("th")
    assert "B vs A (99 %)" in page
    assert re.search(r">arm B</th>\s*<th[^>]*>arm A</th>", page)
    assert len(said.ids) == len(set(said.ids))


def test_what_nodes_could_do_before_the_first_launch_is_a_table_with_notes() -> None:
    card = DeviceHealth(index=0, sm_clock_mhz=1755, throttled={"SwPowerCap": 0.5})
    health = Health(samples=4, seconds=2, steps=4, devices=(card,), notes=("PCIe width <x8>",))
    good, bad = FOUND.nodes
    session = make_session_file(preflights=(FOUND.replace(nodes=(good.replace(health=health), bad)),))
    page, short = render([session]), markdown.render([session])
    for told in (title(FOUND), "0.0812 TFLOP/s", "1,755 MHz", "n1: PCIe width &lt;x8&gt;", "route to [n1]"):
        assert told in page
    assert title(FOUND) in short
    assert f"| n2 |{f' {NONE} |' * 5} crash: no route to &#91;n1&#93;; copy is slow |" in short
    assert "Nodes before the first launch" not in render([make_session(1)])
