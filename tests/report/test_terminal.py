import re
from typing import get_args

import pytest

from perfsuite.report.console import console
from perfsuite.report.terminal import MOST_LINES, explanation, spans_of, table
from perfsuite.report.text import WIDTH, Table
from perfsuite.results.outcome import Outcome
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Figures
from perfsuite.results.session_file import Measurement
from tests import counted, samples
from tests.counted import make_counted, make_dry
from tests.samples import judged, make_result, make_run, never_run, now
from tests.sessions import make_blind, make_explained, make_gpu_result

SLOWER = make_explained(make_gpu_result(2, "regressed"))


def lines(*results: Measurement, width: int | None = None) -> list[list[str]]:
    """Return the cells of each line of the printed table."""
    shown = table(results, color=False, width=width)
    # All other lines are ids. These can be longer than the table.
    rows = [line for line in shown.splitlines() if "  " in line]
    assert max(map(len, rows)) <= (width or WIDTH)
    return [re.split(r"  +", line.strip()) for line in shown.splitlines()]


def test_row_shows_figures() -> None:
    result = make_result(*[now(tokens_per_s=104690)] * 2, case_id="a[red]b[/x]:bug:")
    heading, shown = lines(result, width=120)
    assert heading == ["case", "tokens/s", "p50 ms", "memory", "MFU", "vs base", "verdict"]
    assert shown == ["a[red]b[/x]:bug:", "104,690", "12.3", "64.0 MiB", "42.3%", "+6.0%", "passed"]


WITHOUT_FIGURES = make_result(make_run(figures=Figures()), before=None)


@pytest.mark.parametrize("result", [WITHOUT_FIGURES, never_run()], ids=["no figures", "never run"])
def test_row_of_a_failed_case_shows_dashes(result: Measurement) -> None:
    assert lines(result, width=160)[1][1:] == [*["-"] * 4, "failed"]


def test_row_of_a_dry_run_shows_dashes() -> None:
    assert lines(make_dry(), make_result(now()))[2] == [*["-"] * 5, "regressed (dry run)"]


def test_a_column_needs_one_case_with_a_value() -> None:
    assert "MFU" in lines(WITHOUT_FIGURES, make_result(now()), width=160)[0]


@pytest.mark.parametrize("width", [80, 110, None])
def test_too_wide_row_has_its_case_above(width: int | None) -> None:
    long = samples.make_case(activation_checkpointing="every-2", attention="eager", seed=123456)
    run = now(tokens_per_s=12345678, peak_memory_bytes=123 * 2**30).replace(case=long)
    _, *rows = lines(*[make_result(run, before=None)] * 2, width=width)
    assert rows[::2] == [[long.id]] * 2
    assert rows[1] == ["12,345,678", "12.3", "123.0 GiB", "42.3%", "-", "recorded"]


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_every_outcome_is_coloured_and_uncut(outcome: Outcome) -> None:
    large = now(tokens_per_s=12345678, step_s_p50=12.3456, peak_memory_bytes=1023.9 * 2**20)
    results = [make_result(*[large] * 10, verdict=make_result(large).verdict.replace(outcome=outcome))]
    plain, colored = (table(results, color=color, width=80) for color in (False, True))
    assert plain.split()[-1] == outcome
    assert "\x1b[" not in plain
    colour = {"passed": 32, "improved": 32, "recorded": 36, "regressed": 31, "failed": 31}.get(outcome, 33)
    assert f"\x1b[{colour}m{outcome}" in colored
    assert re.sub(r"\x1b\[[0-9;]*m| +(?=\x1b\[0m\n)", "", colored) == plain


def test_qualifiers_follow_the_verdict() -> None:
    rows = lines(samples.make_shared(), judged(make_result(now()), counts=counted.NOT_COUNTED))
    assert [line[-1] for line in rows if "(" in line[-1]] == ["unhealthy (shared)", "passed (not counted)"]
    heading, shown = lines(make_dry())
    assert heading == ["case", "computed", "collectives", "live peak", "dry run"]
    assert shown[1:] == ["551.0 TFLOP", "59.9 GiB", "41.0 GiB", "regressed"]
    shown = lines(make_dry(dry_facts=counted.FACTS), width=80)[-1]
    assert shown[2:] == ["41.0 GiB", "81%: tight", "941,530", "regressed"]
    assert explanation(make_dry(), whole=False) == explanation(make_dry())


def test_labels_figures_that_nothing_judges() -> None:
    text = explanation(
        make_result(now(gpu_utilisation=97.4, energy_per_token_j=0.0321, own_tokens_per_s=1e5))
    )
    shown = [line.strip() for line in text.splitlines()]
    assert [line.removesuffix(" (not judged)") for line in shown if "not judged" in line] == [
        "tokens/s per device: 49,382",
        "95th percentile of a step: 45.6 ms",
        "p95/p50 of a step: 1.10",
        "GPU utilisation: 97%",
        "energy: 32.10 mJ per token",
    ]
    assert "reported by fake: 100,000 tokens/s (+1.3% compared with perfsuite's clock)" in shown
    assert "counts" not in text
    assert "  energy: 2.00 mJ per sample (not judged)" in explanation(samples.make_image_result())


