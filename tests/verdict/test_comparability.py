from collections.abc import Callable

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
    OTHER_CODE,
    UNEXPLAINED,
    is_unlike,
    launch_problems,
    run_changes,
    setting_differences,
)
from perfsuite.verdict.policy import MAX_UNHEALTHY
from tests.samples import DISTURBED, known, make_case, make_figures, make_launches, make_machine, make_run
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


def seen(runs: list[Run], environment: dict[str, str], **settings: str) -> list[Run]:
    observed = Observed(settings=settings, environment=environment)
    return [run.replace(observed=observed) for run in runs]


# Differences that make launches incomparable


@pytest.mark.parametrize(
    ("what", "make", "then", "now"),
    [
        ("hardware class", lambda name: make_run(machine=make_machine(hardware_class=name)), "a", "b"),
        ("FLOP formula", lambda name: make_run(flops=flops(name)), "a", "b"),
        ("micro_batch", lambda size: make_run(case=make_case(micro_batch=int(size))), "2", "4"),
        ("learning_rate", lambda rate: make_run(case=make_case(learning_rate=float(rate))), "0.001", "0.5"),
    ],
    ids=["hardware class", "FLOP formula", "micro_batch", "learning_rate"],
)
def test_refuses_unlike_things_naming_both_values(
    what: str, make: Callable[[str], Run], then: str, now: str
) -> None:
    verdict = judged([make(now)], from_runs([make(then)] * 3))
    assert (verdict.outcome, verdict.failure, verdict.checks) == ("failed", "unlike", ())
    said = f"cannot be compared: {what} was {then!r} in the baseline and is {now!r}"
    assert verdict.reasons == (said,)


def test_reports_full_training_before_its_effects() -> None:
    then = from_runs(seen([make_run()] * 3, {}, trained="all"))
    adapters = {"trained": "adapters only", "adapters": "2", "lora": "rank 4", "quantised_layers": "0"}
    verdict = judged(seen([make_run()], {}, **adapters), then)
    assert (verdict.failure, verdict.changed) == ("unlike", ())
    said = "cannot be compared: observed trained was 'all' in the baseline and is 'adapters only'"
    assert verdict.reasons == (said,)
    verdict = judged([*usual()[:2], make_run(case=make_case(micro_batch=4, seed=5))])
    names = [reason.split(" was ")[0] for reason in verdict.reasons]
    assert names == ["cannot be compared: micro_batch", "cannot be compared: seed"]


def in_order(*keys: str) -> Run:
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    return make_run(case=make_case(model=Model(name="mine", config={key: config[key] for key in keys})))


KEYS = ("model_type", "hidden_size", "num_attention_heads")


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (make_run(), make_run(case=make_case(timeout_s=7, hardware=("cpu", "h100")))),
        (in_order(*KEYS), in_order(*KEYS[::-1])),
        (make_run(), make_run(flops=flops("palm-1"))),
        (make_run(flops=flops("palm-1")), make_run()),
        *((in_environment(torch="2.11"), make_run())[::step] for step in (1, -1)),
        *((*seen([make_run()], {}, wrapper="DDP"), make_run())[::step] for step in (1, -1)),
    ],
)
def test_values_unknown_to_one_side_do_not_differ(then: Run, now: Run) -> None:
    verdict = judged([now], from_runs([then] * 3))
    assert (verdict.outcome, verdict.changed) == ("passed", ())
    assert setting_differences(now, from_runs([then])) == {}


# What makes a launch unhealthy


@pytest.mark.parametrize("baseline", [None, BASELINE], ids=["recording", "judging"])
def test_lists_all_reasons_of_a_disturbed_machine(baseline: Baseline | None) -> None:
    disturbed = "launch 1 set aside: other processes used 60% of the cores' time"
    verdict = session([make_run(health=DISTURBED)] * 9, baseline)
    assert (verdict.outcome, verdict.launches) == ("unhealthy", MAX_UNHEALTHY)
    assert verdict.reasons[0].startswith(disturbed)


