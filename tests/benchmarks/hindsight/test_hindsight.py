"""Tests of the list of pairs, of how a comparison is graded, and of the page with the results."""

import ast
import re
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt

import perfsuite
from perfsuite.errors import CaseError
from perfsuite.results.outcome import CountCheck, Finding, Verdict
from perfsuite.session import against_arm
from tests.benchmarks.hindsight.__main__ import judged, main, run
from tests.benchmarks.hindsight.pairs import PAIRS, SCRIPTS, Pair
from tests.benchmarks.hindsight.results import ALIKE, PAGE, Result, code, read, tables
from tests.counted import make_finding
from tests.samples import make_result, make_run

CASES = SCRIPTS.with_name("cases.py")
BAD = Pair(name="x", thread="x#1", good="x==1", bad="x==2", names="reduce_scatter", script="s")
SAME = Pair(name="x", good="x==1", bad="x==2", script="s")


def private_imports(code: str) -> list[str]:
    """Return imports of names with an underscore, and of names of perfsuite that are not public."""
    names: list[str] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    public = {f"perfsuite.{name}" for name in perfsuite.__all__}
    return [
        name
        for name in names
        if any(part.startswith("_") for part in name.split(".") if part != "__future__")
        or (name.startswith("perfsuite") and name not in public)
    ]


def finding(sentence: str, outcome: Any = "regressed") -> Finding:
    return make_finding(sentence=sentence, outcome=outcome)


def grade(pair: Pair, outcome: Any, *findings: Finding, **more: Any) -> Result:
    judged_so = "improved" if outcome == "failed" else outcome
    counted = CountCheck(outcome=judged_so, findings=findings) if findings or outcome != "failed" else None
    verdict = Verdict(outcome=outcome, launches=2, counts=counted, **more)
    return judged(pair, make_result(make_run(), before=None).replace(verdict=verdict), 3)


def test_every_pair_has_its_name_script_and_target() -> None:
    assert [name for name, count in Counter(pair.name for pair in PAIRS).items() if count > 1] == []
    for pair in PAIRS:
        if not pair.cannot:
            assert (SCRIPTS / f"{pair.script.split()[0]}.py").is_file(), pair.name
            assert bool(pair.names) == pair.is_regression, pair.name
            assert pair.measured().id


def test_regression_is_found_by_the_first_line() -> None:
    cause = finding("reduce_scatter 1 -> 4")
    other = finding("kernels 3 -> 4")
    assert grade(BAD, "regressed", cause, other).outcome == "found"
    assert grade(BAD, "regressed", other, cause).outcome == "found, cause later"
    assert grade(BAD, "regressed", other).outcome == "missed"
    assert grade(BAD, "regressed", finding("reduce_scatter", "passed"), other).outcome == "missed"
    assert grade(BAD, "improved", finding("reduce_scatter", "improved")).outcome == "missed"
    assert grade(BAD, "passed").first == "passed: as in arm A"


@pytest.mark.parametrize("outcome", ["regressed", "improved"])
def test_finding_on_an_unchanged_pair_is_false(outcome: Any) -> None:
    assert grade(SAME, "passed").outcome == "silent"
    assert grade(SAME, outcome, finding("kernels 3 -> 4", outcome)).outcome == "false finding"


def test_other_gradients_precede_other_findings() -> None:
    less = finding("kernels 4 -> 3", "improved")
    more: dict[str, Any] = {"failure": "loss", "reasons": ("the norm of the gradients: 1 -> 2",)}
    result = grade(BAD, "failed", less, **more)
    assert (result.outcome, result.first) == ("missed", "failed: the norm of the gradients: 1 -> 2")
    assert grade(replace(BAD, names="gradients"), "failed", less, **more).outcome == "found"
    assert grade(SAME, "failed", **more).outcome == "false finding"
    result = grade(BAD, "failed", failure="crash", reasons=("arm A failed: no module x",))
    assert (result.outcome, result.first) == ("cannot run", "arm A failed: no module x")


