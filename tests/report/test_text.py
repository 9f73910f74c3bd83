import math
from pathlib import Path
from typing import Any

import pytest

from perfsuite.report import text
from perfsuite.report.text import WIDTH, Table, cut, percent, plural, relative, sentence, wrapped
from tests.samples import metric_check

Changes = dict[str, Any]
MEMORY = {"metric": "peak_memory_bytes", "label": "peak memory", "unit": "bytes", "measured": 80 * 2.0**20}
MEMORY |= {"baseline": 64 * 2.0**20, "allowed": 0.01}
UNKNOWN = {"outcome": "failed", "measured": None}
USUAL = {"change": 0.01, "interval": (-0.2, 0.3)}
VAGUE = {"change": 0.0, "interval": (-1.0, math.inf), "minimum_detectable": 0.1}
JOULES = {"metric": "energy_per_token_j", "unit": "J", "change": 0.05, "minimum_detectable": 0.13}
SPEED = "tokens/s: 98,765, baseline 123,456"
SIZE = "peak memory: 80.0 MiB, baseline 64.0 MiB"
USUALLY = f"{SPEED}: 1.0% more (99% interval -20.0% to +30.0%), 13.0% allowed"
BLIND = "; blind: this gate finds only changes of {} or more reliably"
NEW = "corrected for the machine's own speed (by the probe's time to the power of 0.50); new"
SURELY = "regressed (certainly worse, and possibly by more than the tolerance)"
UNSURE = "passed (a regression beyond the tolerance is ruled out; the improvement is not certain)"


def changed(words: str, low_to_high: str, outcome: str) -> str:
    return f"{SPEED}: {words} (99% interval {low_to_high}), 13.0% allowed: {outcome}"


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (
            {"outcome": "regressed", "change": -0.18, "interval": (-0.27, -0.08)},
            changed("18.0% fewer", "-27.0% to -8.0%", "regressed"),
        ),
        ({"change": 0.1, "interval": (-0.004, 0.2)}, changed("10.0% more", "-0.4% to +20.0%", "passed")),
        ({"change": 0.174, "interval": (-0.01, 0.35)}, changed("17.4% more", "-1.0% to +35.0%", UNSURE)),
        (VAGUE, changed("0.0% more", "not known", "passed")),
        ({**MEMORY, "outcome": "regressed", "change": 0.25}, f"{SIZE}: 25.0% more, 1.0% allowed: regressed"),
        ({**MEMORY, "outcome": "improved", "change": -0.25}, f"{SIZE}: 25.0% less, 1.0% allowed: improved"),
        ({**USUAL, "outcome": "regressed"}, f"{USUALLY}: {SURELY}"),
        ({**USUAL, "minimum_detectable": 0.324}, f"{USUALLY}: passed{BLIND.format('32.4%')}"),
        (
            {**USUAL, "minimum_detectable": 0.2, "probe_exponent": 0.5, "note": "new"},
            f"{USUALLY}: passed{BLIND.format('20.0%')}; {NEW}",
        ),
        (JOULES, "tokens/s: 98,765 J, baseline 123,456 J: 5.0% more, 13.0% allowed: passed"),
        ({**MEMORY, **UNKNOWN, "note": "x"}, f"{SIZE.replace('80.0 MiB', 'not measured')}: failed; x"),
        ({**UNKNOWN, "baseline": None, "note": "x"}, "tokens/s: not measured: failed; x"),
        ({**USUAL, "outcome": "inconclusive"}, f"{USUALLY}: inconclusive"),
        ({"outcome": "inconclusive", "note": "no noise"}, f"{SPEED}: inconclusive; no noise"),
        ({"outcome": "recorded", "baseline": None}, "tokens/s: 98,765"),
    ],
    ids=[
        *("slower", "faster", "perhaps faster", "unknown interval", "larger", "smaller", "surely slower"),
        *("blind", "corrected", "another unit", "not measured", "not measured before either"),
        *("inconclusive", "no noise", "recorded"),
    ],
)
def test_sentence_says_change_certainty_and_limit(check: Changes, words: str) -> None:
    shown = metric_check(**check)
    assert sentence(shown) == words
    next_to_an_arm = words.replace("baseline 1", "arm A 1").replace("baseline 6", "arm A 6")
    assert sentence(shown, "arm A") == next_to_an_arm


