import json
from typing import Any

import pytest

from perfsuite.results.baseline import Acceptance, Baseline, from_runs
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.results.count_baseline import from_runs as counts_of
from perfsuite.results.counts import READS_OF_THE_HOST
from perfsuite.verdict.judge_changes import UNREADABLE, FileChange, Places, is_of_judge, sentences
from tests.counted import make_counts, make_entries
from tests.samples import known, make_figures, make_run

PLACES = Places(root=".", baselines="baselines", cases="bench_cases")
ID = make_run().case.id


def sentences_of(name: str, before: str | None, now: str | None, places: Places = PLACES) -> list[str]:
    return sentences([FileChange(name, before, now)], places, "main")


def of_ini(before: str, now: str) -> list[str]:
    return sentences_of("pytest.ini", f"[pytest]\n{before}", f"[pytest]\n{now}")


def times(*speeds: float, **changes: Any) -> Baseline:
    figures = [make_figures(tokens_per_s=speed, **changes) for speed in speeds]
    return from_runs([make_run(figures=of_launch) for of_launch in figures])


def of_times(before: Baseline, now: Baseline) -> list[str]:
    return sentences_of(f"baselines/cpu/{ID}.json", before.as_json(), now.as_json())


BAD: list[Any] = [None, -1, "x", [], {}, [{}], 1e999]
TIMES = f"baseline of {ID} on cpu"


def test_setting_change_shows_both_values() -> None:
    assert of_ini("perf_strict = inconclusive", "") == ["pytest.ini: perf_strict inconclusive -> not set"]
    assert of_ini("perf_min_judged = 90%", "perf_min_judged = 1%") == [
        "pytest.ini: perf_min_judged 90% -> 1%"
    ]
    assert of_ini("", "addopts = -k b4") == ["pytest.ini: addopts not set -> -k b4"]
    assert of_ini("# a\nperf_strict=improved", "perf_strict = improved") == []


def test_shadow_mode_is_called_so() -> None:
    assert of_ini("", "perf_shadow = true") == ["pytest.ini: shadow mode on: no case fails a test"]
    assert of_ini("perf_shadow = true", "") == ["pytest.ini: shadow mode off"]
    table = "[tool.pytest.ini_options]\nperf_shadow = {}\n"
    assert sentences_of("pyproject.toml", table.format("false"), table.format("true")) == [
        "pyproject.toml: shadow mode on: no case fails a test"
    ]


def test_long_setting_shows_only_its_change() -> None:
    markers = "markers =\n  " + "\n  ".join(f"hardware{number}: cases of it" for number in range(9))
    assert of_ini(markers, markers.replace("hardware3", "other")) == [
        "pytest.ini: markers changed: without hardware3: cases of it; other: cases of it"
    ]


def test_counts_of_the_method_before_are_compared() -> None:
    before = make_counts(method=READS_OF_THE_HOST, kernels={"forward": 100})
    now = make_counts(kernels={"forward": 300})
    then, today = (
        counts_of([make_run(counts=make_entries(rank_counts))]).as_json() for rank_counts in (before, now)
    )
    said = sentences_of(f"baselines/counts/cpu/{ID}.json", then, today)
    assert any("300" in sentence for sentence in said), said
    assert not any("method" in sentence for sentence in said)


def test_names_a_file_that_takes_over_settings() -> None:
    assert sentences_of("bench_cases/pytest.ini", None, "[pytest]\nperf_shadow = true") == [
        "bench_cases/pytest.ini, which contains settings of pytest, was added",
        "bench_cases/pytest.ini: shadow mode on: no case fails a test",
    ]
    assert sentences_of("setup.cfg", "[tool:pytest]\naddopts = -q", None) == [
        "setup.cfg, which contains settings of pytest, was deleted",
        "setup.cfg: addopts -q -> not set",
    ]


def test_other_sections_and_files_judge_nothing() -> None:
    assert sentences_of("pyproject.toml", "[project]\nname = 'a'", "[project]\nname = 'b'") == []
    assert sentences_of("tox.ini", "[tox]\na=1", None) == []
    assert sentences_of("train.py", "a", "b") == []
    assert sentences_of("baselines/README.md", "a", "b") == []
    assert sentences_of(f"baselines/profiles/cpu/{ID}.json", "a", "b") == []


@pytest.mark.parametrize("broken", ["[pytest\n", "\\xff[", UNREADABLE, "key = 1\n"])
@pytest.mark.parametrize(
    "name", ["pytest.ini", "perf-waivers.toml", "baselines/cpu/x.json", "baselines/counts/cpu/x.json"]
)
def test_what_cannot_be_read_on_one_side_is_said(name: str, broken: str) -> None:
    (then,) = sentences_of(name, broken, None)
    assert "cannot be read at main, so its changes are not known" in then
    (now,) = sentences_of(name, None, broken)
    assert "cannot be read in its current version, so its changes are not known" in now


