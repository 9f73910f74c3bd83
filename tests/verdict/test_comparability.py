from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from perfsuite.case.case import Topology
from perfsuite.case.hardware import AND
from perfsuite.case.model import Model
from perfsuite.results.baseline import Baseline, from_runs
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import Flops, Observed
from perfsuite.results.run import DeviceHealth, Health, Node, Run
from perfsuite.verdict.comparability import (
    ASKED,
    UNEXPLAINED,
    is_unlike,
    launch_problems,
    run_changes,
    setting_differences,
)
from perfsuite.verdict.judge import MAX_UNHEALTHY
from perfsuite.verdict.overall import with_counts
from tests.samples import DISTURBED, make_case, make_figures, make_launches, make_machine, make_run
from tests.twin_counts import baseline_of, counts
from tests.verdict.judging import (
    BASELINE,
    CHOSEN,
    H100,
    PROBED,
    check_of,
    in_environment,
    judged,
    noise_of,
    on_gpu,
    on_machine,
    run_with,
    session,
    usual,
    with_stack,
)


def flops(formula: str) -> Flops:
    return Flops(formula=formula, per_token=1, parameters=1, matmul_parameters=1)


def observing(**settings: str) -> Observed:
    return Observed(settings=settings, environment={})


@pytest.mark.parametrize(
    ("what", "then", "now", "of"),
    [
        (
            "hardware class",
            "cpu-test-2c",
            "cpu-other-8c",
            lambda value: {"machine": make_machine(hardware_class=value)},
        ),
        ("FLOP formula", "palm-1", "palm-2", lambda value: {"flops": flops(value)}),
        ("micro_batch", "2", "4", lambda value: {"case": make_case(micro_batch=int(value))}),
        ("learning_rate", "0.001", "0.5", lambda value: {"case": make_case(learning_rate=float(value))}),
    ],
)
def test_unlike_things_are_not_compared_and_both_values_are_named(
    what: str, then: str, now: str, of: Callable[[str], dict[str, Any]]
) -> None:
    verdict = judged([make_run(**of(now))], from_runs([make_run(**of(then))] * 3))
    assert (verdict.outcome, verdict.failure, verdict.checks) == ("failed", "unlike", ())
    assert verdict.reasons == (f"cannot be compared: {what} was {then!r} in the baseline and is {now!r}",)


def test_of_adapters_where_all_was_trained_only_that_is_told() -> None:
    then = from_runs([make_run(observed=observing(trained="all"))] * 3)
    adapters = observing(trained="adapters only", adapters="2", lora="rank 4", quantised_layers="0")
    verdict = judged([make_run(observed=adapters)], then)
    assert (verdict.failure, verdict.changed) == ("unlike", ())
    assert verdict.reasons == (
        "cannot be compared: observed trained was 'all' in the baseline and is 'adapters only'",
    )


def test_every_unlike_thing_of_the_last_launch_is_named() -> None:
    verdict = judged([*usual()[:2], make_run(case=make_case(micro_batch=4, seed=5))])
    assert [reason.split(" was ")[0] for reason in verdict.reasons] == [
        "cannot be compared: micro_batch",
        "cannot be compared: seed",
    ]


def test_where_and_how_long_a_case_may_run_does_not_make_it_another() -> None:
    run = make_run(case=make_case(timeout_s=7, hardware=("cpu", "h100")))
    assert judged([run]).outcome == "passed"


@pytest.mark.parametrize(("speed", "outcome"), [(1000, "passed"), (500, "regressed")])
def test_what_changed_around_it_is_listed_and_forbids_nothing(speed: float, outcome: str) -> None:
    before = in_environment(torch="2.11", OMP_NUM_THREADS="1", same="x")
    now = in_environment(torch="2.12", NCCL_ALGO="Tree", same="x")
    slow = now.replace(figures=make_figures(tokens_per_s=speed))
    verdict = session([slow] * 5, from_runs([before] * 3))
    assert (verdict.outcome, verdict.failure) == (outcome, None)
    assert verdict.changed == (
        "NCCL_ALGO: unset -> Tree",
        "OMP_NUM_THREADS: 1 -> unset",
        "torch: 2.11 -> 2.12",
    )


@pytest.mark.parametrize(("now", "before"), [(True, False), (False, True)])
def test_nothing_observed_on_one_side_is_no_difference(now: bool, before: bool) -> None:
    seen = Observed(settings={"wrapper": "DDP"}, environment={"torch": "2.11"})
    run, then = (make_run(observed=seen if told else None) for told in (now, before))
    verdict = judged([run], from_runs([then] * 3))
    assert (verdict.outcome, verdict.changed) == ("passed", ())


