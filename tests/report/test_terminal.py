from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from perfsuite.report.dry_facts import lines
from perfsuite.report.terminal import console, explanation, table
from perfsuite.results.dry_facts import DryFacts
from perfsuite.results.metric import GATED
from perfsuite.results.outcome import STYLES, Outcome, Verdict
from perfsuite.results.rank_report import Failure, Observed
from perfsuite.results.run import Figures, Health
from perfsuite.verdict.noise import ClassNoise
from perfsuite.verdict.sequential import Noise
from tests.counted import (
    BUCKETS,
    EXPLAINED,
    FULL_SIZE,
    HOST_READ,
    make_check,
    make_counted,
    make_counts,
    make_dry,
    make_entries,
    make_finding,
)
from tests.report.test_dry_facts import FIT, limit
from tests.samples import (
    BEFORE,
    NOISE,
    make_case,
    make_compared,
    make_figures,
    make_gpu_machine,
    make_image_result,
    make_machine,
    make_result,
    make_run,
    make_shared,
    never_run,
    now,
)

MIB = 2.0**20


def row(shown: str) -> list[str]:
    return shown.splitlines()[1].split()


# The table


def test_table_shows_the_figures_in_a_row_of_the_case() -> None:
    shown = table([make_result(*[now(tokens_per_s=104690)] * 2)], color=False, width=160)
    lines = shown.splitlines()
    assert re.split(r"  +", lines[0].strip()) == [
        "case",
        "tokens/s",
        "per device",
        "p50 ms",
        "p95 ms",
        "memory",
        "MFU",
        "vs base",
        "launches",
        "verdict",
    ]
    figures = ["104,690", "49,382", "12.3", "45.6", "64.0", "MiB", "42.3%"]
    assert lines[1].split() == [BEFORE.case.id, *figures, "+6.0%", "2", "passed"]
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("factor", "change", "outcome"),
    [
        (1, "+0.0%", "passed"),
        (0.99999, "+0.0%", "passed"),
        (0.95, "-5.0%", "passed"),
        (0.7, "-30.0%", "regressed"),
        (1.5, "+50.0%", "improved"),
    ],
)
def test_vs_base_is_the_change_of_the_speed(factor: float, change: str, outcome: str) -> None:
    runs = [now(tokens_per_s=factor * 98765)] * 3
    assert row(table([make_result(*runs)], color=False, width=160))[-3:] == [change, "3", outcome]


def test_vs_base_does_not_speak_of_another_metric() -> None:
    told = make_result(*[now(peak_memory_bytes=128 * MIB)] * 3)
    other_order = told.replace(verdict=told.verdict.replace(checks=told.verdict.checks[::-1]))
    for each in (told, other_order):
        assert row(table([each], color=False, width=160))[-3:] == ["+0.0%", "3", "regressed"]


def test_table_shows_a_dash_for_what_there_is_not() -> None:
    failed = make_run(figures=Figures())
    assert row(table([make_result(failed, before=None)], color=False, width=160))[1:] == [
        *["-"] * 7,
        *["1", "failed"],
    ]


def test_table_shows_a_case_that_was_never_launched() -> None:
    assert row(table([never_run()], color=False, width=160))[-2:] == ["0", "failed"]


def test_table_has_a_row_for_each_case_and_keeps_their_order() -> None:
    cases = [make_case(micro_batch=size) for size in (3, 1, 2)]
    results = [make_result(make_run(case=case), before=None) for case in cases]
    shown = table(results, color=False, width=200)
    assert [line.split()[0] for line in shown.splitlines()[1:]] == [case.id for case in cases]