@pytest.mark.parametrize("text", ["tool = 3", "tool.pytest = 3", "tool.pytest.ini_options = 3"])
def test_settings_that_are_no_table_are_said(text: str) -> None:
    (only,) = sentences_of("pyproject.toml", text, "")
    assert only.startswith("pyproject.toml cannot be read at main")


def waiver(tolerated: str = '"3%"', metric: str = "tokens/s", until: str = "2026-12-31") -> str:
    return (
        f'[[waiver]]\ncase = "*"\nmetric = "{metric}"\ntolerated = {tolerated}\nissue = "https://x/1"\n'
        f'owner = "me"\nuntil = {until}\n'
    )


def test_waivers_are_said_by_what_they_tolerate() -> None:
    name = "perf-waivers.toml"
    added = sentences_of(name, None, waiver('"9900%"'))
    assert added == ["waiver of * on tokens/s added: 9900% tolerated until 2026-12-31"]
    assert sentences_of(name, waiver(), waiver('"30%"')) == ["waiver of * on tokens/s: tolerated 3% -> 30%"]
    assert sentences_of(name, waiver(), waiver(until="2036-12-31")) == [
        "waiver of * on tokens/s: until 2026-12-31 -> 2036-12-31"
    ]
    assert sentences_of(name, waiver(), None) == [
        "waiver of * on tokens/s removed: it tolerated 3% and was to end on 2026-12-31"
    ]
    assert sentences_of(name, waiver(), waiver() + waiver('"50%"')) == [
        "waiver of * on tokens/s (2) added: 50% tolerated until 2026-12-31"
    ]
    assert sentences_of(name, waiver(), f"# a comment\n{waiver()}") == []


def test_waivers_outside_the_root_waive_nothing() -> None:
    assert sentences_of("docs/perf-waivers.toml", None, waiver()) == []
    assert sentences_of("sub/perf-waivers.toml", None, waiver(), PLACES._replace(root="sub")) != []


def test_a_baseline_is_said_by_its_figures() -> None:
    assert of_times(times(3000, 3000), times(1000, 1000)) == [f"{TIMES}: x 3.00 slower"]
    assert of_times(times(1000), times(1020)) == [f"{TIMES}: 2.0% faster"]
    larger = times(1000, peak_memory_bytes=3 * 2**30)
    assert of_times(times(1000, peak_memory_bytes=2 * 2**30), larger) == [f"{TIMES}: x 1.50 more peak memory"]


def test_reports_a_baseline_that_scatters_more() -> None:
    assert of_times(times(990, 1000, 1010), times(700, 1000, 1300)) == [
        f"{TIMES}: scatter of its launches 2.0% -> 46.2%"
    ]
    assert of_times(times(*[1000] * 5), times(1000)) == [f"{TIMES}: launches 5 -> 1"]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"tokens_per_s_mean": 330.0}, "x 3.00 slower with stalls"),
        ({"cpu_s_per_step": 1.0}, {"cpu_s_per_step": 3.0}, "x 3.00 more CPU time per step"),
        ({"cpu_s_per_step": 1.0}, {}, "CPU time per step 1,000.0 ms -> not measured"),
        ({"extra": {"no_such": 1.0}}, {"extra": {"no_such": 3.0}}, "nothing that is judged has changed"),
    ],
)
def test_reports_every_judged_baseline_metric(before: dict[str, Any], now: dict[str, Any], said: str) -> None:
    assert of_times(times(1000, **before), times(1000, **now)) == [f"{TIMES}: {said}"]


def test_scatter_of_every_judged_metric_is_said() -> None:
    even = times(1000, 1000)
    launches = [
        launch.replace(figures=launch.figures.replace(tokens_per_s_mean=mean))
        for launch, mean in zip(even.launches, (980.0, 1000.0), strict=True)
    ]
    assert of_times(even, even.replace(launches=tuple(launches))) == [
        f"{TIMES}: scatter of its launches in tokens/s with stalls 0.0% -> 2.0%"
    ]


def test_reports_a_loss_that_differs_midway() -> None:
    before = times(1000)
    curve = before.launches[0].loss
    launch = before.launches[0].replace(loss=(*curve[:7], 99.0, *curve[8:]))
    assert of_times(before, before.replace(launches=(launch,))) == [
        f"{TIMES}: loss between 70% and 80% of the steps {curve[7]:.4g} -> 99"
    ]


