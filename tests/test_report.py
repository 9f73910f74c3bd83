from __future__ import annotations

import json
import math
import re
from typing import Any, get_args

import pytest

from perfsuite.baseline import from_runs
from perfsuite.judge import Outcome, judge
from perfsuite.report import STYLES, Result, Skipped, explanation, table, to_json
from perfsuite.result import Failure, Observed, Run
from tests.samples import make_case, make_figures, make_gpu_machine, make_machine, make_run

BEFORE = make_run(
    figures=make_figures(
        tokens_per_s=98765,
        tokens_per_s_per_device=49382,
        step_s_p50=0.0123,
        step_s_p95=0.0456,
        peak_memory_bytes=67_108_900,
        mfu=0.423,
    )
)


def result(run: Run, before: Run | None = BEFORE, **changes: Any) -> Result:
    values: dict[str, Any] = {
        "nodeid": "bench_cases/test_x.py::test_x[a]",
        "case_id": run.case.id,
        "framework": run.case.framework.name,
        "run": run,
        "verdict": judge(run, from_runs([before]) if before is not None else None),
        "baseline_file": None,
        "directory": "/tmp/launch-1",
    }
    return Result(**{**values, **changes})


def now(**figures: Any) -> Run:
    return BEFORE.replace(figures=BEFORE.figures.replace(**figures))


def test_table_shows_the_figures_in_a_row_of_the_case() -> None:
    lines = table([result(now(tokens_per_s=108642))], color=False, width=160).splitlines()
    headings = ["case", "tokens/s", "per device", "p50 ms", "p95 ms", "memory", "MFU", "vs base", "verdict"]
    assert re.split(r"  +", lines[0].strip()) == headings
    assert lines[1].split() == (
        [BEFORE.case.id, "108,642", "49,382", "12.3", "45.6", "64.0", "MiB", "42.3%", "+10.0%", "passed"]
    )
    assert len(lines) == 2


def test_table_shows_a_slower_run_with_a_minus() -> None:
    shown = table([result(now(tokens_per_s=0.7 * 98765))], color=False, width=160)
    assert "-30.0% " in shown
    assert "regressed" in shown


def test_table_shows_a_dash_for_what_there_is_not() -> None:
    failed = make_run(figures=make_figures(tokens_per_s=None, peak_memory_bytes=None))
    row = table([result(failed, before=None)], color=False, width=160).splitlines()[1]
    assert row.split()[1:] == ["-"] * 7 + ["failed"]


def test_table_has_a_row_for_each_case_and_keeps_their_order() -> None:
    cases = [make_case(micro_batch=size) for size in (3, 1, 2)]
    shown = table([result(make_run(case=case), before=None) for case in cases], color=False, width=200)
    assert [line.split()[0] for line in shown.splitlines()[1:]] == [case.id for case in cases]


@pytest.mark.parametrize("width", [20, 100, 120])
def test_a_narrow_table_folds_the_case_and_keeps_the_figures_whole(width: int) -> None:
    long = make_case(activation_checkpointing="every-2", attention="eager", compile=True, seed=123456)
    run = now(tokens_per_s=123456789).replace(case=long)
    lines = table([result(run, before=None)], color=False, width=width).splitlines()
    assert max(map(len, lines)) <= max(width, 100)
    assert "123,456,789" in lines[1]
    assert "recorded" in lines[1]
    folded = "".join(re.split(r"\s", line)[0] for line in lines[1:])
    assert folded == long.id


def test_color_only_if_asked_for() -> None:
    plain = table([result(BEFORE)], color=False, width=120)
    colored = table([result(BEFORE)], color=True, width=120)
    assert "\x1b[" not in plain
    assert "\x1b[32mpassed" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain


def test_every_outcome_has_a_style() -> None:
    assert set(STYLES) == set(get_args(Outcome))


