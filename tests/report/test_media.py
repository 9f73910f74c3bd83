"""Tests which fields of `explained` the terminal, Markdown and HTML show, and in which order."""

import json
from collections.abc import Callable
from itertools import chain

import pytest

from perfsuite.report import markdown
from perfsuite.report.explained import explained
from perfsuite.report.html import page
from perfsuite.report.terminal import explanation, step_of, table
from perfsuite.results.cost import Cost
from perfsuite.results.rank_report import Failure, SpanTimes
from perfsuite.results.session_file import Measurement
from tests import samples
from tests.counted import (
    BUCKETS,
    FACTS,
    HOST_READ,
    NOT_COUNTED,
    make_check,
    make_counted,
    make_dry,
    make_entries,
    make_finding,
)
from tests.report.html.test_page import Page
from tests.report.test_markdown import Parsed
from tests.report.test_profile import make_explained as make_profiled
from tests.samples import judged, make_result, make_session_file, never_run, now
from tests.sessions import make_gpu_result

COST = Cost(least_s=0.123, most_s=0.456, step_s=0.789, hidden_above=31e9)


def make_everything() -> Measurement:
    """Return a comparison in which every field that a comparison can show has a value."""
    result = make_profiled()
    crash = Failure(kind="crash", message="boom", rank=3, traceback="File x\nRuntimeError: boom")
    *runs, last = (run.replace(counts=make_entries(), notes=("drifting",)) for run in result.runs)
    changes = {"reasons": ("launch 1 set aside: hot",), "changed": ("torch: 2.13.0 -> 2.14.0",)}
    priced = make_finding(cost=COST), HOST_READ.replace(cost=Cost(why_naive="why")), BUCKETS
    result = judged(result, counts=make_check(*priced), **changes)
    saved = SpanTimes(seconds=(3.0,), steps=(6,))
    steps = (0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 3.1, 0.1, 0.1, 0.1)
    last = last.replace(step_s=steps, window=(4, 10), spans={"save checkpoint": saved})
    result = result.replace(runs=(*runs, last.replace(failure=crash)), waivers=("waived: tokens/s -30.0%",))
    empty = {name for name, value in vars(explained(result)).items() if not value}
    assert empty == {"not_counted", "predicted"}
    return result


RESULTS = {
    "everything": make_everything(),
    "not counted": judged(make_gpu_result(2, "regressed"), counts=NOT_COUNTED),
    "dry": make_dry(dry_facts=FACTS),
    "shared": samples.make_shared(),
    "never run": never_run(),
}


def on_terminal(*results: Measurement) -> str:
    return "\n".join([table(results, color=False, width=None), *map(explanation, results)])


def in_markdown(*results: Measurement) -> str:
    return "\n".join(text for _, text in Parsed(markdown.render([make_session_file(*results)])).texts)


def on_page(*results: Measurement) -> str:
    return "\n".join(text for _, text in Page(page.render([make_session_file(*results)])).texts)


Medium = Callable[..., str]
ORDER: dict[Medium, str] = {
    on_terminal: "verdict why reasons counts findings prices listed remarks checks excuses held predicted "
    "notes changed files traces step tracebacks",
    in_markdown: "why reasons decisive findings prices excuses held not_counted changed traces notes",
    on_page: "why excuses reasons tracebacks checks predicted counts prices remarks traces held notes files",
}
"""Medium -> the fields of `Explained` that it shows, in order. `step` means the lines of `step_of`."""


def lines(result: Measurement, field: str) -> list[str]:
    if field == "step":
        return [line for entry in result.counts for line in step_of(entry)]
    section = getattr(explained(result), field)
    if isinstance(section, str | None):
        return [section] if section else []
    texts = section.values() if field == "files" else chain(*section) if field == "tracebacks" else section
    return [line.removeprefix("note: ") for line in texts]


def flat(text: str) -> str:
    """Return the text on one line and in lower case, because line breaks and capital letters can differ."""
    return " ".join(text.split()).lower()


@pytest.mark.parametrize("medium", ORDER)
@pytest.mark.parametrize("name", RESULTS)
def test_each_medium_shows_its_fields_in_order(medium: Medium, name: str) -> None:
    rest = flat(medium(RESULTS[name]))
    for field in ORDER[medium].split():
        for line in lines(RESULTS[name], field):
            _, match, rest = rest.partition(flat(line))
            assert match, (field, line)


LONG = f"reduce_scatter {'and so on ' * 60}"
PRICE = (
    "; predicted cost: 123.0 ms to 456.0 ms of a step of 789.0 ms (at most 57.8%); the step waits for "
    "these bytes only if the link of each GPU is slower than 31 GB/s"
)


def in_short(result: Measurement) -> str:
    return explanation(result, whole=False)


def in_markdown_list(result: Measurement) -> str:
    return " ".join(Parsed(markdown.render([make_session_file(result)])).said("li"))


def in_markdown_table(result: Measurement) -> str:
    """Return the column "why" of the case."""
    return Parsed(markdown.render([make_session_file(result)])).rows[1][2]


@pytest.mark.parametrize("medium", [on_terminal, in_short, in_markdown_list, in_markdown_table, on_page])
@pytest.mark.parametrize("explains", [True, False])
def test_a_long_finding_keeps_its_price(medium: Medium, explains: bool) -> None:
    finding = make_finding(sentence=LONG, cost=COST)
    result = judged(make_counted(make_check(finding)), explained=LONG if explains else None)
    assert PRICE in " ".join(medium(result).split())


def test_json_has_the_change_and_the_price_apart() -> None:
    result = make_counted(make_check(make_finding(sentence=LONG, cost=COST)))
    written = json.loads(make_session_file(result).as_json())
    (finding,) = written["results"][0]["verdict"]["counts"]["findings"]
    assert finding["sentence"] == LONG
    assert Cost.model_validate(finding["cost"]) == COST


def test_markdown_omits_listed_findings() -> None:
    assert BUCKETS.sentence not in in_markdown(RESULTS["everything"])
    assert "baseline" not in on_terminal(samples.make_compared()) + in_markdown(samples.make_compared())


@pytest.mark.parametrize("medium", ORDER)
def test_a_case_of_samples_never_mentions_tokens(medium: Medium) -> None:
    images = samples.make_image_result(tokens_per_s_per_device=61.7)
    text = medium(images)
    both = medium(images, make_result(now(tokens_per_s=60_000)))
    assert ("samples/s" in text, "1,234 samples/s" in text, "token" in text) == (True, False, False)
    assert ("tokens/s" in both, "1,234 samples/s" in both, "60,000 tokens/s" in both) == (True, True, False)