def test_a_slow_disturbed_machine_has_both_reasons() -> None:
    disturbed = "launch 1 set aside: other processes used 60% of the cores' time"
    (said,) = session([on_machine(0.5).replace(health=DISTURBED)], PROBED, max_unhealthy=1).reasons
    assert said.startswith(disturbed)
    assert said.endswith(f"; {at_speed('50%')}")


def on_gpus(*rates: float) -> Run:
    """Return a launch on eight GPUs of two nodes. Before the workload, each GPU copied at the given rate."""
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
    )


def with_limit(watts: str | None) -> Run:
    environment = {} if watts is None else {"gpu_power_limit_w": watts}
    return on_gpu(None).replace(observed=Observed(settings={}, environment=environment))


def at_speed(speed: str) -> str:
    return f"according to the probe, the machine ran at {speed} of its speed at the baseline"


def slower(what: str, rank: str = "", allowed: str = "10%") -> str:
    name, now, then = what.split()
    reading = f"{name} was {now}{rank}, compared with {then} at the baseline"
    return f"before the workload, {reading} (up to {allowed} less is healthy)"


RATES = [on_gpu(rate, copy=3000) for rate in (700, 1, 710, 690, 700)]
GPU_6 = " of rank 6, GPU 2 (00000000:2B:00.0) of n2"
LIMIT = "the GPUs' power limit is {} W, and was {} W at the baseline (`nvidia-smi -pl`)"


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        *(
            ([run_with(probe_s_p50=1.0)] * 3, run_with(probe_s_p50=probe_s), speed and at_speed(speed))
            for probe_s, speed in (
                *((1.26, "79%"), (1.25, "80%"), (1.24, None), (0.81, None)),
                *((0.8, "125%"), (0.79, "127%"), (0.0, "inf%")),
            )
        ),
        (RATES, on_gpu(631, copy=2701, other=1), None),
        (RATES, on_gpu(629, copy=3000), slower("matmul_tflops 629 700")),
        (RATES, on_gpu(700, copy=2699), slower("copy 2699 3000")),
        (RATES, on_gpu(900, copy=9000), None),
        (RATES, on_gpu(None, copy=3000), None),
        ([on_gpus(*[3000] * 8)] * 5, on_gpus(*[2500] * 6, 2490, 2500), slower("copy 2490 3000", GPU_6)),
        # The allowed slowdown of a GPU depends on the number of launches and on their scatter (Student's t).
        *(
            ([on_gpu(rate) for rate in rates], on_gpu(now), reason)
            for rates, healthy, unhealthy, median, allowed in (
                ((1000,) * 5, 900, 899.9, 1000, "10%"),
                ((240, 200), 199, 197, 220, "10%"),  # two launches are too few for a scatter
                ((240, 200, 275), 100, 99, 240, "58%"),
                ((240, 200, 275, 230, 255), 165, 164, 240, "31%"),
                ((240, 200, 0, 275, 275), 217, 215, 240, "10%"),  # a rate of 0 has no logarithm
            )
            for now, reason in (
                (healthy, None),
                (unhealthy, slower(f"matmul_tflops {unhealthy} {median}", allowed=allowed)),
            )
        ),
        *(
            ([with_limit(then)] * 5, with_limit(now), lowest and LIMIT.format(lowest, then))
            for now, then, lowest in (
                *(("700", "700", None), ("990", "1000", None), ("989.9", "1000", "989.9")),
                *(("500, 700", "700", "500"), ("700", "500", None), ("500, 700", "500, 700", None)),
                *(("500", None, None), (None, "700", None)),
            )
        ),
        # On a CPU, the rates of the probe are not compared.
        ([make_run(device_probe={"copy": 9})] * 5, make_run(device_probe={"copy": 1}), None),
    ],
)
def test_machine_unlike_its_baseline_is_unhealthy(before: list[Run], now: Run, reason: str | None) -> None:
    assert launch_problems(now, from_runs(before)) == ([reason] if reason else [])