@pytest.mark.parametrize("baseline", [None, BASELINE])
def test_a_disturbed_machine_is_unhealthy_with_or_without_a_baseline(baseline: Baseline | None) -> None:
    runs = [make_run(health=DISTURBED)] * 9
    verdict = session(runs, baseline)
    assert (verdict.outcome, verdict.launches) == ("unhealthy", MAX_UNHEALTHY)
    assert verdict.reasons[0].startswith("launch 1 set aside: other processes used 60% of the cores' time")


def test_every_reason_of_a_launch_is_told() -> None:
    verdict = session([on_machine(0.5).replace(health=DISTURBED)] * 3, PROBED)
    assert re.fullmatch(
        r"launch 3 set aside: other processes used 60% .*; by the probe, the machine ran at 50% .*",
        verdict.reasons[2],
    )


@pytest.mark.parametrize(
    ("matmul", "copy", "told"),
    [
        (631, 2701, None),
        (629, 3000, "matmul_tflops was 629, at the baseline 700"),
        (700, 2699, "copy was 2699, at the baseline 3000"),
        (900, 9000, None),
        (None, 3000, None),
    ],
)
def test_a_gpu_that_is_slower_than_at_the_baseline_before_the_workload_is_unhealthy(
    matmul: float | None, copy: float, told: str | None
) -> None:
    baseline = from_runs([on_gpu(rate, copy=3000) for rate in (700, 1, 710, 690, 700)])
    verdict = session([on_gpu(matmul, copy=copy, other=1)] * 3, baseline)
    assert verdict.outcome == ("unhealthy" if told else "passed")
    said = f"launch 1 set aside: before the workload, {told} (10% less is healthy)"
    assert verdict.reasons[:1] == ((said,) if told else ())


def on_gpus(*rates: float, **run_changes: Any) -> Run:
    """A launch on eight GPUs of two nodes, of which each copied at its rate before the workload."""
    case = make_case(topology=Topology(nodes=2, processes_per_node=4))
    cards = tuple(
        DeviceHealth(index=index, pci_bus_id=f"00000000:{index}B:00.0", node=node)
        for node in ("n1", "n2")
        for index in range(4)
    )
    return on_gpu(None, copy=min(rates)).replace(
        case=case,
        nodes=(Node(name="n1"), Node(name="n2")),
        health=Health(samples=9, seconds=9, steps=9, devices=cards),
        rank_probes=tuple({"copy": rate} for rate in rates),
        **run_changes,
    )


@pytest.mark.parametrize("baseline", [None, from_runs([on_gpus(*[2400] * 8)] * 5)])
def test_a_gpu_that_is_far_behind_the_fastest_is_unhealthy_without_a_baseline_too(
    baseline: Baseline | None,
) -> None:
    rates = [3000, 2900, 2950, 3010, 2990, 2690, 2980, 3000]
    assert launch_problems(on_gpus(*[*rates[:5], 2710, *rates[6:]]), baseline) == [], "a tenth is let pass"
    assert launch_problems(on_gpus(*rates), baseline) == [
        "before the workload, copy was 2690 of rank 5, GPU 1 (00000000:1B:00.0) of n2, 11% less than the "
        "3010 of rank 3, GPU 3 (00000000:3B:00.0) of n1 (10% less is healthy)"
    ]


def test_gpus_of_unlike_products_and_ranks_on_a_cpu_may_differ() -> None:
    run = on_gpus(3000, *[1000] * 7)
    assert launch_problems(run, None)
    mixed = H100.replace(device_name=f"NVIDIA A10{AND}NVIDIA T4")
    assert launch_problems(run.replace(machine=mixed), None) == []
    assert launch_problems(run.replace(machine=make_machine()), None) == []


def test_a_gpu_that_is_slower_than_at_the_baseline_is_named() -> None:
    (why,) = launch_problems(on_gpus(*[2500] * 6, 2490, 2500), from_runs([on_gpus(*[3000] * 8)] * 5))
    assert "copy was 2490 of rank 6, GPU 2 (00000000:2B:00.0) of n2, at the baseline 3000" in why