def test_grades_an_unlike_arm_by_its_reason() -> None:
    pair = replace(BAD, names="bfloat16")
    why = "weights are bfloat16 in arm B"
    assert grade(pair, "failed", failure="unlike", reasons=(why,)).outcome == "found"
    changed = "arm B failed: mismatch: bfloat16 ran: the change is the cause"
    assert grade(pair, "failed", failure="mismatch", reasons=(changed,)).outcome == "found"
    wrong = "arm A failed: mismatch: bfloat16 ran"
    assert grade(pair, "failed", failure="mismatch", reasons=(wrong,)).outcome == "cannot run"


def test_unavailable_release_ends_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise CaseError("--arm 'x==2': pip finds none\nmore")

    monkeypatch.setattr(against_arm, "resolved", refused)
    assert run(BAD) == Result(name="x", outcome="cannot run", first="--arm 'x==2': pip finds none", seconds=0)


def test_unknown_pair_lists_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["hindsight", "trl-1"])
    with pytest.raises(SystemExit):
        main()
    assert f"there is no pair trl-1; known are {PAIRS[0].name}, " in capsys.readouterr().err


def test_table_compares_quiet_and_busy_machines() -> None:
    one, other = [pair for pair in PAIRS if pair.is_regression and not pair.cannot][:2]
    quiet = Result(name=one.name, outcome="found", first="regressed: cause", seconds=11)
    busy = replace(quiet, seconds=97, busy=True)
    missed = Result(name=other.name, outcome="missed", first="passed", seconds=22)
    results = [quiet, busy, missed, replace(missed, outcome="found", busy=True)]
    made = tables({(result.name, result.busy): result for result in results})
    assert "2 pairs were run both on a quiet machine and on a busy one" in made
    assert "For 1 of these, the verdict and the first line are the same" in made
    assert f"| {one.what} | found | `cause` | {one.kind} | " in made
    assert f"| {other.what} | missed | `passed` | {other.kind} | " in made
    assert re.findall(r"\| (\S+ / \S+) \|\n", made) == ["11 / 97", "22 / 22"]


def test_table_has_a_dash_for_a_machine_without_a_run() -> None:
    pair = next(pair for pair in PAIRS if pair.is_regression and not pair.cannot)
    result = Result(name=pair.name, outcome="found", first="regressed: cause", seconds=97, busy=True)
    assert " | - / 97 |\n" in tables({(pair.name, True): result})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("3 calls", "`3 calls`"),
        ("held by `a.b` and `c`, once", "``held by `a.b` and `c`, once``"),
        ("held by `a.b`", "`` held by `a.b` ``"),
        ("``a``: 1", "``` ``a``: 1 ```"),
    ],
)
def test_code_may_contain_backquotes(text: str, shown: str) -> None:
    assert code(text) == shown
    assert [token.content for token in MarkdownIt().parseInline(shown)[0].children or ()] == [text]


def test_the_cells_of_the_page_are_whole() -> None:
    """A backquote that is left in a text ends a span of code too early, or begins one that never ends."""
    page = MarkdownIt("commonmark").enable("table").parse(PAGE.read_text())
    texts = [child.content for token in page for child in token.children or () if child.type == "text"]
    assert [text for text in texts if "`" in text] == []


def test_table_shows_the_last_result_of_a_pair() -> None:
    pair = next(pair for pair in PAIRS if not pair.is_regression)
    older = Result(
        name=pair.name, outcome="silent", first="passed: as in arm A", seconds=9, began="2026-11-29 09:00"
    )
    newer = replace(older, outcome="false finding", first="regressed: x", busy=True, began="2026-11-29 12:00")
    made = tables({(pair.name, False): older, (pair.name, True): newer})
    assert "0 of 1 unchanged pairs were silent" in made
    made = tables({(pair.name, False): replace(older, began="2026-11-30 08:00"), (pair.name, True): newer})
    assert "1 of 1 unchanged pairs were silent" in made