UNEQUAL = [3000, 2900, 2950, 3010, 2990, 2690, 2980, 3000]
SLOWEST = (
    "before the workload, copy was 2690 on rank 5, GPU 1 (00000000:1B:00.0) of n2, 11% less than the "
    "3010 on rank 3, GPU 3 (00000000:3B:00.0) of n1"
)


def test_gpu_that_falls_behind_its_peers_is_unhealthy() -> None:
    equal = from_runs([on_gpus(*[2400] * 8)] * 5)
    assert launch_problems(on_gpus(*[*UNEQUAL[:5], 2710, *UNEQUAL[6:]]), equal) == [], (
        "a difference of 10% is allowed"
    )
    run = on_gpus(*UNEQUAL)
    assert launch_problems(run, equal) == [
        f"{SLOWEST} (0% less at the baseline; a lag of up to 10% is healthy)"
    ]
    unlike = H100.replace(device_name=f"NVIDIA A10{AND}NVIDIA T4")
    assert [launch_problems(run.replace(machine=other), None) for other in (unlike, make_machine())] == [
        [],
        [],
    ]


def test_a_gpu_that_was_always_slower_is_healthy() -> None:
    """GPUs of the same model differ. A machine with a slow GPU must still get verdicts."""
    run = on_gpus(*UNEQUAL)
    assert launch_problems(run, from_runs([run] * 5)) == []
    before = from_runs([run] * 5)
    unknown = before.replace(launches=[launch.replace(slowest_share={}) for launch in before.launches])
    assert launch_problems(run, unknown) == []


def test_only_a_very_slow_gpu_is_unhealthy_without_a_baseline() -> None:
    assert launch_problems(on_gpus(*UNEQUAL), None) == []
    (reason,) = launch_problems(on_gpus(*[*UNEQUAL[:5], 2250, *UNEQUAL[6:]]), None)
    assert "25% less than the 3010" in reason
    assert reason.endswith("(a lag of up to 25% is healthy)")


@pytest.mark.parametrize("changed", ["nccl", "torch", "driver", "cuda", "cudnn"])
def test_new_software_blames_no_machine(changed: str) -> None:
    """An all-reduce that is 15% slower with a new NCCL is a regression, and not a slow machine."""
    before, after = (
        [with_stack(run.replace(device_probe={"all_reduce": rate})) for run in usual(speed, machine=H100)]
        for rate, speed in ((200, 1), (170, 0.92))
    )
    verdict = session([with_stack(run, **{changed: "9.9"}) for run in after], from_runs(before))
    assert (verdict.outcome, verdict.unhealthy_launches) == ("regressed", ())
    assert any(line.startswith(f"{changed}: ") and line.endswith(" -> 9.9") for line in verdict.changed)
    assert "all_reduce: 200 -> 170 (-15%)" in verdict.changed
    assert session(after, from_runs(before)).outcome == "unhealthy"
    bare = seen(before, {"torch": "2.13.0"})
    assert session(after, from_runs(bare)).outcome == "unhealthy", "the baseline does not name the driver"


@pytest.mark.parametrize(("now", "before"), [(None, 0.01), (0.01, None), (None, None)])
def test_machine_without_probes_is_healthy(now: float | None, before: float | None) -> None:
    baseline = from_runs([run_with(probe_s_p50=before)] * 3)
    verdict = judged([run_with(probe_s_p50=now)], baseline, noise_of(0.005, exponent=1))
    assert (verdict.outcome, check_of(verdict, "tokens_per_s").note) == ("passed", None)


# Changes that are listed, but still allow a comparison


