from __future__ import annotations

import re
from typing import Any

import pytest

from perfsuite.case.case import Topology
from perfsuite.case.hardware import AND
from perfsuite.case.model import Model
from perfsuite.results.baseline import Baseline, from_runs
from perfsuite.results.rank_report import Flops, Observed
from perfsuite.results.run import DeviceHealth, Health, Node, Run
from perfsuite.verdict.comparability import launch_problems, run_changes, setting_differences
from perfsuite.verdict.judge import MAX_UNHEALTHY
from tests.samples import (
    DISTURBED,
    make_case,
    make_figures,
    make_launches,
    make_machine,
    make_run,
)
from tests.verdict.judging import (
    BASELINE,
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


@pytest.mark.parametrize(
    ("now", "before", "said"),
    [
        (
            {"machine": make_machine(hardware_class="cpu-other-8c")},
            {},
            "hardware class was 'cpu-test-2c' in the baseline and is 'cpu-other-8c'",
        ),
        (
            {"flops": Flops(formula="palm-2", per_token=1, parameters=1, matmul_parameters=1)},
            {"flops": Flops(formula="palm-1", per_token=1, parameters=1, matmul_parameters=1)},
            "FLOP formula was 'palm-1' in the baseline and is 'palm-2'",
        ),
        (
            {"observed": Observed(settings={"wrapper": "DDP"}, environment={})},
            {"observed": Observed(settings={"wrapper": "FSDPModule"}, environment={})},
            "observed wrapper was 'FSDPModule' in the baseline and is 'DDP'",
        ),
        (
            {"observed": Observed(settings={"attention": "sdpa"}, environment={})},
            {"observed": Observed(settings={"attention": "eager"}, environment={})},
            "observed attention was 'eager' in the baseline and is 'sdpa'",
        ),
        ({"case": make_case(micro_batch=4)}, {}, "micro_batch was '2' in the baseline and is '4'"),
        (
            {"case": make_case(learning_rate=0.5)},
            {},
            "learning_rate was '0.001' in the baseline and is '0.5'",
        ),
    ],
)
def test_unlike_things_are_not_compared_and_both_values_are_named(
    now: dict[str, Any], before: dict[str, Any], said: str
) -> None:
    verdict = judged([make_run(**now)], from_runs([make_run(**before)] * 3))
    assert (verdict.outcome, verdict.failure, verdict.checks) == ("failed", "unlike", ())
    assert verdict.reasons == (f"cannot be compared: {said}",)


def test_a_setting_that_was_not_looked_at_when_the_baseline_was_recorded_is_a_change() -> None:
    """As after an update of a framework's package, which must not make every baseline useless."""
    run = make_run(observed=Observed(settings={"wrapper": "x", "attention_kernel": "math"}, environment={}))
    before = make_run(observed=Observed(settings={"wrapper": "x"}, environment={}))
    verdict = judged([run], from_runs([before] * 3))
    assert (verdict.outcome, verdict.changed) == ("passed", ("attention_kernel: not looked at -> math",))


def test_of_adapters_where_all_was_trained_only_that_is_told() -> None:
    then = from_runs([make_run(observed=Observed(settings={"trained": "all"}, environment={}))] * 3)
    adapters = {"trained": "adapters only", "adapters": "2", "lora": "rank 4", "quantised_layers": "0"}
    verdict = judged([make_run(observed=Observed(settings=adapters, environment={}))], then)
    assert (verdict.failure, verdict.changed) == ("unlike", ())
    assert verdict.reasons == (
        "cannot be compared: observed trained was 'all' in the baseline and is 'adapters only'",
    )


def test_every_unlike_thing_is_named() -> None:
    run = make_run(case=make_case(micro_batch=4, seed=5))
    verdict = judged([run])
    assert [reason.split(" was ")[0] for reason in verdict.reasons] == [
        "cannot be compared: micro_batch",
        "cannot be compared: seed",
    ]


def test_unlike_in_a_later_launch_is_unlike() -> None:
    assert judged([*usual()[:2], make_run(case=make_case(seed=5))]).failure == "unlike"


def test_where_and_how_long_a_case_may_run_does_not_make_it_another() -> None:
    run = make_run(case=make_case(timeout_s=7, hardware=("cpu", "h100")))
    assert judged([run]).outcome == "passed"


def test_what_changed_around_it_is_listed_and_forbids_nothing() -> None:
    before = in_environment(torch="2.11", OMP_NUM_THREADS="1", same="x")
    now = in_environment(torch="2.12", NCCL_ALGO="Tree", same="x")
    verdict = judged([now], from_runs([before] * 3))
    assert (verdict.outcome, verdict.failure) == ("passed", None)
    assert verdict.changed == (
        "NCCL_ALGO: unset -> Tree",
        "OMP_NUM_THREADS: 1 -> unset",
        "torch: 2.11 -> 2.12",
    )


def test_what_changed_is_listed_with_a_regression() -> None:
    slow = in_environment(torch="2.12").replace(figures=make_figures(tokens_per_s=500))
    verdict = session([slow] * 5, from_runs([in_environment(torch="2.11")] * 3))
    assert (verdict.outcome, verdict.changed) == ("regressed", ("torch: 2.11 -> 2.12",))


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
    ("matmul", "copy", "outcome"),
    [
        (700, 3000, "passed"),
        (631, 2701, "passed"),
        (629, 3000, "unhealthy"),
        (700, 2699, "unhealthy"),
        (900, 9000, "passed"),
        (None, 3000, "passed"),
    ],
)
def test_a_gpu_that_is_slower_than_at_the_baseline_before_the_workload_is_unhealthy(
    matmul: float | None, copy: float, outcome: str
) -> None:
    baseline = from_runs([on_gpu(rate, copy=3000) for rate in (700, 1, 710, 690, 700)])
    verdict = session([on_gpu(matmul, copy=copy, other=1)] * 3, baseline)
    assert verdict.outcome == outcome
    if outcome == "unhealthy":
        what = "matmul_tflops was 629, at the baseline 700 (10% less is healthy)"
        if matmul != 629:
            what = "copy was 2699, at the baseline 3000 (10% less is healthy)"
        assert verdict.reasons[0].startswith("launch 1 set aside: before the workload, ")
        assert verdict.reasons[0].endswith(what)