@pytest.mark.parametrize(
    ("changes", "least", "is_known"),
    [
        ({}, 0.89, True),
        ({}, 0.95, False),
        (MEMORY, 8, True),
        (MEMORY, 47_895, False),
        ({}, math.nan, False),
    ],
    ids=["speed", "tenth of the speed", "memory", "tenfold memory", "unknown"],
)
def test_tenfold_limits_are_not_detectable(changes: Changes, least: float, is_known: bool) -> None:
    check = metric_check(**changes).replace(minimum_detectable=least)
    assert (text.detectable(check) is not None) is is_known


@pytest.mark.parametrize("changes", [{}, MEMORY], ids=["speed", "memory"])
def test_a_blind_gate_finds_no_change(changes: Changes) -> None:
    shown = sentence(metric_check(**changes).replace(minimum_detectable=math.inf))
    assert shown.endswith("; blind: this gate finds no change reliably")


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((-0.899, 8.99), "-89.9% to +899.0%"),
        *(
            (interval, "not known")
            for interval in ((-0.985, 0.1), (-0.1, 9.5), (-0.1, 164.303), (math.nan, math.nan))
        ),
    ],
)
def test_tenfold_intervals_are_not_known(interval: tuple[float, float], words: str) -> None:
    assert text.between(interval) == words


def test_writes_numbers_as_people_read_them() -> None:
    assert [percent(change) for change in (0.05, -0.051, 0, -0.0001)] == ["+5.0%", "-5.1%", "+0.0%", "+0.0%"]
    counted = [(1, "launch"), (2, "launch"), (0, "case"), (1, "kernel"), (11891, "kernel")]
    words = ["1 launch", "2 launches", "0 cases", "1 kernel", "11,891 kernels"]
    assert [plural(count, noun) for count, noun in counted] == words
    assert [cut("abc", 3), cut("abc", 1)] == [["a", "b", "c"], ["a", "and 2 more"]]
    table = Table(headers=("a", "b", "c", "d"), rows=[], last_text_columns=1)
    assert [table.is_figure(column) for column in range(4)] == [False, True, True, False]


def test_paths_are_relative_to_the_root_directory() -> None:
    there = 'baseline: /repo/baselines/x.json, File "/repo/a.py" or /repo/b, /var/repo/x /repository/x /repo'
    here = 'baseline: baselines/x.json, File "a.py" or b, /var/repo/x /repository/x /repo'
    assert (relative(there, Path("/repo")), relative(there, Path("/"))) == (here, there)


@pytest.mark.parametrize("before", range(60))
def test_wraps_a_sentence_at_words(before: int) -> None:
    words = "tokens/s: 4,336, baseline 4,669: 7.3% fewer (99% interval -8.1% to -6.4%), 2.9% allowed: passed"
    lines = wrapped(f"{'x' * before} {words}; 29.9 -> 59.8 GiB a step")
    assert max(map(len, lines)) <= WIDTH
    assert " ".join(line.strip() for line in lines).endswith(f"{words}; 29.9 -> 59.8 GiB a step")


def test_never_splits_a_long_word() -> None:
    path = f"/{'x' * WIDTH}"
    assert wrapped(f"files: {path}") == ["  files:", f"    {path}"]


def test_keeps_lines_that_are_there() -> None:
    assert wrapped("a\n b", indent="") == ["a", " b"]


def test_an_ellipsis_ends_text_that_is_cut() -> None:
    *_, last = cut_short = wrapped("word " * 100, most=2)
    assert (len(cut_short), last[-2:]) == (2, " …")


def test_data_wait_change_is_a_share_of_a_step() -> None:
    check = metric_check(metric="data_wait_s", unit="s", measured=0.05, baseline=0.001, change=0.49)
    assert ": 49.0% of a step more" in text.sentence(check)
