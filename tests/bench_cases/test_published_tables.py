from pathlib import Path
from typing import Any

import pytest

from bench_cases import published
from bench_cases.published import (
    Comparison,
    PublishedFigure,
    PublishedFile,
    Row,
    best_batch,
    compare,
    latest,
    rooflines,
)
from perfsuite import documents
from perfsuite.errors import CaseError
from perfsuite.results.dry_facts import DryFacts, Roofline
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Figures, Run
from perfsuite.results.session_file import Measurement
from tests.samples import make_case, make_figures, make_result, make_run, make_session_file, never_run


def row(case: str = "a", value: float | None = 93600, reported: str = "93.6K", **changes: Any) -> Row:
    return Row(
        settings=("FSDP", "4"),
        devices=16,
        figures=(PublishedFigure(quantity="tokens_per_s", value=value, reported=reported),),
        case=case,
    ).replace(**changes)


def comparison(*rows: Row, **changes: Any) -> Comparison:
    return Comparison(
        name="x",
        title="FSDP or 3D",
        source="a blog",
        accelerator="H100 80GB",
        conditions="Llama-3.1-8B",
        headings=("Framework", "Nodes"),
        rows=rows,
    ).replace(**changes)


def measured(**figures: Any) -> Measurement:
    return make_result(make_run(figures=make_figures(**figures)), before=None)


CRASHED = make_result(
    make_run(failure=Failure(kind="crash", message="x"), figures=make_figures(tokens_per_s=None))
)


@pytest.mark.parametrize(
    ("row", "results", "shown"),
    [
        (row(twin="twin"), {}, ("not run: needs 16 x H100 80GB", "-", "-")),
        (row().replace(case="", no_case="no torchao"), {"a": measured()}, ("no case: no torchao", "-", "-")),
        (row(), {"a": measured(tokens_per_s=102960)}, ("102,960", "1.10", "recorded")),
        (row(), {"a": CRASHED}, ("crash", "-", "failed")),
    ],
    ids=["not run", "no case", "measured", "failed"],
)
def test_row_has_figure_ratio_and_verdict(
    row: Row, results: dict[str, Measurement], shown: tuple[str, ...]
) -> None:
    table = compare(comparison(row), results)
    figures = ("tokens/s, published", "tokens/s, here", "ratio", "verdict")
    assert table.headers == ("Framework", "Nodes", *figures)
    assert table.rows == (("FSDP", "4", "93.6K", *shown),)


@pytest.mark.parametrize("changes", [{"case": ""}, {"no_case": "float8 needs torchao"}])
def test_a_row_has_a_case_or_the_reason_why_none(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="row FSDP / 4 needs a case, or no_case with the reason"):
        row(**changes)


@pytest.mark.parametrize(
    ("twins", "shown"),
    [
        ({"twin": "twin"}, "5,000 tokens/s, recorded"),
        (
            {"twin": "twin", "two_node_twin": "nodes"},
            "5,000 tokens/s, recorded; on two nodes: 3,000 tokens/s, recorded",
        ),
        ({"twin": "none", "two_node_twin": "nodes"}, "on two nodes: 3,000 tokens/s, recorded"),
    ],
    ids=["one node", "both", "two nodes"],
)
def test_twins_have_their_own_column_without_a_verdict(twins: dict[str, Any], shown: str) -> None:
    results = {"twin": measured(tokens_per_s=5000), "nodes": measured(tokens_per_s=3000)}
    table = compare(comparison(row(**twins)), results)
    assert table.headers[-1] == "CPU twin"
    assert table.rows[0][3:] == ("not run: needs 16 x H100 80GB", "-", "-", shown)


def test_relative_time_refers_to_the_named_case() -> None:
    def relative(case: str, value: float, reported: str) -> Row:
        figure = PublishedFigure(quantity="relative_time", value=value, reported=reported)
        return row(case, figures=(figure,), relative_to="ddp")

    both = comparison(relative("ddp", 1, "5m57s"), relative("fsdp", 0.748, "4m27s"))
    results = {"ddp": measured(tokens_per_s=1000), "fsdp": measured(tokens_per_s=1600)}
    assert [cells[2:5] for cells in compare(both, results).rows] == [
        ("5m57s", "1.00", "1.00"),
        ("4m27s", "0.62", "0.84"),
    ]
    del results["ddp"]
    assert compare(both, results).rows[1][2:5] == ("4m27s", "not measured", "-")