@pytest.mark.parametrize(
    ("rates", "rate", "outcome"),
    [
        ((240, 239, 241, 240, 238), 217, "passed"),
        ((240, 239, 241, 240, 238), 215, "unhealthy"),
        ((240, 200, 275, 230, 255), 190, "passed"),  # links that scatter between launches of the baseline
        ((240, 200, 275, 230, 255), 120, "unhealthy"),
        ((240, 200), 190, "unhealthy"),  # two launches tell no scatter
    ],
)
def test_a_probe_may_be_as_slow_as_the_baselines_own_launches_scatter(
    rates: tuple[float, ...], rate: float, outcome: str
) -> None:
    before = [run.replace(device_probe={"all_reduce_gb_s": 240}) for run in usual(machine=H100)][: len(rates)]
    before = [
        run.replace(device_probe={"all_reduce_gb_s": rate}) for run, rate in zip(before, rates, strict=True)
    ]
    today = on_gpu(None, all_reduce_gb_s=rate)
    assert session([today] * 3, from_runs(before)).outcome == outcome


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
    ("now", "then", "outcome"),
    [
        ("700", "700", "passed"),
        ("695", "700", "passed"),
        ("500", "700", "unhealthy"),
        ("500, 700", "700", "unhealthy"),  # one card of several
        ("700", "500", "passed"),
        ("500, 700", "500, 700", "passed"),
        ("500", None, "passed"),  # a baseline of before this was read
        (None, "700", "passed"),
    ],
)
def test_gpus_that_may_draw_less_power_than_at_the_baseline_are_unhealthy(
    now: str | None, then: str | None, outcome: str
) -> None:
    verdict = session([with_limit(now)] * 3, from_runs([with_limit(then)] * 5))
    assert verdict.outcome == outcome
    if outcome == "unhealthy":
        assert verdict.reasons[0] == (
            "launch 1 set aside: the GPUs' power limit is 500 W, at the baseline it was 700 W "
            "(`nvidia-smi -pl`)"
        )
    if now != then:
        assert verdict.changed == (f"gpu_power_limit_w: {then or 'unset'} -> {now or 'unset'}",)