def test_quiet_machine_decides_between_runs_of_unknown_time() -> None:
    pair = next(pair for pair in PAIRS if not pair.is_regression)
    quiet = Result(name=pair.name, outcome="silent", first="passed: as in arm A", seconds=9)
    busy = replace(quiet, outcome="false finding", first="regressed: x", busy=True)
    made = tables({(pair.name, False): quiet, (pair.name, True): busy})
    assert "1 of 1 unchanged pairs were silent" in made


def test_pages_say_how_many_were_found() -> None:
    made = tables(read())
    assert "**49 of 67 regressions were found**" in made
    assert "13 do not show in a step of our scripts, and 5 were missed for another reason." in made
    assert "perfsuite found 49 of the 67 that were run." in " ".join(PAGE.read_text().split())
    assert "49 of 67 regressions" in (PAGE.parents[1] / "index.md").read_text()


def test_counts_found_regressions_by_place() -> None:
    one, other = [pair for pair in PAIRS if pair.kind == "event" and not pair.cannot][:2]
    caught = Result(name=one.name, outcome="found", first="regressed: kept", seconds=1)
    missed = Result(name=other.name, outcome="missed", first="passed", seconds=1)
    made = tables({(result.name, result.busy): result for result in (caught, missed)})
    assert "event 1 of 2;" in made
    assert f"| {one.link}: {one.good.split()[0].replace('==', ' ')}, " in made


def test_pair_without_a_result_was_not_run() -> None:
    one = next(pair for pair in PAIRS if pair.kind == "growth" and not pair.cannot)
    cannot = sum(bool(pair.cannot) and not pair.cannot.startswith(ALIKE) for pair in PAIRS)
    tried = sum(pair.is_regression and not pair.cannot for pair in PAIRS)
    made = tables({})
    assert f"Another {cannot + tried} regressions were not run." in made
    assert f"- {one.link}: not run yet (growth: {one.what})." in made


def test_unchanged_pair_without_a_result_was_not_run() -> None:
    pair = next(pair for pair in PAIRS if not pair.is_regression)
    unchanged = sum(not pair.is_regression for pair in PAIRS)
    result = Result(name=pair.name, outcome="silent", first="passed", seconds=1)
    assert f"Unchanged pairs that were not run ({unchanged}):\n\n- `{pair.script}`: " in tables({})
    made = tables({(pair.name, False): result})
    assert f"Unchanged pairs that were not run ({unchanged - 1}):" in made
    names = [pair.name for pair in PAIRS]
    assert "pairs that were not run" not in tables(
        {(name, False): replace(result, name=name) for name in names}
    )


def test_every_thread_is_a_link() -> None:
    made = tables(read())
    addresses = [address for pair in PAIRS if pair.thread for address in re.findall(r"\((.*)\)", pair.link)]
    assert len(addresses) == 81
    assert "https://github.com/huggingface/accelerate/issues/3762" in addresses
    assert "https://github.com/huggingface/pytorch-image-models/releases/tag/v1.0.12" in addresses
    for pair in PAIRS:
        assert not pair.thread or pair.link in made, pair.name


@pytest.mark.parametrize("file", [CASES, *sorted(SCRIPTS.glob("*.py"))], ids=lambda file: file.stem)
def test_a_script_uses_what_its_users_have(file: Path) -> None:
    """Users can rely on the published result only if they could have written the same script."""
    assert private_imports(file.read_text()) == []


def test_a_private_import_is_noticed() -> None:
    code = """
        import torch._dynamo
        from accelerate import Accelerator, _state
        from perfsuite import Case, fakes
        def f():
            from perfsuite.frameworks.common.accelerate_config import force_fsdp
    """
    assert private_imports(textwrap.dedent(code)) == [
        "torch._dynamo",
        "accelerate._state",
        "perfsuite.fakes",
        "perfsuite.frameworks.common.accelerate_config.force_fsdp",
    ]


def test_the_page_has_the_tables_of_these_results() -> None:
    assert tables(read()) in PAGE.read_text()