@pytest.mark.parametrize("width", [120, 140])
def test_a_wide_table_folds_the_case_and_keeps_the_rest_whole(width: int) -> None:
    long = make_case(activation_checkpointing="every-2", attention="eager", seed=123456)
    run = now(tokens_per_s=12345678).replace(case=long)
    lines = table([make_result(run, before=None)], color=False, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert "12,345,678" in lines[1]
    assert "recorded" in lines[1]
    assert lines[0].split()[-2:] == ["launches", "verdict"]
    folded = "".join(re.split(r"\s", line)[0] for line in lines[1:])
    assert folded == long.id


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_no_outcome_is_cut_short_however_long_the_row(outcome: Outcome) -> None:
    large = now(
        tokens_per_s=12345678,
        tokens_per_s_per_device=12345678,
        step_s_p50=12.3456,
        step_s_p95=12.3456,
        peak_memory_bytes=1023.9 * MIB,
    )
    told = make_result(*[large] * 10, verdict=make_result(large).verdict.replace(outcome=outcome))
    assert table([told], color=False, width=80).split()[-1] == outcome


def test_shared_figures_are_marked_in_table_and_explanation() -> None:
    shared = make_shared()
    assert table([shared], color=False, width=None).splitlines()[1].endswith("  unhealthy (shared)")
    told = "  shared: others used the machine; its figures are shown, and counts alone are judged"
    assert told in explanation(shared).splitlines()
    assert "shared" not in explanation(make_result(now()))


def test_in_a_pipe_the_table_is_as_wide_as_it_needs() -> None:
    results = [make_result(now(), case_id=name) for name in ("x" * 230, "short")]
    lines = table(results, color=False, width=None).splitlines()
    assert [line.split()[0] for line in lines] == ["case", "x" * 230, "short"]
    assert all(230 < len(line) < 330 for line in lines)


def test_the_table_shows_ids_as_they_are() -> None:
    told = table([make_result(now(), case_id="a[red]b[/x]:bug:")], color=False, width=140)
    assert "a[red]b[/x]:bug:" in told


def test_color_only_if_asked_for() -> None:
    plain = table([make_result(BEFORE)], color=False, width=120)
    colored = table([make_result(BEFORE)], color=True, width=120)
    assert "\x1b[" not in plain
    assert "\x1b[32mpassed" in colored
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored) == plain


@pytest.mark.parametrize("outcome", get_args(Outcome))
def test_what_is_neither_good_nor_bad_is_yellow(outcome: Outcome) -> None:
    verdict = Verdict(outcome=outcome, launches=1)
    shown = table([make_result(BEFORE, verdict=verdict)], color=True, width=120)
    codes = {"green": 32, "red": 31, "cyan": 36, "yellow": 33}
    assert f"\x1b[{codes[STYLES[outcome].colour]}m{outcome}" in shown
    expected = {"passed": 32, "improved": 32, "recorded": 36, "regressed": 31, "failed": 31}
    assert f"\x1b[{expected.get(outcome, 33)}m{outcome}" in shown


# A result in words


def test_explanation_says_every_check_and_where_the_files_are() -> None:
    runs = [now(tokens_per_s=79012)] * 3
    told = explanation(make_result(*runs, baseline_file="baselines/cpu/x.json")).splitlines()
    assert told[0] == f"{BEFORE.case.id}: regressed after 3 launches"
    speed, mean, memory, jitter = told[1:5]
    assert re.fullmatch(
        r"  tokens/s: 79,012, baseline 98,765: 20\.0% fewer "
        r"\(99 % interval -2\d\.\d% to -1\d\.\d%\), 13\.0% allowed: regressed",
        speed,
    )
    assert mean.startswith("  tokens/s with stalls: 97,000, baseline 97,000: 0.0% more")
    assert memory.startswith("  peak memory: 64.0 MiB, baseline 64.0 MiB: 0.0%")
    assert jitter == "  p95/p50 of a step: 1.10 (not judged)"
    assert told[5:] == ["  baseline: baselines/cpu/x.json", "  files of the launches: /tmp/runs/x"]


def test_explanation_of_one_launch_has_no_plural() -> None:
    assert explanation(make_result(BEFORE)).splitlines()[0] == f"{BEFORE.case.id}: passed after 1 launch"


def test_explanation_tells_each_note_once_and_how_often() -> None:
    noted = [("drifting", "retries"), ("drifting",), ()]
    told = explanation(make_result(*(now().replace(notes=notes) for notes in noted))).splitlines()
    assert [line for line in told if "note:" in line] == [
        "  note: drifting (2 launches)",
        "  note: retries",
    ]


def test_explanation_tells_what_is_not_known_of_the_machines_health() -> None:
    unknown = Health(samples=2, seconds=1, steps=2, notes=("GPU health is unknown",))
    told = explanation(make_result(BEFORE.replace(health=unknown))).splitlines()
    assert "  note: GPU health is unknown" in told


def test_explanation_says_blind_and_why_inconclusive() -> None:
    told = explanation(make_result(BEFORE, noise=ClassNoise()))
    assert told.count(": inconclusive; the noise between launches is unknown") == len(GATED)
    known = dict.fromkeys(NOISE.by_metric, Noise(sigma=0.3, degrees_of_freedom=30))
    assert "; blind: this gate finds only " in explanation(
        make_result(BEFORE, noise=ClassNoise(by_metric=known))
    )


def test_explanation_of_a_failure_ends_with_the_whole_traceback() -> None:
    failure = Failure(
        kind="crash", message="ValueError: x", rank=3, traceback="Traceback:\n  line 1\nValueError: x\n"
    )
    told = explanation(make_result(BEFORE, make_run(failure=failure))).splitlines()
    assert told[:2] == [f"{BEFORE.case.id}: failed after 2 launches", "  crash: ValueError: x"]
    assert told[-4:] == ["  traceback of rank 3:", "    Traceback:", "      line 1", "    ValueError: x"]