@pytest.mark.parametrize(("grown_mib", "is_told"), [(255, False), (257, True), (-5000, False)])
def test_memory_outside_the_allocator_that_grew_is_told_and_not_judged(grown_mib: int, is_told: bool) -> None:
    def holding(mib: int) -> Run:
        (run,) = make_launches(1, machine=H100, device_memory_bytes=mib * 2.0**20)
        return run

    verdict = session([holding(20480 + grown_mib)] * 3, from_runs([holding(20480)] * 5))
    assert verdict.outcome == "passed"
    told = "GPU memory in use, by NVML, also outside torch's allocator: 20.0 GiB -> 20.3 GiB (+257.0 MiB)"
    assert verdict.changed == ((told,) if is_told else ())


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
    before = from_runs([on_gpu(700).replace(observed=bare) for _ in range(5)])
    verdict = session([with_stack(on_gpu(600)) for _ in range(3)], before)
    assert verdict.outcome == "unhealthy"


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


@pytest.mark.parametrize("speed", [0.81, 1, 1.24])
def test_a_machine_about_as_fast_as_at_the_baseline_is_healthy(speed: float) -> None:
    verdict = session([on_machine(speed)], PROBED)
    assert (verdict.outcome, verdict.reasons) == ("passed", ())


@pytest.mark.parametrize(("now", "before"), [(None, 0.01), (0.01, None), (None, None)])
def test_without_a_probe_on_both_sides_every_machine_is_healthy(
    now: float | None, before: float | None
) -> None:
    baseline = from_runs([run_with(probe_s_p50=before)] * 3)
    verdict = judged([run_with(probe_s_p50=now)], baseline, noise_of(0.005, exponent=1))
    assert verdict.outcome == "passed"
    assert check_of(verdict, "tokens_per_s").note is None


@pytest.mark.parametrize("has_formula", [True, False])
def test_a_flop_formula_that_one_side_lacks_is_no_difference(has_formula: bool) -> None:
    flops = Flops(formula="palm-1", per_token=1, parameters=1, matmul_parameters=1)
    with_formula, without = make_run(flops=flops), make_run()
    now, before = (with_formula, without) if has_formula else (without, with_formula)
    assert setting_differences(now, from_runs([before])) == {}


@pytest.mark.parametrize(("probe_s", "is_healthy"), [(1.26, False), (1.25, False), (1.24, True)])
def test_a_machine_at_four_fifths_of_the_speed_at_the_baseline_is_no_longer_healthy(
    probe_s: float, is_healthy: bool
) -> None:
    baseline = from_runs([run_with(probe_s_p50=1.0)] * 3)
    assert (launch_problems(run_with(probe_s_p50=probe_s), baseline) == []) == is_healthy


@pytest.mark.parametrize(("probe_s", "is_healthy"), [(0.79, False), (0.8, False), (0.81, True)])
def test_a_machine_at_five_quarters_of_the_speed_at_the_baseline_is_no_longer_healthy(
    probe_s: float, is_healthy: bool
) -> None:
    baseline = from_runs([run_with(probe_s_p50=1.0)] * 3)
    assert (launch_problems(run_with(probe_s_p50=probe_s), baseline) == []) == is_healthy


def test_a_probe_of_no_time_at_all_is_no_healthy_machine() -> None:
    assert launch_problems(run_with(probe_s_p50=0.0), PROBED) == [
        "by the probe, the machine ran at inf% of its speed at the baseline"
    ]


