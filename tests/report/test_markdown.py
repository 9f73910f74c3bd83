from dataclasses import dataclass, field

import pytest
from markdown_it import MarkdownIt

from perfsuite.report.markdown import MAX_EXPLAINED, MAX_ROWS, render, text
from perfsuite.results.session_file import Measurement, Skipped
from tests.counted import make_check, make_counted, make_finding
from tests.report.html.test_page import EVIL, make_evil
from tests.samples import judged, make_result, make_shared, never_run, now
from tests.sessions import make_blind, make_gpu_result, make_session


@dataclass
class Parsed:
    """Markdown as GitHub's dialect has it: headings, table rows, items, and HTML that is let through."""

    headings: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    html: list[str] = field(default_factory=list)


def parse(markdown: str) -> Parsed:
    parsed, kinds = Parsed(), [""]
    for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(markdown):
        if token.type == "tr_open":
            parsed.rows.append([])
        if token.nesting == 1:
            kinds.append(token.type)
        elif token.nesting == -1:
            kinds.pop()
        if token.type == "html_block":
            parsed.html.append(token.content.strip())
        for part in token.children or []:
            if part.type == "html_inline":
                parsed.html.append(part.content)
            if part.type == "link_open":
                parsed.links.append(str(part.attrs["href"]))
        if token.type == "inline":
            said = "".join(part.content for part in token.children or [])
            if kinds[-1] in ("td_open", "th_open"):
                parsed.rows[-1].append(said)
            elif kinds[-1] == "heading_open":
                parsed.headings.append(said)
            elif "list_item_open" in kinds:
                parsed.items.append(said)
    return parsed


def of(*results: Measurement) -> Parsed:
    """The summary of a session of these cases."""
    return parse(render([make_session(0).replace(results=results)]))


def test_counts_then_what_needs_attention_then_the_rest_folded() -> None:
    parsed = parse(render([make_session()]))
    assert parsed.headings[0].startswith("perfsuite: 1 failed, 2 regressed, ")
    verdicts = " ".join(row[0] for row in parsed.rows if len(row) == 6)
    assert (
        verdicts == f"verdict failed regressed regressed unhealthy improved verdict recorded{' passed' * 8}"
    )
    folded = ("1 recorded, 8 passed", "3 skipped")
    assert "".join(parsed.html) == "".join(f"<details><summary>{each}</summary></details>" for each in folded)


def test_a_row_tells_the_figures_what_others_disturbed_and_what_the_gate_is_blind_to() -> None:
    rows = parse(render([make_session(1, lambda number: "regressed")])).rows
    assert dict(zip(*rows[:2], strict=True)) == {
        "verdict": "regressed",
        "case": "fake-llama-3.1-8b-s256-b1-bf16-mixed-ac_full-1x8",
        "why": "tokens/s -7.5%, tokens/s with stalls -7.3%",
        "tokens/s": "4,326",
        "vs baseline": "-7.5%",
        "memory": "31.0 GiB",
    }
    assert of(make_shared()).rows[1][0] == "unhealthy (shared)"
    parsed = of(make_gpu_result(2), make_blind(make_gpu_result(2)))
    assert parsed.headings == ["perfsuite: 2 passed (1 blind), 3 skipped"]
    assert "<details><summary>2 passed (1 blind)</summary>" in parsed.html
    blind = ["passed (blind)", "blind to changes of tokens/s below 32.4%"]
    assert [[row[0], row[2]] for row in parsed.rows[1:3]] == [["passed", ""], blind]


def test_notes_are_told_with_the_explanations_and_of_the_rest_folded() -> None:
    bad, good = (
        result.replace(runs=tuple(run.replace(notes=("health | unknown",)) for run in result.runs))
        for result in (make_gpu_result(1, "regressed"), make_gpu_result(2))
    )
    parsed = of(bad, good)
    assert "note: health | unknown (3 launches)" in parsed.items
    assert "<details><summary>Notes: 1</summary>" in parsed.html
    assert [good.case_id, "health | unknown (3 launches)"] in parsed.rows


def test_what_did_not_run_is_told_with_its_reason() -> None:
    parsed = of(never_run())
    assert parsed.items == ["no baseline on cpu-test-2c in baselines, and --perf-missing-baseline=fail"]
    assert parsed.rows[-1][1] == "it needs 2 nodes of 8, this is one machine"
    cut = make_session(0).replace(status="interrupted", interrupted_case="lost-case")
    assert "**The session was interrupted: lost-case was not judged;" in render([cut])


MARKUP = (
    EVIL,
    "a|b",
    "`x`",
    "**a** _b_ __c__ ~~d~~",
    "[a](http://x)",
    "<b>",
    "&lt;",
    "\\|",
    "@all #12",
    "![a](b)",
)


@pytest.mark.parametrize("value", [*MARKUP, "ac_full-1x8"])
def test_text_is_read_back_as_it_was(value: str) -> None:
    table = parse(f"| a |\n| --- |\n| {text(value)} |\n")
    assert table.rows == [["a"], [value]]
    assert parse(f"### {text(value)}").headings == [value]
    assert table.html == table.links == []


def test_markup_in_data_stays_text_on_one_line_that_mentions_nobody() -> None:
    assert text("a\n\n# b\r c") == "a &#35; b c"
    assert text("kernels: 9 -> 8 a step (aten._to_copy -1)") == "kernels: 9 -> 8 a step (aten._to_copy -1)"
    assert text("> a _b_ __c__") == "&#62; a _b&#95; &#95;_c&#95;&#95;"
    assert "@" not in text("@torch")
    parsed = parse(render([make_evil()]))
    assert [html for html in parsed.html if not html.startswith(("<details>", "</details>"))] == []
    assert EVIL in parsed.headings
    assert all(len(row) in (2, 6) for row in parsed.rows)


def test_it_stays_far_below_what_github_takes() -> None:
    many, mib, session = MAX_ROWS + 100, 2**20, make_session(0)
    noisy = judged(make_gpu_result(1, "throttled"), reasons=("x" * 100_000,) * 3)
    quiet = make_result(now().replace(notes=("y" * 100_000,)))
    skipped = Skipped(nodeid="n", case_id="c" * 80, framework="f", reason="r" * 80)
    markdown = render([session.replace(results=(noisy, quiet) * many, skipped=(skipped,) * many)])
    assert len(markdown.encode()) < mib / 2
    assert f"{many - MAX_EXPLAINED} more are explained in the HTML report only." in markdown
    cut = [row[0] for row in parse(markdown).rows if row[0].startswith("and ")]
    assert cut == ["and 100 more"] * 4
    worst = make_counted(make_check(*[make_finding(sentence="|" * 3000)] * 500))
    assert len(render([session.replace(results=(worst,) * MAX_ROWS)]).encode()) < mib