def test_failure_text_never_controls_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\n::add-mask::x"
    result = make_result(make_run(failure=Failure(kind="crash", message=evil, rank=0, traceback=evil)))
    console().print(evil)
    print(table([result.replace(case_id=evil)], color=False, width=None), explanation(result), sep="\n")
    printed = capsys.readouterr().out
    assert printed.count("\\x1b]0;owned\\x07") == 4
    assert not re.search(r"[\x00-\x09\x0b-\x1f]|^\s*::", printed, re.MULTILINE)


CRASHED = make_result(
    make_run(failure=Failure(kind="crash", message="x" * 90 + " y" * 200, rank=3, traceback="a\nb\n" * 50))
)
MANY_COUNTS = make_counted(
    counted.make_check(
        *(counted.HOST_READ.replace(sentence=f"reads {'and so on ' * 12}{number}") for number in range(30))
    )
)
HIDDEN = judged(
    SLOWER,
    counts=counted.NOT_COUNTED.replace(notes=("a CUDA graph was replayed " * 20,)),
    changed=("a -> b",) * 99,
)


@pytest.mark.parametrize(
    "result",
    [CRASHED, MANY_COUNTS, SLOWER, HIDDEN, samples.make_shared(), samples.make_compared(), never_run()],
    ids=["crashed", "many counts", "slower", "not counted", "shared", "compared", "never run"],
)
def test_explains_a_case_in_twelve_lines(result: Measurement) -> None:
    shown = explanation(result, whole=False).splitlines()
    assert len(shown) <= MOST_LINES
    assert max(map(len, shown)) <= WIDTH
    assert result.directory in shown[-1]
    assert result.verdict.outcome in shown[0]


def test_a_short_explanation_names_what_was_not_counted() -> None:
    assert "\n  counts: not counted: a CUDA graph" in explanation(HIDDEN, whole=False)


def test_a_short_explanation_cuts_no_sentence() -> None:
    text = explanation(MANY_COUNTS, whole=False)
    assert re.search(r"on \d+\n  \d+ lines not shown: see -v or the HTML report", text)


def test_a_short_explanation_has_the_end_of_a_traceback() -> None:
    text = explanation(CRASHED, whole=False)
    assert "launch 1, traceback of rank 3 (last lines):\n    a\n    b\n" in text
    assert text.endswith(f"\n    b\n  files of the launches: {CRASHED.directory}")


def test_short_form_shows_only_what_decided() -> None:
    first, why, speed, *others = explanation(SLOWER, whole=False).splitlines()
    assert (first, why) == (f"{SLOWER.case_id}: regressed after 3 launches", f"  {counted.EXPLAINED}")
    assert speed.startswith("  tokens/s: 4,336, baseline 4,669: 7.3% fewer (99% interval")
    text = "\n".join(others)
    assert "regressed: host reads in forward 1 -> 2" in text
    assert "changed since the baseline: torch: 2.12.1 -> 2.13.0" in text
    assert [left_out for left_out in ("peak memory", "not judged", "counted:") if left_out in text] == []


def test_short_form_names_blindness_once() -> None:
    text = " ".join(explanation(make_blind(make_result(now())), whole=False).split())
    assert ("; blind: this gate finds only" in text, "blind to changes" in text) == (True, False)


def test_cuts_long_tables_and_counts_the_rest() -> None:
    entries = counted.make_entries(*[counted.make_counts(host_reads={"forward": rank}) for rank in range(5)])
    text = explanation(make_result(now().replace(counts=entries)))
    text_lines = [" ".join(line.split()) for line in text.splitlines()]
    shown = [f"step 4 of rank {rank}, counted:" for rank in (0, 1)]
    left = "not shown: the counts of 3 ranks; see the HTML report"
    assert [line for line in text_lines if line.endswith("counted:") or "not shown:" in line] == [
        *shown,
        left,
    ]
    assert "reduce_scatter 64 ranks float32 backward 33 29.9 GiB" in text_lines


LONG = "x" * 90
WIDE = Table(headers=("span", "arm", "times"), rows=[(LONG, "A", "1"), (LONG, "B", "2")], text_columns=2)


def test_spans_that_fit_have_a_line_each() -> None:
    _, _, heading, row = spans_of(Table(caption="c", headers=("span", "times"), rows=[("rollout", "3")]))
    assert (heading.split(), row.split()) == (["span", "times"], ["rollout", "3"])


def test_too_wide_span_name_appears_above() -> None:
    *_, heading, name, of_a, of_b = [line.split() for line in spans_of(WIDE)]
    assert heading == ["arm", "times"]
    assert (name, of_a, of_b) == ([LONG], ["A", "1"], ["B", "2"])


def test_a_table_without_spans_has_no_heading() -> None:
    assert spans_of(Table(headers=("span",), rows=[])) == []