def test_unstated_unit_is_shown_without_a_ratio() -> None:
    figures = (PublishedFigure(quantity="unstated", value=11000, reported="11,000"),)
    table = compare(comparison(row(figures=figures)), {"a": measured(tokens_per_s=40000)})
    assert table.rows[0][2:5] == ("11,000", "40,000 tokens/s", "-")


def test_further_figures_are_beside_each_other() -> None:
    figures = (
        PublishedFigure(quantity="step_s", value=0.748, reported="748"),
        PublishedFigure(quantity="reserved_memory_bytes", value=14736 * 2**20, reported="14736"),
        PublishedFigure(quantity="gpu_utilisation", value=86.2, reported="86.2 +/- 9.7"),
    )
    result = measured(step_s_p50=0.7, reserved_memory_bytes=14.5 * 2**30)
    table = compare(comparison(row(figures=figures)), {"a": result})
    assert table.headers[-3:] == ("memory, published / here", "GPU usage, published / here", "verdict")
    assert table.rows[0][2:] == ("748", "700 ms", "0.94", "14736 / 14.5 GiB", "86.2 +/- 9.7 / -", "recorded")


def test_stars_the_best_batch_before_retries() -> None:
    results = {r.case_id: r for r in (swept(4, 1000), swept(7, 2000), swept(8, 3000, retries=3))}
    rows = [row(case_id, sweep="baseline") for case_id in results] + [row("other", sweep="other")]
    shown = [cells[3] for cells in compare(comparison(*rows), results).rows]
    assert shown == ["1,000", "2,000 ★", "3,000", "not run: needs 16 x H100 80GB"]


def test_shows_notes_of_table_and_rows_once() -> None:
    table = compare(comparison(row(note="a"), row(note="a"), row(note="b"), notes=("first",)), {})
    assert table.notes == ("first", "a", "b")


def test_an_unknown_comparison_lists_the_known_ones() -> None:
    file = PublishedFile(comparisons=(comparison(row()), comparison(row(), name="gpt-on-v100")))
    assert file.find("x").name == "x"
    with pytest.raises(
        CaseError, match=r"unknown comparison 'gpt-v100'\. Did you mean 'gpt-on-v100'\? Known: x, gpt"
    ):
        file.find("gpt-v100")


LIMIT = Roofline(
    flops=2 * 10**15,
    peak_flops=1e15,
    wire_bytes=0,
    link_bytes_per_s=450e9,
    between_machines_bytes=0,
    tokens=400_000,
)
"""A roofline of at most 200,000 tokens/s."""


def dry(limit: Roofline | None = LIMIT) -> Measurement:
    return make_result(make_run(dry=True, dry_facts=DryFacts(roofline=limit)), before=None)


@pytest.mark.parametrize(
    ("figures", "shown"),
    [
        ({"quantity": "tokens_per_s", "value": 100_000}, "50.0% / -"),
        ({"quantity": "tokens_per_s_per_device", "value": 10_000}, "80.0% / -"),
        ({"quantity": "step_s", "value": 8}, "25.0% / -"),
        ({"quantity": "mfu", "value": 0.3}, "- / -"),
        ({"quantity": "tokens_per_s"}, "- / -"),
    ],
)
def test_published_speed_has_a_share_of_roofline(figures: dict[str, Any], shown: str) -> None:
    table = compare(comparison(row(figures=(PublishedFigure(reported="x", **figures),))), {}, {"a": LIMIT})
    assert table.headers[-2:] == ("share of the roofline, published / here", "verdict")
    assert table.rows[0][-2:] == (shown, "-")
    result = measured(tokens_per_s=120_000, roofline_share=0.6)
    table = compare(comparison(row(value=100_000)), {"a": result}, {"a": LIMIT})
    assert table.rows[0][-2] == "50.0% / 60.0%"