def test_of_two_arms_a_traceback_says_of_which_it_is() -> None:
    failed = make_run(failure=Failure(kind="crash", message="ValueError: x", rank=3, traceback="line 1"))
    compared = make_compared().replace(before=(failed,), runs=(failed,))
    told = explanation(compared).splitlines()
    assert told[-4:] == [
        "  traceback of rank 3, arm A:",
        "    line 1",
        "  traceback of rank 3, arm B:",
        "    line 1",
    ]


def test_what_a_failure_says_does_not_reach_the_terminal_as_a_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    evil = "\x1b]0;owned\x07\n::add-mask::x"
    failure = Failure(kind="crash", message=evil, rank=0, traceback=evil)
    result = make_result(make_run(failure=failure))
    console().print(evil)
    print(table([result.replace(case_id=evil)], color=False, width=None), explanation(result), sep="\n")
    printed = capsys.readouterr().out
    assert printed.count("\\x1b]0;owned\\x07") == 4
    assert not re.search(r"[\x00-\x09\x0b-\x1f]|^\s*::", printed, re.MULTILINE)


def test_explanation_of_a_failure_of_no_rank() -> None:
    failure = Failure(kind="timeout", message="killed", traceback="last lines of agent-0.log:\nwaiting")
    told = explanation(make_result(make_run(failure=failure))).splitlines()
    assert told[-3:] == ["  traceback:", "    last lines of agent-0.log:", "    waiting"]
    bare = failure.replace(traceback=None)
    assert "traceback" not in explanation(make_result(make_run(failure=bare)))


def test_explanation_of_an_unhealthy_machine_tells_of_each_launch() -> None:
    before = now(probe_s_p50=0.01)
    told = explanation(make_result(*[now(probe_s_p50=0.02)] * 3, before=before)).splitlines()
    assert told[0].endswith(": unhealthy after 3 launches")
    assert told[1:4] == [
        f"  launch {number} set aside: by the probe, the machine ran at 50% of its speed at the baseline"
        for number in (1, 2, 3)
    ]


def test_explanation_of_a_case_that_was_never_launched() -> None:
    assert explanation(never_run()).splitlines() == [
        f"{make_case().id}: failed after 0 launches",
        "  no baseline on cpu-test-2c in baselines, and --perf-missing-baseline=fail",
        "  files of the launches: /tmp/runs/x",
    ]


def test_explanation_lists_what_changed_since_the_baseline() -> None:
    before = BEFORE.replace(observed=Observed(settings={}, environment={"torch": "2.11", "nccl": "2.27"}))
    run = BEFORE.replace(observed=Observed(settings={}, environment={"torch": "2.12"}))
    told = explanation(make_result(run, before=before))
    assert "  changed since the baseline: nccl: 2.27 -> unset; torch: 2.11 -> 2.12" in told.splitlines()
    assert "changed since" not in explanation(make_result(before, before=before))


@pytest.mark.parametrize(
    ("machine", "told"),
    [
        (make_gpu_machine("NVIDIA X9000"), 1),
        (make_gpu_machine(), 0),
        (make_machine(note="NVML found no GPU: x"), 0),
    ],
)
def test_explanation_says_once_why_a_gpu_has_no_mfu(machine: Any, told: int) -> None:
    said = explanation(make_result(*[make_run(machine=machine)] * 3, before=None))
    assert said.count("not in perfsuite's table") == told
    assert "NVML" not in said


def test_explanation_tells_utilisation_and_energy_where_they_are_known() -> None:
    known = explanation(
        make_result(make_run(figures=make_figures(gpu_utilisation=97.4, energy_per_token_j=0.0321)))
    )
    assert "GPU utilisation: 97 %" in known
    assert "energy: 32.10 mJ per token" in known
    assert "energy" not in explanation(make_result(make_run()))


def test_samples_are_said_where_samples_are_counted() -> None:
    images = make_image_result(tokens_per_s_per_device=61.7)
    heading, shown = table([images], color=False, width=200).splitlines()
    assert "samples/s" in heading
    assert "tokens" not in heading
    assert re.search(r" 1,234 +61\.7 ", shown)
    mixed = table([images, make_result(now())], color=False, width=200).splitlines()
    assert "tokens/s" in mixed[0]
    assert " 1,234 samples/s " in mixed[1]
    assert " 98,765 " in mixed[2]
    said = explanation(images)
    assert "  samples/s: 1,234, baseline 2,468: 50.0% fewer" in said
    assert "  samples/s with stalls: 1,200, baseline 2,400: 50.0% fewer" in said
    assert "  energy: 2.00 mJ per sample" in said
    assert "token" not in said