def test_explanation_names_measured_baseline_by_how_much_and_how_much_is_allowed() -> None:
    run = now(tokens_per_s=79012).replace(notes=("2 allocator retries",))
    told = explanation(result(run, baseline_file="baselines/cpu/x.json")).splitlines()
    assert told == [
        f"{run.case.id}: regressed",
        "  tokens/s: 79,012 tokens/s, baseline 98,765 tokens/s: 20.0% slower, 15.0% allowed: regressed",
        "  peak memory: 64.0 MiB, baseline 64.0 MiB: 0.0% more, 15.0% allowed: passed",
        "  slowest rank: 1; 25 of 25 steps measured",
        "  note: 2 allocator retries",
        "  baseline: baselines/cpu/x.json",
        "  files of the launch: /tmp/launch-1",
    ]


def test_explanation_of_a_failure_ends_with_the_whole_traceback() -> None:
    failure = Failure(
        kind="crash", message="ValueError: x", rank=3, traceback="Traceback:\n  line 1\nValueError: x\n"
    )
    told = explanation(result(make_run(failure=failure))).splitlines()
    assert told[0].endswith(": failed")
    assert told[1] == "  crash: ValueError: x"
    assert told[-4:] == ["  traceback of rank 3:", "    Traceback:", "      line 1", "    ValueError: x"]
    assert not any("slowest rank" in line for line in told)


def test_explanation_lists_what_changed_since_the_baseline() -> None:
    before = BEFORE.replace(observed=Observed(settings={}, environment={"torch": "2.11", "nccl": "2.27"}))
    run = BEFORE.replace(observed=Observed(settings={}, environment={"torch": "2.12"}))
    told = explanation(result(run, before=before))
    assert "  changed since the baseline: nccl: 2.27 -> unset; torch: 2.11 -> 2.12" in told.splitlines()


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        (make_gpu_machine("NVIDIA X9000"), True),
        (make_gpu_machine(), False),
        (make_machine(note="NVML found no GPU: x"), False),
    ],
)
def test_explanation_says_why_a_gpu_has_no_mfu(machine: Any, told: bool) -> None:
    said = explanation(result(make_run(machine=machine), before=None))
    assert ("not in perfsuite's table" in said) == told
    assert "NVML" not in said


def test_explanation_of_one_process_names_no_slowest_rank() -> None:
    alone = make_run(case=make_case(topology={"processes_per_node": 1}))
    assert "slowest rank" not in explanation(result(alone, before=None))


MESSY = now(tokens_per_s=math.nan, mfu=math.inf).replace(
    step_s=(math.nan, math.inf, 0.1), loss=(1.0, -math.inf), probe_s=(math.nan,)
)


def test_json_is_strict_though_figures_are_no_numbers() -> None:
    skipped = Skipped(nodeid="n", case_id="c", framework="f", reason="r")
    written = to_json(make_machine(), [result(MESSY), result(BEFORE)], [skipped], status="complete")
    back = json.loads(json.dumps(written, allow_nan=False))
    assert back == written
    assert (back["schema_version"], back["status"]) == (1, "complete")
    assert back["machine"]["hardware_class"] == "cpu-test-2c"
    assert back["skipped"] == [{"nodeid": "n", "case_id": "c", "framework": "f", "reason": "r"}]
    messy, good = back["results"]
    assert (messy["figures"]["tokens_per_s"], messy["run"]["step_s"]) == ("NaN", ["NaN", "Infinity", 0.1])
    assert good["outcome"] == good["verdict"]["outcome"] == "passed"
    assert good["figures"]["tokens_per_s"] == 98765
    assert [check["metric"] for check in good["verdict"]["checks"]] == ["tokens_per_s", "peak_memory_bytes"]
    assert (good["nodeid"], good["directory"]) == ("bench_cases/test_x.py::test_x[a]", "/tmp/launch-1")
    assert Run.model_validate(good["run"]) == BEFORE


@pytest.mark.parametrize("status", ["complete", "interrupted"])
def test_json_of_nothing(status: Any) -> None:
    written = to_json(make_machine(), [], [], status=status)
    assert (written["results"], written["skipped"], written["status"]) == ([], [], status)
