import html
import re

import pytest
from markdown_it import MarkdownIt

from perfsuite.report.markdown import MAX_EXPLAINED, MAX_ROWS, MAX_SPANS, render, text
from perfsuite.results.session_file import Measurement, Skipped
from tests.counted import make_check, make_counted, make_finding
from tests.report.html.test_page import EVIL, Page, make_evil
from tests.samples import judged, make_result, make_shared, never_run, now
from tests.sessions import make_blind, make_gpu_result, make_session

WRITTEN = "h2 h3 p strong ul li table thead tbody tr th td details summary"


class Parsed(Page):
    """Parses Markdown like GitHub, including embedded HTML."""

    def __init__(self, markdown: str) -> None:
        shown = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)
        super().__init__(shown)
        assert {tag for tag, _ in self.elements} <= set(WRITTEN.split())
        rows = re.findall(r"<tr>(.*?)</tr>", shown, re.DOTALL)
        cells = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows)
        self.rows = [[html.unescape(cell) for cell in row] for row in cells]


def of(*results: Measurement) -> Parsed:
    """Return the summary of a session of these cases."""
    return Parsed(render([make_session(0).replace(results=results)]))


def test_markdown_orders_counts_urgent_and_rest() -> None:
    parsed = Parsed(render([make_session()]))
    assert parsed.said("h2")[0].startswith("perfsuite: 1 failed, 2 regressed, ")
    urgent = ["verdict", "failed", "regressed", "regressed", "unhealthy", "improved"]
    quiet = ["verdict", "recorded", *["passed"] * 8]
    assert [row[0] for row in parsed.rows if len(row) == 6] == [*urgent, *quiet]
    assert parsed.said("summary") == ["1 recorded, 8 passed", "Spans of the runs: 40", "3 skipped"]


def test_row_shows_figures() -> None:
    rows = Parsed(render([make_session(1, lambda number: "regressed")])).rows
    assert dict(zip(*rows[:2], strict=True)) == {
        "verdict": "regressed",
        "case": "fake-llama-3.1-8b-s256-b1-bf16-mixed-ac_full-1x8",
        "why": "tokens/s -7.5%, tokens/s with stalls -7.3%",
        "tokens/s": "4,326",
        "vs baseline": "-7.5%",
        "memory": "31.0 GiB",
    }


def test_row_shows_that_others_used_the_machine() -> None:
    assert of(make_shared()).rows[1][0] == "unhealthy (shared)"


def test_row_shows_blindness() -> None:
    parsed = of(make_gpu_result(2), make_blind(make_gpu_result(2)))
    assert parsed.said("h2") == ["perfsuite: 2 passed (1 blind), 3 skipped"]
    assert "2 passed (1 blind)" in parsed.said("summary")
    blind = ["passed (blind)", "blind to changes of tokens/s below 32.4%"]
    assert [[row[0], row[2]] for row in parsed.rows[1:3]] == [["passed", ""], blind]


def test_notes_appear_with_explanations_or_folded() -> None:
    bad, good = (
        result.replace(runs=tuple(run.replace(notes=("health | unknown",)) for run in result.runs))
        for result in (make_gpu_result(1, "regressed"), make_gpu_result(2))
    )
    parsed = of(bad, good)
    assert "note: health | unknown (3 launches)" in parsed.said("li")
    assert "Notes: 1" in parsed.said("summary")
    assert [good.case_id, "health | unknown (3 launches)"] in parsed.rows


def test_a_case_that_did_not_run_has_its_reason() -> None:
    parsed = of(never_run())
    assert parsed.said("li") == ["no baseline on cpu-test-2c in baselines (--perf-missing-baseline=fail)"]
    assert parsed.rows[-1][1] == "it needs 2 nodes (processes per node: 8), but this is one machine"
    cut = make_session(0).replace(status="interrupted", interrupted_case="lost-case")
    assert "**The session was interrupted: lost-case was not judged." in render([cut])


MARKUP = (EVIL, "a|b", "`x`", "**a** _b_ __c__ ~~d~~", "[a](http://x)", "<b>", "&lt;", "\\|", "![a](b)")


@pytest.mark.parametrize("value", [*MARKUP, "@all #12", "ac_full-1x8"])
def test_text_is_read_back_as_it_was(value: str) -> None:
    assert Parsed(f"| a |\n| --- |\n| {text(value)} |\n").rows == [["a"], [value]]
    assert Parsed(f"### {text(value)}").said("h3") == [value]


def test_markup_stays_one_line_of_plain_text() -> None:
    assert text("a\n\n# b\r c") == "a &#35; b c"
    assert text("kernels: 9 -> 8 a step (aten._to_copy -1)") == "kernels: 9 -> 8 a step (aten._to_copy -1)"
    assert text("> a _b_ __c__") == "&#62; a _b&#95; &#95;_c&#95;&#95;"
    assert "@" not in text("@torch")
    parsed = Parsed(render([make_evil()]))
    assert EVIL in parsed.said("h3")
    assert all(len(row) in (2, 6, 8) for row in parsed.rows)


def test_it_stays_far_below_what_github_takes() -> None:
    many = MAX_ROWS + 100
    mib = 2**20
    session = make_session(0)
    noisy = judged(make_gpu_result(1, "throttled"), reasons=("x" * 100_000,) * 3)
    quiet = make_result(now().replace(notes=("y" * 100_000,)))
    skipped = Skipped(nodeid="n", case_id="c" * 80, framework="f", reason="r" * 80)
    markdown = render([session.replace(results=(noisy, quiet) * many, skipped=(skipped,) * many)])
    assert len(markdown.encode()) < mib / 2
    assert f"{many - MAX_EXPLAINED} more cases are explained only in the HTML report." in markdown
    cut = [row[0] for row in Parsed(markdown).rows if row[0].startswith("and ")]
    spans = 3 * 600 - MAX_SPANS  # spans of the noisy cases
    assert cut == [*["and 100 more"] * 2, f"and {spans} more", *["and 100 more"] * 2]
    worst = make_counted(make_check(*[make_finding(sentence="|" * 3000)] * 500))
    assert len(render([session.replace(results=(worst,) * MAX_ROWS)]).encode()) < mib


def test_no_control_character_reaches_a_terminal() -> None:
    odd = "\x1b[31mred\x1b[0m \x9b2J \u202egnp.exe \x00\x08\x7f\ud800"
    assert text(odd) == (
        "&#92;x1b&#91;31mred&#92;x1b&#91;0m &#92;x9b2J &#92;u202egnp.exe &#92;x00&#92;x08&#92;x7f&#92;xd800"
    )
    session = make_session(1, lambda number: "passed")
    rendered = render([session.replace(waivers=(odd,), interrupted_case=odd, status="interrupted")])
    assert not set(odd) & {letter for letter in rendered if not letter.isprintable() and letter != "\n"}