@pytest.mark.parametrize(("rate", "problems"), [(900, 0), (899.9, 1)])
def test_a_gpu_may_be_slower_than_at_the_baseline_by_exactly_a_tenth(rate: float, problems: int) -> None:
    assert len(launch_problems(on_gpu(rate), from_runs([on_gpu(1000)] * 5))) == problems


@pytest.mark.parametrize(
    ("before", "healthy", "unhealthy"),
    [
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


@pytest.mark.parametrize(("now", "problems"), [("990", 0), ("989.9", 1)])
def test_a_power_limit_may_be_lower_by_exactly_one_percent(now: str, problems: int) -> None:
    assert len(launch_problems(with_limit(now), from_runs([with_limit("1000")] * 5))) == problems


@pytest.mark.parametrize(
    ("today", "said"),
    [
        (0.01106, ("probe between the steps (s): 0.01 -> 0.01106 (+11%)",)),
        (0.01104, ()),
        (0.00906, ()),
        (0.00904, ("probe between the steps (s): 0.01 -> 0.00904 (-10%)",)),
        (0.0, ()),
        (None, ()),
    ],
)
def test_a_probe_that_differs_by_a_tenth_is_told(today: float | None, said: tuple[str, ...]) -> None:
    assert run_changes(run_with(probe_s_p50=today), PROBED) == said


@pytest.mark.parametrize("before", [None, 0.0])
def test_a_probe_that_was_no_size_at_the_baseline_is_no_change(before: float | None) -> None:
    assert run_changes(run_with(probe_s_p50=0.01), from_runs([run_with(probe_s_p50=before)] * 3)) == ()


@pytest.mark.parametrize(("grown_mib", "is_told"), [(256, False), (256.5, True)])
def test_memory_outside_the_allocator_may_grow_by_exactly_256_mib(grown_mib: float, is_told: bool) -> None:
    before, now = (run_with(device_memory_bytes=1e9 + mib * 2.0**20) for mib in (0, grown_mib))
    assert bool(run_changes(now, from_runs([before] * 3))) == is_told


@pytest.mark.parametrize(("now", "before"), [(2.0**40, None), (None, 2.0**30)])
def test_memory_outside_the_allocator_that_one_side_lacks_is_no_change(
    now: float | None, before: float | None
) -> None:
    baseline = from_runs([run_with(device_memory_bytes=before)] * 3)
    assert run_changes(run_with(device_memory_bytes=now), baseline) == ()


def test_metrics_that_nothing_measures_any_more_are_told_in_order() -> None:
    one, other = (run_with(extra=dict.fromkeys(names, 1.0)) for names in (("zz_gone",), ("aa_gone",)))
    assert run_changes(make_run(), from_runs([one, other, one])) == tuple(
        f"metric {name}: in the baseline; the package that measures it is not installed, so it is not judged"
        for name in ("aa_gone", "zz_gone")
    )


def on_nodes(*names: str) -> Run:
    return make_run(nodes=tuple(Node(name=name) for name in names))


def test_nodes_that_measured_nothing_of_the_baseline_are_listed() -> None:
    before = from_runs([on_nodes("n1", "n2"), on_nodes("n2", "n3")])
    assert run_changes(on_nodes("n3", "n1"), before) == ()
    assert run_changes(on_nodes("n2", "n7"), before) == (
        "nodes: n7 measured nothing of the baseline, which is of n1, n2, n3",
    )
    assert run_changes(on_nodes("n8", "n7"), before) == (
        "nodes: n8, n7 measured nothing of the baseline, which is of n1, n2, n3",
    )


def test_a_baseline_that_names_no_nodes_says_nothing_of_them() -> None:
    assert run_changes(on_nodes("n1", "n2"), from_runs([make_run()])) == ()
    assert run_changes(make_run(), from_runs([on_nodes("n1", "n2")])) == ()