def test_newest_faultless_launch_counts() -> None:
    case_id = make_case().id
    results = [measured(tokens_per_s=1), measured(tokens_per_s=2), dry()]
    results.append(make_result(make_run(inject="slowdown=30%"), before=None))
    old, new, of_dry_run, faulty = (
        make_session_file(result, started_at=f"2026-01-0{day}T00:00:00+00:00")
        for day, result in enumerate(results, 1)
    )
    assert latest([new, faulty, old, of_dry_run]) == {case_id: results[1]}
    assert rooflines([new, of_dry_run]) == {case_id: LIMIT}
    assert rooflines([new, make_session_file(dry(None))]) == {}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a store with one measured case. A published table has this case and another one."""
    result = measured(tokens_per_s=102960)
    rows = (row(case=result.case_id), row(case="other"))
    file = PublishedFile(comparisons=(comparison(*rows, title="FSDP | 3D", notes=("Read *this*.",)),))
    documents.write(tmp_path / "published.json", file)
    monkeypatch.setattr(published, "PUBLISHED", tmp_path / "published.json")
    documents.write(tmp_path / "store" / "runs" / "20260101" / "results.json", make_session_file(result))
    return tmp_path / "store"


def test_shows_a_comparison_from_the_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published.main(["x", "--store", str(store)])
    shown = capsys.readouterr().out
    assert "FSDP | 3D\na blog. Llama-3.1-8B.\n" in shown
    here, other = (line for line in shown.splitlines() if "93.6K" in line)
    assert "1.10" in here
    assert "not run: needs 16 x H100" in other
    assert "- Read *this*." in shown


def test_shows_every_comparison_in_markdown(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published.main(["--markdown", "--results", *map(str, store.glob("runs/*/results.json"))])
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "## FSDP &#124; 3D"
    assert {"| FSDP | 4 | 93.6K | 102,960 | 1.10 | recorded |", "- Read &#42;this&#42;."} <= {*lines}


@pytest.mark.parametrize("words", [["nosuch"], ["--results", "none.json"]])
def test_names_a_missing_comparison_or_file(store: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"bench_cases.published: .*(unknown comparison 'nosuch'|none.json)"):
        published.main(words)


# The best batch of a sweep

V100 = {1: 622.0, 2: 1358.0, 4: 2753.0, 7: 4791.0, 8: 2444.0}
"""tokens/s of GPT-2 XL under FSDP on 4 x V100-16GB, by batch size. 8 needs retries, and 9 does not fit."""


def run(batch: int, tokens_per_s: float | None, retries: float | None = 0, **changes: Any) -> Run:
    figures = make_figures(tokens_per_s=tokens_per_s, alloc_retries=retries)
    return make_run(case=make_case(micro_batch=batch), figures=figures, **changes)


def swept(batch: int, tokens_per_s: float, retries: float | None = 0) -> Measurement:
    return make_result(run(batch, tokens_per_s, retries), before=None)


def out_of_memory(batch: int) -> Measurement:
    failure = Failure(kind="out_of_memory", message="OutOfMemoryError: no 2 GiB left")
    return make_result(
        run(batch, None, None, failure=failure).replace(figures=Figures()),
        before=None,
        excused="out of memory",
    )


def unhealthy(result: Measurement, **changes: Any) -> Measurement:
    """Return the same result with its first launch set aside."""
    verdict = result.verdict.replace(unhealthy_launches=(1,), **changes)
    return result.replace(verdict=verdict)


RETRIED_FIRST = make_result(run(8, 2000, retries=2), run(8, 2000), run(8, 2000), before=None)
RETRIED_LAST = make_result(run(8, 2000), run(8, 2000), run(8, 2000, retries=2), before=None)
"""A result in which one launch of three has retries, so that their median is 0."""


@pytest.mark.parametrize(
    ("results", "best"),
    [
        ([swept(4, 1000), swept(8, 2000, retries=1)], 0),
        ([swept(4, 1000), swept(8, 1000)], 0),
        ([swept(8, 1000), swept(4, 1000)], 1),
        ([swept(1, 1000), unhealthy(swept(2, 9000), outcome="unhealthy")], 0),
        ([unhealthy(RETRIED_FIRST)], 0),
        ([RETRIED_FIRST], None),
        ([RETRIED_LAST], None),
        ([], None),
        ([never_run()], None),
        ([out_of_memory(1), out_of_memory(2)], None),
        ([swept(1, 1000, retries=3)], None),
        ([swept(1, 1000, retries=None)], None),
        ([*(swept(batch, speed, retries=batch // 8) for batch, speed in V100.items()), out_of_memory(9)], 3),
    ],
    ids=[
        *("the fastest retried", "of equals the smallest", "in any order", "unhealthy"),
        *("the retry was set aside", "a retry in the first launch", "a retry in the last launch"),
        *("empty", "never run", "out of memory", "retries", "retries unknown", "as its authors starred"),
    ],
)
def test_best_is_the_fastest_without_retries(results: list[Measurement], best: int | None) -> None:
    assert best_batch(results) is (None if best is None else results[best])


def test_refuses_a_sweep_of_different_cases() -> None:
    other = make_result(make_run(case=make_case(sequence_length=32)), before=None)
    with pytest.raises(
        ValueError, match=r"differ only in micro_batch, but got fake-\S+-s32-b1-\S+ and fake-\S+-s64-b1-"
    ):
        best_batch([swept(2, 1000), other])