@pytest.mark.parametrize(
    ("then", "now", "told"),
    [
        (1980, 1620, "SM clock in the measured window: 1980 -> 1620 MHz (-18%)"),
        (1620, 1980, "SM clock in the measured window: 1620 -> 1980 MHz (+22%)"),
        (1980, 1945, None),
        (1980, None, None),
        (None, 1980, None),
    ],
)
def test_another_clock_is_listed_and_explains_an_unhealthy_launch(
    then: float | None, now: float | None, told: str | None
) -> None:
    """`nvidia-smi -lgc` moves neither the highest clock nor the applications clock."""

    def clocked(mhz: float | None, copy: float) -> Run:
        (run,) = make_launches(1, machine=H100, sm_clock_mhz=mhz)
        return run.replace(device_probe={"copy": copy})

    baseline = from_runs([clocked(then, 3000)] * 5)
    verdict = session([clocked(now, 3000)] * 3, baseline)
    assert (verdict.outcome, verdict.changed) == ("passed", (told,) if told else ())
    slow = launch_problems(clocked(now, 2000), baseline)
    assert slow[0].startswith("before the workload, copy was 2000")
    assert slow[1:] == ([told] if told else [])


def with_limit(watts: str | None) -> Run:
    environment = {} if watts is None else {"gpu_power_limit_w": watts}
    return on_gpu(None).replace(observed=Observed(settings={}, environment=environment))


@pytest.mark.parametrize(
    ("now", "then", "lowest"),
    [
        ("700", "700", None),
        ("990", "1000", None),  # exactly 1 % less
        ("989.9", "1000", "989.9"),
        ("500, 700", "700", "500"),  # one card of several
        ("700", "500", None),
        ("500, 700", "500, 700", None),
        ("500", None, None),  # a baseline of before this was read
        (None, "700", None),
    ],
)
def test_gpus_that_may_draw_less_power_than_at_the_baseline_are_unhealthy(
    now: str | None, then: str | None, lowest: str | None
) -> None:
    verdict = session([with_limit(now)] * 3, from_runs([with_limit(then)] * 5))
    assert verdict.outcome == ("unhealthy" if lowest else "passed")
    if lowest:
        assert verdict.reasons[0] == (
            f"launch 1 set aside: the GPUs' power limit is {lowest} W, at the baseline it was {then} W "
            "(`nvidia-smi -pl`)"
        )
    if now != then:
        assert verdict.changed == (f"gpu_power_limit_w: {then or 'unset'} -> {now or 'unset'}",)


@pytest.mark.parametrize(
    ("then_mib", "now_mib", "told"),
    [
        (0, 257, "18.6 GiB -> 18.9 GiB (+257.0 MiB)"),
        (0, 256, None),
        (0, -5000, None),
        (None, 0, None),
        (0, None, None),
    ],
)
def test_memory_outside_the_allocator_that_grew_is_told_and_not_judged(
    then_mib: int | None, now_mib: int | None, told: str | None
) -> None:
    then, now = (
        make_launches(1, machine=H100, device_memory_bytes=None if mib is None else 2e10 + mib * 2.0**20)
        for mib in (then_mib, now_mib)
    )
    verdict = session(now * 3, from_runs(then * 5))
    assert verdict.outcome == "passed"
    said = f"GPU memory in use, by NVML, also outside torch's allocator: {told}"
    assert verdict.changed == ((said,) if told else ())


@pytest.mark.parametrize("changed", ["nccl", "torch", "driver", "cuda", "cudnn"])
def test_a_probe_that_is_slower_with_other_software_blames_no_machine(changed: str) -> None:
    """A new NCCL whose all-reduce is 15 % slower is what the gate is for."""
    before = [with_stack(run.replace(device_probe={"all_reduce": 200})) for run in usual(machine=H100)]
    slower = [
        with_stack(run.replace(device_probe={"all_reduce": 170}), **{changed: "9.9"})
        for run in usual(0.92, machine=H100)
    ]
    verdict = session(slower, from_runs(before))
    assert (verdict.outcome, verdict.unhealthy_launches) == ("regressed", ())
    assert any(line.startswith(f"{changed}: ") and line.endswith(" -> 9.9") for line in verdict.changed)
    assert "all_reduce: 200 -> 170 (-15%)" in verdict.changed
    same = [with_stack(run) for run in slower]
    assert session(same, from_runs(before)).outcome == "unhealthy"


def test_a_baseline_that_does_not_name_the_driver_still_knows_a_slow_gpu() -> None:
    bare = Observed(settings={}, environment={"torch": "2.13.0"})
    before = from_runs([on_gpu(700).replace(observed=bare)] * 5)
    assert session([with_stack(on_gpu(600))] * 3, before).outcome == "unhealthy"


def test_the_order_of_keys_in_a_model_is_no_difference() -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    one, other = (
        make_run(case=make_case(model=Model(name="mine", config=dict(items))))
        for items in (config.items(), reversed(config.items()))
    )
    assert judged([one], from_runs([other] * 3)).failure is None