@pytest.mark.parametrize(("speed", "outcome"), [(1000, "passed"), (500, "regressed")])
def test_changed_surroundings_are_only_listed(speed: float, outcome: str) -> None:
    before = in_environment(torch="2.11", OMP_NUM_THREADS="1", same="x")
    now = in_environment(torch="2.12", NCCL_ALGO="Tree", same="x")
    slow = now.replace(figures=make_figures(tokens_per_s=speed))
    verdict = session([slow] * 5, from_runs([before] * 3))
    assert (verdict.outcome, verdict.failure) == (outcome, None)
    changes = ("NCCL_ALGO: unset -> Tree", "OMP_NUM_THREADS: 1 -> unset", "torch: 2.11 -> 2.12")
    assert verdict.changed == changes


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        *((1980, 1620, "1980 -> 1620 MHz (-18%)"), (1620, 1980, "1620 -> 1980 MHz (+22%)")),
        *((1980, 1945, None), (1980, None, None), (None, 1980, None)),
    ],
    ids=["slower", "faster", "a little slower", "unknown now", "unknown before"],
)
def test_lists_another_clock_as_a_change(then: float | None, now: float | None, expected: str | None) -> None:
    """`nvidia-smi -lgc` locks the clocks, but the highest and the applications clock remain as they are."""

    def clocked(mhz: float | None, copy: float) -> Run:
        (run,) = make_launches(1, machine=H100, sm_clock_mhz=mhz)
        return run.replace(device_probe={"copy": copy})

    said = [f"SM clock in the measured window: {expected}"] if expected else []
    baseline = from_runs([clocked(then, 3000)] * 5)
    assert launch_problems(clocked(now, 3000), baseline) == []
    assert run_changes(clocked(now, 3000), baseline) == tuple(said)
    assert launch_problems(clocked(now, 2000), baseline) == [slower("copy 2000 3000"), *said]


def holding(mib: int | None) -> Run:
    """Return a launch in which `mib` more MiB than usual were in use on a GPU."""
    return make_launches(1, machine=H100, device_memory_bytes=None if mib is None else 2e10 + mib * 2**20)[0]


def on_nodes(*names: str) -> Run:
    return make_run(nodes=tuple(Node(name=name) for name in names))


GROWN = (
    "GPU memory in use according to NVML, including memory outside torch's allocator: "
    "18.6 GiB -> 18.9 GiB (+257.0 MiB)"
)
NO_NODE = "did not measure the baseline, which was measured on n1, n2, n3"
NODES = [on_nodes("n1", "n2"), on_nodes("n2", "n3")]


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ([holding(0)], holding(257), [GROWN]),
        *(([holding(then)], holding(now), []) for then, now in ((0, 256), (0, -5000), (None, 0), (0, None))),
        *(  # the allowed difference of the probe is a tenth
            ([run_with(probe_s_p50=then)], run_with(probe_s_p50=now), expected)
            for then, now, expected in (
                (0.01, 0.01106, ["probe between the steps (s): 0.01 -> 0.01106 (+11%)"]),
                (0.01, 0.00904, ["probe between the steps (s): 0.01 -> 0.00904 (-10%)"]),
                *((0.01, now, []) for now in (0.01104, 0.00906, 0.0, None)),
                *((then, 0.01, []) for then in (0.0, None)),
            )
        ),
        *(
            (NODES, on_nodes(*now), [f"nodes: {new} {NO_NODE}"])
            for now, new in ((["n2", "n7"], "n7"), (["n8", "n7"], "n8, n7"))
        ),
        (NODES, on_nodes("n3", "n1"), []),
        ([on_nodes()], on_nodes("n1", "n2"), []),
        (NODES, on_nodes(), []),
        ([with_limit("700")], with_limit("500"), ["gpu_power_limit_w: 700 -> 500"]),
        ([with_limit("700")], with_limit(None), ["gpu_power_limit_w: 700 -> unset"]),
    ],
)
def test_lists_changes_that_may_explain_a_verdict(before: list[Run], now: Run, expected: list[str]) -> None:
    assert run_changes(now, from_runs(before)) == tuple(expected)


# Settings that a library chooses