def test_table_fits_a_narrow_terminal() -> None:
    run = make_run(figures=make_figures(tokens_per_s=1_234_567, peak_memory_bytes=123 * 2**30, mfu=0.5))
    lines = table([make_result(run, before=None)] * 2, color=False, width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1] == lines[3] == run.case.id
    assert "1,234,567" in lines[2]
    assert "123.00 GiB" in lines[2]


# Counts


def test_explanation_begins_with_what_explains_and_goes_on_with_the_counts() -> None:
    told = make_counted()
    told = told.replace(verdict=told.verdict.replace(explained=EXPLAINED))
    assert explanation(told).splitlines()[:8] == [
        f"{told.case_id}: regressed after 1 launch",
        f"  {EXPLAINED}",
        "  counts: regressed",
        f"    regressed: {make_finding().sentence}",
        "    regressed: host reads in forward 1 -> 2",
        f"    not judged: {BUCKETS.sentence}",
        "    differs between launches, not judged: live peak of rank 1",
        "    kernels are not judged: torch 2.13.0 -> 2.14.0",
    ]


def test_explanation_shows_what_a_step_did_and_the_baseline_of_the_counts() -> None:
    told = explanation(make_counted()).splitlines()
    start = told.index("  step 4 of ranks 0-63, counted:")
    assert told[start + 2].startswith("    computed: 551.0 TFLOP: forward 158.0 TFLOP, ")
    assert "  baseline of the counts: baselines/counts/sm90/x.json" in told
    assert "counts" not in explanation(make_result(now()))


def test_an_explanation_in_short_leaves_out_what_no_verdict_needs() -> None:
    long, short = (explanation(make_counted(), whole=whole).splitlines() for whole in (True, False))
    left_out = [line for line in long if line not in short]
    assert [line for line in long if line in short] == short
    first, *others = [line.strip() for line in left_out if not line.startswith("    ")]
    assert first == "p95/p50 of a step: 1.10 (not judged)"
    assert all(line.startswith("step 4 of ") for line in others)
    assert explanation(make_dry(), whole=False) == explanation(make_dry())


def test_explanation_names_ranks_where_they_differ() -> None:
    unlike = make_entries(make_counts(), make_counts(memory=None))
    told = explanation(make_counted(make_check(HOST_READ.replace(ranks="1")), counts=unlike)).splitlines()
    assert "    regressed: host reads in forward 1 -> 2 (rank 1)" in told
    assert [line for line in told if line.endswith("counted:")] == [
        "  step 4 of rank 0, counted:",
        "  step 4 of rank 1, counted:",
    ]


def test_a_dry_run_is_told_as_one() -> None:
    told = explanation(make_dry()).splitlines()
    assert told[0] == f"{FULL_SIZE.id}: regressed by a dry run as if on NVIDIA H100 80GB HBM3"
    assert told[-1] == "  files of the dry run: /tmp/runs/dry"
    assert "nan" not in "".join(told)


def test_a_dry_run_tells_what_it_predicts() -> None:
    told = explanation(make_dry(dry_facts=DryFacts(fit=FIT, roofline=limit()))).splitlines()
    assert f"  {lines(DryFacts(fit=FIT))[0]}" in told
    assert f"  {lines(DryFacts(roofline=limit()))[0]}" in told


def test_the_table_of_dry_runs_shows_what_was_counted() -> None:
    heading, shown = table([make_dry()], color=False, width=None).splitlines()
    assert re.split(r"  +", heading) == ["case", "computed", "collectives", "live peak", "dry run"]
    assert re.split(r"  +", shown)[1:] == ["551.0 TFLOP", "59.9 GiB", "41.0 GiB", "regressed"]
    full = make_dry(dry_facts=DryFacts(fit=FIT, roofline=limit()))
    heading, _, shown = table([full], color=False, width=80).splitlines()
    assert len(heading) <= 80
    assert re.split(r"  +", shown.strip())[2:] == ["41.0 GiB", "81%: tight", "941,530", "regressed"]


def test_a_dry_run_among_launches_has_dashes_for_what_was_not_measured() -> None:
    shown = table([make_dry(), make_result(now())], color=False, width=None).splitlines()[1]
    assert re.split(r"  +", shown)[1:] == [*["-"] * 8, "regressed (dry run)"]


def test_a_comparison_of_arms_is_explained_by_its_pairs() -> None:
    result = make_compared()
    verdict = result.verdict.replace(changed=("torch: 2.13.0 -> 2.14.0",))
    said = explanation(result.replace(verdict=verdict))
    assert f"{result.case_id}: regressed after 5 pairs of launches" in said
    assert "tokens/s: 69,136, arm A 98,765: " in said
    assert "not as in arm A: torch: 2.13.0 -> 2.14.0" in said
    assert "baseline" not in said