def test_on_a_cpu_the_device_probe_says_nothing() -> None:
    probed = [run.replace(device_probe={"copy": rate}) for rate, run in zip((9, 1), usual(), strict=False)]
    assert judged(probed[1:], from_runs(probed[:1])).outcome == "passed"


@pytest.mark.parametrize(("now", "before"), [(None, 0.01), (0.01, None), (None, None)])
def test_without_a_probe_on_both_sides_every_machine_is_healthy(
    now: float | None, before: float | None
) -> None:
    baseline = from_runs([run_with(probe_s_p50=before)] * 3)
    verdict = judged([run_with(probe_s_p50=now)], baseline, noise_of(0.005, exponent=1))
    assert verdict.outcome == "passed"
    assert check_of(verdict, "tokens_per_s").note is None


@pytest.mark.parametrize(("now", "before"), [(flops("palm-1"), None), (None, flops("palm-1"))])
def test_a_flop_formula_that_one_side_lacks_is_no_difference(now: Flops | None, before: Flops | None) -> None:
    assert setting_differences(make_run(flops=now), from_runs([make_run(flops=before)])) == {}


@pytest.mark.parametrize(
    ("probe_s", "speed"),
    [(1.26, "79%"), (1.25, "80%"), (1.24, None), (0.81, None), (0.8, "125%"), (0.79, "127%"), (0.0, "inf%")],
)
def test_a_machine_at_four_fifths_or_five_quarters_of_the_baselines_speed_is_no_longer_healthy(
    probe_s: float, speed: str | None
) -> None:
    baseline = from_runs([run_with(probe_s_p50=1.0)] * 3)
    told = f"by the probe, the machine ran at {speed} of its speed at the baseline"
    assert launch_problems(run_with(probe_s_p50=probe_s), baseline) == ([told] if speed else [])


@pytest.mark.parametrize(
    ("before", "healthy", "unhealthy"),
    [
        ((1000,) * 5, 900, 899.9),  # a tenth
        ((240, 200), 199, 197),  # two launches tell no scatter: a tenth
        ((240, 200, 275), 100, 99),  # t of 2 degrees of freedom at 2 standard deviations
        ((240, 200, 275, 230, 255), 165, 164),  # of 4
        ((240, 200, 0, 275, 275), 217, 215),  # a rate of 0 has no logarithm
    ],
)
def test_how_much_slower_a_gpu_may_be_follows_from_how_many_launches_scatter_how_far(
    before: tuple[float, ...], healthy: float, unhealthy: float
) -> None:
    baseline = from_runs([on_gpu(rate) for rate in before])
    assert launch_problems(on_gpu(healthy), baseline) == []
    assert len(launch_problems(on_gpu(unhealthy), baseline)) == 1


@pytest.mark.parametrize(
    ("before", "today", "told"),
    [
        (0.01, 0.01106, "0.01106 (+11%)"),
        (0.01, 0.01104, None),
        (0.01, 0.00906, None),
        (0.01, 0.00904, "0.00904 (-10%)"),
        (0.01, 0.0, None),
        (0.01, None, None),
        (0.0, 0.01, None),
        (None, 0.01, None),
    ],
)
def test_a_probe_that_differs_by_a_tenth_is_told(
    before: float | None, today: float | None, told: str | None
) -> None:
    baseline = from_runs([run_with(probe_s_p50=before)] * 3)
    said = (f"probe between the steps (s): 0.01 -> {told}",) if told else ()
    assert run_changes(run_with(probe_s_p50=today), baseline) == said


def test_metrics_that_nothing_measures_any_more_are_told_in_order() -> None:
    one, other = (run_with(extra=dict.fromkeys(names, 1.0)) for names in (("zz_gone",), ("aa_gone",)))
    assert run_changes(make_run(), from_runs([one, other, one])) == tuple(
        f"metric {name}: in the baseline; the package that measures it is not installed, so it is not judged"
        for name in ("aa_gone", "zz_gone")
    )


def on_nodes(*names: str) -> Run:
    return make_run(nodes=tuple(Node(name=name) for name in names))