OLD = {"torch": "2.13.0"}
NEW = {"torch": "2.14.0"}


def upgraded(then: dict[str, str], now: dict[str, str], *, speed: float = 1.0) -> Verdict:
    """Return the verdict after an upgrade of torch that also changed settings from `then` to `now`."""
    return session(seen(usual(speed), NEW, **now), from_runs(seen(usual()[:5], OLD, **then)))


@pytest.mark.parametrize(("speed", "outcome"), [(1.0, "passed"), (0.8, "regressed"), (1.25, "improved")])
@pytest.mark.parametrize("setting", ["attention_kernel", "wrapped_modules", "parameter_dtype", "a_hook"])
def test_lists_a_librarys_choice_before_versions(setting: str, speed: float, outcome: str) -> None:
    verdict = upgraded({setting: "one"}, {setting: "two"}, speed=speed)
    assert (verdict.outcome, verdict.failure, verdict.reasons) == (outcome, None, ())
    chosen = f"{setting}: one -> two (not requested by the case)"
    assert verdict.changed == (chosen, "torch: 2.13.0 -> 2.14.0")


def test_unexplained_library_choice_comes_first() -> None:
    before, now = (seen(usual(), OLD, attention_kernel=kernel) for kernel in ("Flash", "math"))
    verdict = judged(now[:1], from_runs(before[:5]))
    said = "attention_kernel: Flash -> math (not requested by the case)"
    assert (verdict.outcome, verdict.changed[0]) == ("passed", said)
    assert verdict.reasons == (f"{UNEXPLAINED}: {said}",)


@pytest.mark.parametrize(
    ("then", "now", "is_explained"), [("a", "a", False), (None, "a", False), ("a", "b", True)]
)
def test_other_code_explains_a_library_choice(then: str | None, now: str | None, is_explained: bool) -> None:
    """In older baselines, the code is unknown. Unknown code does not explain a difference."""
    before, later = (seen(usual(), OLD, attention_kernel=kernel) for kernel in ("Flash", "math"))
    before, later = ([with_code(run, code) for run in runs] for runs, code in ((before, then), (later, now)))
    verdict = judged(later[:1], from_runs(before[:5]))
    assert (verdict.reasons == ()) == is_explained
    assert (OTHER_CODE in verdict.changed) == is_explained


def with_code(run: Run, code: str | None) -> Run:
    return run.replace(observed=known(run.observed).replace(code=code))


@pytest.mark.parametrize("setting", sorted(ASKED))
def test_upgrade_excuses_no_requested_setting(setting: str) -> None:
    verdict = upgraded({setting: "one"}, {setting: "two"})
    assert (verdict.failure, verdict.launches) == ("unlike", 1)
    said = f"cannot be compared: observed {setting} was 'one' in the baseline and is 'two'"
    assert (verdict.reasons, verdict.changed) == ((said,), ("torch: 2.13.0 -> 2.14.0",))


@pytest.mark.parametrize("setting", ["compute_dtype", "attention", "wrapper"])
@pytest.mark.parametrize("unseen", ["not observed (no linear layer)", "?", None])
def test_unobserved_settings_do_not_differ(setting: str, unseen: str | None) -> None:
    settings = {setting: "one"}
    unknown = {} if unseen is None else {setting: unseen}
    lost = upgraded(settings, unknown)
    changes = upgraded(unknown, settings)
    assert lost.outcome == changes.outcome == "passed"
    assert f"{setting}: one -> {unseen or 'not observed'}" == lost.changed[0]
    newly = f"{setting}: {unseen or 'not observed'} -> one"
    assert newly == changes.changed[-1 if unseen is None else 0]


def test_a_setting_is_asked_for_or_chosen() -> None:
    assert not ASKED & CHOSEN
    assert all(is_unlike(setting, "a", "b") for setting in ASKED)
    assert not any(is_unlike(setting, "a", "b") for setting in CHOSEN)