def test_other_dtypes_of_a_baseline_are_said() -> None:
    before = times(1000)
    now = before.replace(dtypes={"parameters": {"bfloat16": 8}})
    assert of_times(before, now) == [f"{TIMES}: dtypes changed"]


def test_reports_a_baseline_of_another_result() -> None:
    before = times(1000)
    by = Acceptance(by="Eve", date="2026-11-27", commit=None, reason="it is right")
    launches = tuple(launch.replace(loss=(9.0,)) for launch in before.launches)
    assert of_times(before, before.replace(launches=launches, accepted=by)) == [
        f"{TIMES}: loss at the end 4.7 -> 9, accepted by Eve on 2026-11-27, reason: it is right"
    ]


def test_reports_new_and_deleted_baselines() -> None:
    text = times(1000).as_json()
    assert sentences_of(f"baselines/cpu/{ID}.json", None, text) == [f"{TIMES} added"]
    assert sentences_of(f"baselines/cpu/{ID}.json", text, None) == [f"{TIMES} deleted"]
    assert sentences_of(f"baselines/cpu/{ID}.json", text, f"{text}\n") == [
        f"{TIMES}: nothing that is judged has changed"
    ]


def test_reports_a_count_baseline_by_its_counts() -> None:
    before = counts_of([make_run(counts=make_entries(make_counts()))])
    counts = before.counts[0].counts
    doubled = {name: 2 * calls for name, calls in known(counts.kernels).items()}
    now = before.replace(counts=(before.counts[0].replace(counts=counts.replace(kernels=doubled)),))
    (said,) = sentences_of(f"baselines/counts/cpu/{ID}.json", before.as_json(), now.as_json())
    assert said.startswith(f"baseline of the counts of {ID} on cpu: kernels")
    unjudged: CountBaseline = before.replace(unsteady=("FLOP",))
    (said,) = sentences_of(f"baselines/counts/cpu/{ID}.json", before.as_json(), unjudged.as_json())
    assert said.endswith(": no longer judged: FLOP")


def test_reports_code_and_workflows_by_lines() -> None:
    assert sentences_of("tests/conftest.py", "a\nb\n", "a\nc\nd\n") == [
        "tests/conftest.py changed: 2 lines added, 1 line removed"
    ]
    assert sentences_of("conftest.py", "a\nb", "b\na") == [
        "conftest.py changed: its lines are in a different order"
    ]
    assert sentences_of("conftest.py", None, "a") == ["conftest.py added: 1 line"]
    assert sentences_of(".github/workflows/night.yml", "a", None) == [
        ".github/workflows/night.yml deleted: 1 line"
    ]
    assert sentences_of(".github/CODEOWNERS", "a\nb", "a") == [
        ".github/CODEOWNERS changed: 0 lines added, 1 line removed"
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bench_cases/test_it.py", ""),
        ("bench_cases/deep/sizes.py", ""),
        ("tests/test_it.py", "def test_it(case, bench):\n    bench(case)"),
        ("sizes.py", "from perfsuite import Case, Model"),
    ],
)
def test_knows_a_case_file_by_place_or_content(name: str, text: str) -> None:
    assert is_of_judge(name, PLACES)
    assert sentences_of(name, text, f"{text}\nmore".strip()) == [
        f"case file {name} changed: 1 line added, 0 lines removed"
    ]
    assert sentences_of(name, text or "x", None)[0].startswith(f"case file {name} deleted")


def test_what_weighs_most_comes_first() -> None:
    text = times(1000).as_json()
    changes = [
        FileChange(".github/workflows/a.yml", None, "a"),
        FileChange("bench_cases/test_it.py", None, "a"),
        FileChange("conftest.py", None, "a"),
        FileChange(f"baselines/cpu/{ID}.json", None, text),
        FileChange("pytest.ini", "[pytest]", "[pytest]\nperf_shadow = true"),
        FileChange("perf-waivers.toml", None, waiver()),
    ]
    begins = [sentence.split()[0] for sentence in sentences(changes, PLACES, "main")]
    assert begins == ["pytest.ini:", "waiver", "baseline", "conftest.py", "case", ".github/workflows/a.yml"]


def test_no_damage_of_a_baseline_ends_in_an_error() -> None:
    text = times(1000).as_json()
    content = json.loads(text)
    for key in content:
        for value in BAD:
            damaged = json.dumps({**content, key: value})
            assert sentences_of(f"baselines/cpu/{ID}.json", text, damaged) is not None
            assert sentences_of(f"baselines/cpu/{ID}.json", damaged, text) is not None