@pytest.mark.parametrize(
    ("now", "before", "new"),
    [
        (["n3", "n1"], [["n1", "n2"], ["n2", "n3"]], None),
        (["n2", "n7"], [["n1", "n2"], ["n2", "n3"]], "n7"),
        (["n8", "n7"], [["n1", "n2"], ["n2", "n3"]], "n8, n7"),
        (["n1", "n2"], [[]], None),
        ([], [["n1", "n2"]], None),
    ],
)
def test_nodes_that_measured_nothing_of_the_baseline_are_listed(
    now: list[str], before: list[list[str]], new: str | None
) -> None:
    said = f"nodes: {new} measured nothing of the baseline, which is of n1, n2, n3"
    changed = run_changes(on_nodes(*now), from_runs([on_nodes(*names) for names in before]))
    assert changed == ((said,) if new else ())


OLD, NEW = {"torch": "2.13.0"}, {"torch": "2.14.0"}


def seen(runs: list[Run], environment: dict[str, str], **settings: str) -> list[Run]:
    observed = Observed(settings=settings, environment=environment)
    return [run.replace(observed=observed) for run in runs]


def upgraded(then: dict[str, str], now: dict[str, str], *, speed: float = 1.0) -> Verdict:
    """The verdict after an upgrade of torch that also changed these settings."""
    return session(seen(usual(speed), NEW, **now), from_runs(seen(usual()[:5], OLD, **then)))


@pytest.mark.parametrize(("speed", "outcome"), [(1.0, "passed"), (0.8, "regressed"), (1.25, "improved")])
@pytest.mark.parametrize("setting", ["attention_kernel", "wrapped_modules", "parameter_dtype", "a_hook"])
def test_what_a_library_chooses_is_listed_first_and_speed_is_judged(
    setting: str, speed: float, outcome: str
) -> None:
    verdict = upgraded({setting: "one"}, {setting: "two"}, speed=speed)
    assert (verdict.outcome, verdict.failure, verdict.reasons) == (outcome, None, ())
    chosen = f"{setting}: one -> two (not asked for by the case)"
    assert verdict.changed == (chosen, "torch: 2.13.0 -> 2.14.0")


def test_a_librarys_choice_that_no_version_explains_is_the_first_that_is_told() -> None:
    before, now = (seen(usual(), OLD, attention_kernel=kernel) for kernel in ("Flash", "math"))
    verdict = judged(now[:1], from_runs(before[:5]))
    assert verdict.outcome == "passed"
    said = "attention_kernel: Flash -> math (not asked for by the case)"
    assert verdict.reasons == (f"{UNEXPLAINED}: {said}",)
    assert verdict.changed[0] == said


@pytest.mark.parametrize("setting", sorted(ASKED))
def test_what_a_case_asks_for_otherwise_is_unlike_after_an_upgrade_too(setting: str) -> None:
    verdict = upgraded({setting: "one"}, {setting: "two"})
    assert (verdict.failure, verdict.launches) == ("unlike", 1)
    said = f"cannot be compared: observed {setting} was 'one' in the baseline and is 'two'"
    assert verdict.reasons == (said,)
    assert verdict.changed == ("torch: 2.13.0 -> 2.14.0",)


@pytest.mark.parametrize("setting", ["compute_dtype", "attention", "wrapper"])
@pytest.mark.parametrize("unseen", ["not observed (no linear layer)", "?", None])
@pytest.mark.parametrize("is_now", [True, False])
def test_what_was_not_observed_is_no_difference_and_is_told(
    setting: str, unseen: str | None, is_now: bool
) -> None:
    known, unknown = {setting: "one"}, {} if unseen is None else {setting: unseen}
    verdict = upgraded(*((known, unknown) if is_now else (unknown, known)))
    assert verdict.outcome == "passed"
    if is_now:
        assert verdict.changed[0] == f"{setting}: one -> {unseen or 'not observed'}"
    elif unseen is None:
        assert verdict.changed[-1] == f"{setting}: not looked at -> one"
    else:
        assert verdict.changed[0] == f"{setting}: {unseen} -> one"


def test_what_is_unlike_hides_no_counts() -> None:
    then = from_runs(seen(usual()[:5], OLD, wrapper="DDP"))
    (run,) = seen(usual()[:1], OLD, wrapper="FSDPModule")
    run = run.replace(counts=baseline_of(counts(host_reads={"forward": 99})).counts)
    verdict = with_counts(judged([run], then), [run], baseline_of())
    assert (verdict.outcome, verdict.failure) == ("failed", "unlike")
    assert verdict.counts is not None
    assert verdict.counts.outcome == "regressed"


def test_a_setting_is_asked_for_or_chosen() -> None:
    assert not ASKED & CHOSEN
    assert all(is_unlike(setting, "a", "b") for setting in ASKED)
    assert not any(is_unlike(setting, "a", "b") for setting in CHOSEN)
