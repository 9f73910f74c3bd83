import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perfsuite.case.case import Topology
from perfsuite.results import device_log_file
from perfsuite.results.cost import Cost
from perfsuite.results.counts import Collective, Compiled, Counts, RankCounts, collective_name
from perfsuite.results.device_log import Communicate, EndOfStep, Entry, HostWait, Kernel, RecordEvent
from perfsuite.results.outcome import CountCheck, Finding, Verdict
from perfsuite.results.rank_report import Observed
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.session.logged_steps import NOT_IN_EACH_STEP, Log
from perfsuite.session.priced import (
    MOST,
    NO_LOG_OF_BASELINE,
    NO_LOG_OF_LAUNCHES,
    NOT_REPLAYED,
    priced,
    priced_launches,
)
from tests.samples import make_case, make_gpu_machine, make_machine, make_run

A100 = "NVIDIA A100-SXM4-80GB"
SIZES = (1, 8192, 8192, 8192, 0)
PRODUCT = Kernel(0, "forward", "aten.mm", 0, 0, 2, "bfloat16", 2 * 8192**3, SIZES, is_strided=False)
GIB = 2**30


def run_of(size: int, **changes: Any) -> Run:
    """Return a dry run whose step gathers `size` bytes in one call."""
    gather = Collective(
        kind="all_gather", ranks=8, apart=1, dtype="bfloat16", phase="forward", count=1, bytes=size
    )
    counts = Counts(collectives=(gather,), flops={"forward": 1}).replace(**changes)
    case = make_case(topology=Topology(processes_per_node=8))
    entry = RankCounts(ranks=(0,), counts=counts)
    return make_run(case=case, machine=make_gpu_machine(A100), counts=(entry,), dry=True)


def directory_of(path: Path, size: int, *, stream: int = 0) -> RunDir:
    """Write the log of a step that gathers `size` bytes. On stream 1, kernels hide the gather."""
    path.mkdir()
    call = Communicate(1, stream, "forward", "all_gather", 8, 1, size, is_async=False)
    log: list[Entry] = [EndOfStep(3), call, *[PRODUCT] * 50, EndOfStep(4)]
    device_log_file.write(RunDir(path).device_log(0), log)
    return RunDir(path)


def finding(before: int, now: int, quantity: str = "all_gather of 8 ranks") -> Finding:
    return Finding(
        field=f"{quantity}: bytes",
        quantity=quantity,
        unit="bytes",
        before=before,
        now=now,
        ranks="0",
        outcome="regressed" if now > before else "improved",
        sentence="more bytes",
    )


def verdict_of(*findings: Finding, explained: str | None = None) -> Verdict:
    counts = CountCheck(outcome="regressed", findings=findings)
    return Verdict(outcome="regressed", launches=1, counts=counts, explained=explained)


def priced_findings(arms: Sequence[Run], logs: Sequence[Log], *findings: Finding) -> tuple[Finding, ...]:
    counts = priced(verdict_of(*findings), arms, logs).counts
    assert counts is not None
    return counts.findings


def findings_of_launches(run: Run, *findings: Finding) -> tuple[Finding, ...]:
    counts = priced_launches(verdict_of(*findings), run).counts
    assert counts is not None
    return counts.findings


def cost_of(tmp_path: Path, before: int, now: int, *, stream: int = 0) -> tuple[Cost, str]:
    arms = (run_of(before), run_of(now))
    directories = [
        directory_of(tmp_path / name, size, stream=stream) for name, size in (("a", before), ("b", now))
    ]
    (result,) = priced_findings(arms, directories, finding(before, now))
    assert result.cost is not None
    return result.cost, result.in_words()


def test_exposed_bytes_cost_their_time(tmp_path: Path) -> None:
    cost, sentence = cost_of(tmp_path, GIB, 3 * GIB)
    assert cost.most_s == pytest.approx(2 * 7 / 8 * 2 * GIB / 225e9, rel=0.01), "at half of the link's rate"
    assert cost.least_s == pytest.approx(7 / 8 * 2 * GIB / 225e9 / 1.25, rel=0.01)
    assert sentence.startswith("more bytes; predicted ")


def test_hidden_bytes_cost_little_above_a_rate(tmp_path: Path) -> None:
    cost, sentence = cost_of(tmp_path, GIB, 3 * GIB, stream=1)
    assert cost.most_s is not None
    assert cost.step_s is not None
    assert cost.most_s < 0.02 * cost.step_s
    assert "; the step waits for these bytes only if the link of each GPU is slower than " in sentence


def test_fewer_bytes_save_what_they_cost(tmp_path: Path) -> None:
    cost, sentence = cost_of(tmp_path, 3 * GIB, GIB)
    assert cost.least_s is not None
    assert cost.most_s is not None
    assert cost.least_s < cost.most_s < 0
    assert "; predicted saving: " in sentence


def test_the_highest_upper_end_comes_first(tmp_path: Path) -> None:
    """Three additional products take 10 to 16 ms. The additional bytes take 8 to 20 ms (naive: 9 ms)."""
    more = 2_571_428_571
    arms = (run_of(GIB), run_of(GIB + more))
    directories = []
    for name, size, products in (("a", GIB, 50), ("b", GIB + more, 53)):
        call = Communicate(1, 0, "forward", "all_gather", 8, 1, size, is_async=False)
        directories.append(log_of(tmp_path / name, call, *[PRODUCT] * products))
    memory = finding(1, 2, "peak of live tensors")
    kernels = changed_calls("kernels", 50, 53, "kernels in forward")
    results = priced_findings(arms, directories, memory, kernels, finding(GIB, GIB + more))
    assert [result.quantity for result in results] == [
        "all_gather of 8 ranks",
        "kernels",
        "peak of live tensors",
    ]
    first, second = (result.cost for result in results[:2])
    assert first is not None
    assert second is not None
    assert (first.least_s, second.least_s) == pytest.approx((0.008, 0.0103), rel=0.02)
    assert (first.most_s, second.most_s) == pytest.approx((0.020, 0.0161), rel=0.02)
    assert results[2].cost is None


def test_an_unknown_price_comes_first(tmp_path: Path) -> None:
    """The log has no waits, so nobody knows how long the host waits for the GPU."""
    arms = (run_of(GIB), run_of(3 * GIB))
    directories = [directory_of(tmp_path / name, size) for name, size in (("a", GIB), ("b", 3 * GIB))]
    copies = changed_calls("blocking copies between devices", 0, 1, "blocking copies cpu to cuda")
    first, second = priced_findings(arms, directories, finding(GIB, 3 * GIB), copies)
    assert first.field == "blocking copies cpu to cuda"
    assert first.in_words().endswith(
        "the host waited for the GPU more often than the log of the dry run shows"
    )
    assert second.cost is not None
    assert second.cost.most_s is not None


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "gather", "scatter")


Arms = tuple[Run, Run]


def several(tmp_path: Path, more_bytes: Sequence[int], *entries: Entry) -> tuple[Arms, list[RunDir]]:
    """Return two arms and their logs. Arm B sends this many more bytes in each kind of collective.

    Only arm B has `entries`.
    """
    arms: list[Run] = []
    directories: list[RunDir] = []
    for name, times in (("a", 0), ("b", 1)):
        sizes = dict(zip(KINDS, (GIB + times * more for more in more_bytes), strict=False))
        collectives = tuple(
            Collective(kind=kind, ranks=8, apart=1, dtype="", phase="forward", count=1, bytes=size)
            for kind, size in sizes.items()
        )
        calls = [
            Communicate(number, 0, "forward", kind, 8, 1, size, is_async=False)
            for number, (kind, size) in enumerate(sizes.items())
        ]
        arms.append(run_of(GIB, collectives=collectives))
        directories.append(log_of(tmp_path / name, PRODUCT, *calls, *(entries * times)))
    return (arms[0], arms[1]), directories


def more_of(number: int, more: int) -> Finding:
    """Return the finding that a kind of collective sends more bytes. Its sentence is the kind's number."""
    changed = finding(GIB, GIB + more, f"{KINDS[number]} of 8 ranks")
    return changed.replace(sentence=str(number))


def replayed(findings: Sequence[Finding]) -> list[str]:
    """Return the sentences of the findings with a predicted price."""
    return [
        results.sentence
        for results in findings
        if results.cost is not None and results.cost.why_naive is None
    ]


def test_only_the_changes_that_take_longest_are_replayed(tmp_path: Path) -> None:
    sizes = [size * GIB for size in (1, 4, 2, 16, 32, 8, 64)]
    arms, directories = several(tmp_path, sizes)
    results = priced_findings(arms, directories, *(more_of(*pair) for pair in enumerate(sizes)))
    assert [result.sentence for result in results] == ["6", "4", "3", "5", "1", "2", "0"]
    assert replayed(results) == ["6", "4", "3", "5", "1"]
    assert [result.cost for result in results[5:]] == [
        Cost(least_s=0.0, most_s=size * GIB / 300e9, why_naive=NOT_REPLAYED) for size in (2, 1)
    ]


def test_regressions_are_replayed_before_improvements(tmp_path: Path) -> None:
    sizes = [64 * GIB] * MOST + [GIB]
    arms, directories = several(tmp_path, sizes)
    fewer = [
        more_of(number, size).replace(before=GIB + size, now=GIB, outcome="improved")
        for number, size in enumerate(sizes[:MOST])
    ]
    results = priced_findings(arms[::-1], directories[::-1], *fewer, more_of(MOST, GIB))
    assert results[0].sentence == str(MOST)
    assert len(replayed(results)) == MOST
    assert replayed(results)[0] == str(MOST)


def test_the_largest_savings_are_replayed(tmp_path: Path) -> None:
    sizes = [GIB, *[2 * GIB] * MOST]
    arms, directories = several(tmp_path, sizes)
    fewer = [
        more_of(number, size).replace(before=GIB + size, now=GIB, outcome="improved")
        for number, size in enumerate(sizes)
    ]
    results = priced_findings(arms[::-1], directories[::-1], *fewer)
    assert replayed(results) == [str(number) for number in range(1, MOST + 1)]
    assert (
        results[0].in_words().startswith("0; sending these bytes takes 3.6 ms, but it is unknown how long ")
    )


def test_a_change_that_cannot_be_replayed_takes_no_place(tmp_path: Path) -> None:
    sizes = [GIB] * MOST + [64 * GIB]
    arms, directories = several(tmp_path, sizes)
    *others, dearest = (more_of(*pair) for pair in enumerate(sizes))
    results = priced_findings(arms, directories, *others, dearest.replace(steps="every 5th step (5, 10)"))
    assert sorted(replayed(results)) == [str(number) for number in range(MOST)]
    assert results[0].cost is not None
    assert results[0].cost.why_naive == NOT_IN_EACH_STEP


READ: tuple[Entry, ...] = (RecordEvent(1, 0), HostWait(1))


def test_waits_are_ranked_by_their_number(tmp_path: Path) -> None:
    """A wait leaves the GPU idle for 24 us. The larger sends take 35 us each, and the smallest takes 3 us."""
    sizes = [10 * 2**20] * (MOST - 1) + [2**20]
    arms, directories = several(tmp_path, sizes, *READ)
    waits = changed_calls("host reads", 0, 1, "host reads in forward")
    results = priced_findings(arms, directories, *(more_of(*pair) for pair in enumerate(sizes)), waits)
    assert sorted(replayed(results)) == ["0", "1", "2", "3", "more bytes"]


def test_a_wait_that_is_not_replayed_has_no_number(tmp_path: Path) -> None:
    sizes = [GIB] * MOST
    arms, directories = several(tmp_path, sizes, *READ)
    waits = changed_calls("host reads", 0, 1, "host reads in forward")
    *_, last = priced_findings(arms, directories, waits, *(more_of(*pair) for pair in enumerate(sizes)))
    assert (
        last.in_words() == f"more bytes; it is unknown how long the step waits for this work: {NOT_REPLAYED}"
    )


def test_kernels_that_are_not_replayed_have_their_own_time(tmp_path: Path) -> None:
    sizes = [8 * GIB] * MOST
    arms, directories = several(tmp_path, sizes, *[PRODUCT] * 2)
    kernels = changed_calls("kernels", 1, 3, "kernels in forward")
    *_, last = priced_findings(arms, directories, kernels, *(more_of(*pair) for pair in enumerate(sizes)))
    assert last.cost is not None
    assert last.cost.most_s == pytest.approx(2 * 2 * 8192**3 / (312e12 * 0.82), rel=0.1)
    assert last.in_words().startswith("more bytes; this work takes 8.")
    assert last.cost.why_naive == NOT_REPLAYED


def test_all_findings_of_launches_have_their_own_time() -> None:
    collectives = tuple(
        Collective(kind=kind, ranks=8, apart=1, dtype="", phase="forward", count=1, bytes=GIB)
        for kind in KINDS
    )
    run = run_of(GIB, collectives=collectives)
    results = findings_of_launches(run, *(more_of(number, GIB) for number in range(len(KINDS))))
    costs = [result.cost for result in results]
    assert costs == [Cost(least_s=0.0, most_s=GIB / 300e9, why_naive=NO_LOG_OF_LAUNCHES)] * len(KINDS)


def test_more_calls_of_launches_take_the_time_to_begin_them() -> None:
    changed = changed_calls("all_gather of 8 ranks", 1, 101, "all_gather of 8 ranks: calls")
    (calls,) = findings_of_launches(run_of(GIB), changed)
    assert calls.cost is not None
    assert calls.cost.most_s == pytest.approx(100 * (18e-6 + 7 * 1.5e-6))
    assert "; this work takes 2.9 ms by itself, but it is unknown how long " in calls.in_words()


def test_without_a_log_the_naive_time_is_given(tmp_path: Path) -> None:
    arms = (run_of(GIB), run_of(3 * GIB))
    directories = [RunDir(tmp_path / "a"), RunDir(tmp_path / "b")]
    (found,) = priced_findings(arms, directories, finding(GIB, 3 * GIB))
    assert found.cost is not None
    assert found.cost.most_s == pytest.approx(2 * GIB / 300e9)
    assert "; sending these bytes takes 7.2 ms, but it is unknown how long " in found.in_words()
    assert "does not exist. Repeat the dry run of the case" in found.in_words()


def test_launches_get_the_time_of_the_bytes_alone() -> None:
    run = run_of(3 * GIB)
    kernels = changed_calls("kernels", 50, 60, "kernels in forward")
    gather, of_kernels = findings_of_launches(run, finding(GIB, 3 * GIB), kernels)
    assert gather.in_words() == (
        "more bytes; sending these bytes takes 7.2 ms, but it is unknown how long the step waits for this: "
        "only the log of a dry run contains the waits between streams"
    )
    assert of_kernels == kernels


def test_launches_on_cpus_have_no_prices() -> None:
    verdict = verdict_of(finding(GIB, 3 * GIB))
    assert priced_launches(verdict, run_of(3 * GIB).replace(machine=make_machine())) == verdict


def across_machines(interconnect: str | None, ranks: int = 8, apart: int = 1) -> Run:
    """Return a run on two machines of four GPUs each."""
    case = make_case(topology=Topology(nodes=2, processes_per_node=4))
    run = run_of(3 * GIB)
    counts = run.counts[0].counts
    gather = counts.collectives[0].replace(ranks=ranks, apart=apart)
    entry = RankCounts(ranks=(0,), counts=counts.replace(collectives=(gather,)))
    machine = run.machine.replace(nodes=2, interconnect=interconnect)
    return run.replace(case=case, machine=machine, counts=(entry,))


@pytest.mark.parametrize(("ranks", "apart", "ports"), [(8, 1, 4), (4, 2, 2), (2, 4, 1)])
def test_launches_across_machines_share_the_network(ranks: int, apart: int, ports: int) -> None:
    """All members of a group on one machine share their ports: 4, 2 or 1 of the machine's 4 ports."""
    run = across_machines("4xib400", ranks, apart)
    changed = finding(GIB, 3 * GIB, collective_name("all_gather", ranks, apart))
    (gather,) = findings_of_launches(run, changed)
    assert gather.cost is not None
    assert gather.cost.most_s == pytest.approx(2 * GIB / (ports * 50e9))


def test_launches_on_an_unknown_network_have_a_reason() -> None:
    (gather,) = findings_of_launches(across_machines(None), finding(GIB, 3 * GIB))
    assert gather.in_words() == (
        "more bytes; it is unknown how long the step waits for this work: only the log of a dry run "
        "contains the waits between streams"
    )


def flops_of(before: int, now: int) -> Finding:
    return finding(before, now, "FLOPs").replace(field="FLOPs in forward", unit="FLOP", sentence="more FLOPs")


def test_launches_get_the_time_of_the_flops_alone() -> None:
    case = make_case(precision="bf16-mixed")
    run = run_of(GIB).replace(case=case)
    (flops,) = findings_of_launches(run, flops_of(10**12, 10**12 + 312 * 10**9))
    assert flops.in_words().startswith(
        "more FLOPs; computing these FLOPs takes at least 1.0 ms, but it is unknown how long "
    )
    machine = make_gpu_machine("NVIDIA H100 80GB HBM3")
    low = run_of(GIB, ops={"aten._scaled_mm": 1}).replace(case=case, machine=machine)
    (of_float8,) = findings_of_launches(low, flops_of(10**12, 10**12 + 2 * 989500 * 10**6))
    assert "takes at least 1.0 ms" in of_float8.in_words()


def test_the_naive_time_of_tf32_is_unknown(tmp_path: Path) -> None:
    observed = Observed(settings={"fp32_matmul": "tf32"}, environment={})
    run = run_of(GIB).replace(case=make_case(precision="fp32"), observed=observed)
    (flops,) = findings_of_launches(run, flops_of(1, 10**12))
    assert flops.cost is None
    directories = [log_of(tmp_path / name, PRODUCT) for name in "ab"]
    (of_dry_runs,) = priced_findings((run, run), directories, flops_of(1, 10**12))
    assert "waits for this work: the script multiplies fp32 matrices in TF32" in of_dry_runs.in_words()


def test_an_explanation_has_the_price_too(tmp_path: Path) -> None:
    """In a timed comparison, counts are not judged, but the largest change explains the times."""
    listed = finding(GIB, 3 * GIB).replace(outcome="passed")
    verdict = priced_launches(verdict_of(listed, explained="more bytes"), run_of(3 * GIB))
    explanation = verdict.explanation()
    assert explanation is not None
    assert explanation.startswith("more bytes; sending these bytes takes 7.2 ms")
    other = priced_launches(verdict_of(listed, explained="the same calls"), run_of(3 * GIB))
    assert other == verdict_of(listed, explained="the same calls")


def test_more_bytes_than_in_a_baseline_are_replayed(tmp_path: Path) -> None:
    run = run_of(3 * GIB)
    logs = (NO_LOG_OF_BASELINE, directory_of(tmp_path / "b", 3 * GIB))
    (found,) = priced_findings((run, run), logs, finding(GIB, 3 * GIB))
    assert "; predicted cost: " in found.in_words()


def test_fewer_bytes_than_in_a_baseline_get_the_naive_time(tmp_path: Path) -> None:
    run = run_of(GIB)
    logs = (NO_LOG_OF_BASELINE, directory_of(tmp_path / "b", GIB))
    (found,) = priced_findings((run, run), logs, finding(3 * GIB, GIB))
    assert f"takes 7.2 ms, but it is unknown how long the step waits for this: {NO_LOG_OF_BASELINE}" in (
        found.in_words()
    )


def test_compiled_models_get_the_naive_time_too(tmp_path: Path) -> None:
    compiled = Compiled(graphs=1, recompilations=0, kernels=None, extern_calls=None)
    arms = (run_of(GIB), run_of(3 * GIB, compiled=compiled))
    directories = [directory_of(tmp_path / name, size) for name, size in (("a", GIB), ("b", 3 * GIB))]
    (found,) = priced_findings(arms, directories, finding(GIB, 3 * GIB))
    assert "unknown how long the step waits for this: the model is compiled" in found.in_words()


def log_of(path: Path, *entries: Entry) -> RunDir:
    """Write the log of a step with these entries."""
    path.mkdir()
    device_log_file.write(RunDir(path).device_log(0), [EndOfStep(3), *entries, EndOfStep(4)])
    return RunDir(path)


def changed_calls(quantity: str, before: int, now: int, field: str = "") -> Finding:
    return finding(before, now, quantity).replace(field=field or quantity, unit="calls")


def test_additional_kernels_and_flops_have_a_price(tmp_path: Path) -> None:
    arms = (run_of(GIB), run_of(GIB))
    directories = [log_of(tmp_path / "a", *[PRODUCT] * 50), log_of(tmp_path / "b", *[PRODUCT] * 60)]
    kernels = changed_calls("kernels", 50, 60, "kernels in forward")
    flops = finding(50, 60, "FLOPs").replace(field="FLOPs in forward", unit="FLOP")
    for priced_finding in priced_findings(arms, directories, kernels, flops):
        cost = priced_finding.cost
        assert cost is not None
        assert cost.most_s == pytest.approx(1.25 * 10 * 2 * 8192**3 / (312e12 * 0.82), rel=0.1)
        assert "; predicted cost: " in priced_finding.in_words()


@pytest.mark.parametrize(("quantity", "unit"), [("kernels", "calls"), ("FLOPs", "FLOP")])
def test_a_change_of_several_phases_has_a_price(tmp_path: Path, quantity: str, unit: Any) -> None:
    """The field of such a finding names no phase."""
    backward = PRODUCT._replace(phase="backward")
    directories = [
        log_of(tmp_path / "a", PRODUCT, backward),
        log_of(tmp_path / "b", *[PRODUCT, backward] * 6),
    ]
    of_both = finding(2, 12, quantity).replace(field=quantity, unit=unit)
    (result,) = priced_findings((run_of(GIB), run_of(GIB)), directories, of_both)
    assert result.cost is not None
    assert result.cost.most_s == pytest.approx(1.25 * 10 * 2 * 8192**3 / (312e12 * 0.82), rel=0.1)


@pytest.mark.parametrize(
    ("quantity", "field"),
    [
        ("host reads", "host reads in forward"),
        ("blocking copies between devices", "blocking copies cuda to cpu"),
        ("stalling calls", "calls of torch.cuda.synchronize"),
    ],
)
def test_additional_waits_of_the_host_have_a_price(tmp_path: Path, quantity: str, field: str) -> None:
    arms = (run_of(GIB), run_of(GIB))
    read = (RecordEvent(1, 0), HostWait(1))
    directories = [log_of(tmp_path / "a", PRODUCT), log_of(tmp_path / "b", PRODUCT, *read)]
    (more,) = priced_findings(arms, directories, changed_calls(quantity, 0, 1, field))
    assert more.cost is not None
    assert more.cost.most_s is not None
    assert more.cost.most_s > 0
    (fewer,) = priced_findings(arms[::-1], directories[::-1], changed_calls(quantity, 1, 0, field))
    assert fewer.cost is not None
    assert fewer.cost.least_s == pytest.approx(-more.cost.most_s)


@pytest.mark.parametrize(
    "field", ["kernels in forward", "host reads in forward", "all_gather of 8 ranks: bytes"]
)
def test_work_of_some_steps_gets_no_number(tmp_path: Path, field: str) -> None:
    """The log has only step 4, in which nothing changed."""
    arms = (run_of(GIB), run_of(GIB))
    directories = [log_of(tmp_path / name, PRODUCT) for name in "ab"]
    quantity = field.split(" in ")[0].removesuffix(": bytes")
    changed = finding(0, GIB, quantity).replace(field=field, steps="every 5th step (5, 10, 15)")
    (found,) = priced_findings(arms, directories, changed)
    assert found.cost is not None
    assert found.cost.step_s is None
    why = "not all steps have this change, and a dry run logs only step 4"
    assert re.search(f"it is unknown how long the step waits for this( work)?: {why}$", found.in_words())


def test_more_calls_for_the_same_bytes_have_a_price(tmp_path: Path) -> None:
    arms = (run_of(GIB), run_of(GIB))
    calls = [
        Communicate(number, 0, "forward", "all_gather", 8, 1, GIB // 100, is_async=False)
        for number in range(100)
    ]
    one = calls[0]._replace(bytes=GIB)
    directories = [log_of(tmp_path / "a", PRODUCT, one), log_of(tmp_path / "b", PRODUCT, *calls)]
    changed = changed_calls("all_gather of 8 ranks", 1, 100, "all_gather of 8 ranks: calls")
    (more,) = priced_findings(arms, directories, changed)
    assert more.cost is not None
    assert more.cost.most_s is not None
    assert more.cost.most_s > 99 * 18e-6, "each call takes some time to begin"
    back = changed_calls("all_gather of 8 ranks", 100, 1, "all_gather of 8 ranks: calls")
    (fewer,) = priced_findings(arms[::-1], directories[::-1], back)
    assert fewer.cost is not None
    assert fewer.cost.least_s == pytest.approx(-more.cost.most_s)


def test_barriers_have_no_price(tmp_path: Path) -> None:
    barrier = Collective(kind="barrier", ranks=8, apart=1, dtype="", phase="forward", count=2, bytes=0)
    arms = (run_of(GIB, collectives=(barrier,)), run_of(GIB, collectives=(barrier,)))
    call = Communicate(1, 0, "forward", "barrier", 8, 1, 0, is_async=False)
    directories = [log_of(tmp_path / "a", PRODUCT, call), log_of(tmp_path / "b", PRODUCT, call, call)]
    changed = changed_calls("barrier of 8 ranks", 1, 2, "barrier of 8 ranks: calls")
    assert priced_findings(arms, directories, changed) == (changed,)


def test_a_garbage_collection_has_no_price(tmp_path: Path) -> None:
    arms = (run_of(GIB), run_of(GIB))
    directories = [log_of(tmp_path / name, PRODUCT) for name in "ab"]
    collected = changed_calls("stalling calls", 0, 1, "calls of gc.collect")
    assert priced_findings(arms, directories, collected) == (collected,)


def test_a_host_read_without_a_log_says_what_is_missing(tmp_path: Path) -> None:
    arms = (run_of(GIB), run_of(GIB))
    directories = [RunDir(tmp_path / "a"), RunDir(tmp_path / "b")]
    (read,) = priced_findings(arms, directories, changed_calls("host reads", 0, 1))
    assert "; it is unknown how long the step waits for this work: " in read.in_words()
    assert "does not exist. Repeat the dry run of the case" in read.in_words()


def test_kernels_of_a_cpu_have_no_price(tmp_path: Path) -> None:
    arms = (make_run(dry=True), make_run(dry=True))
    kernels = changed_calls("kernels", 50, 60, "kernels in forward")
    (same,) = priced_findings(arms, [RunDir(tmp_path), RunDir(tmp_path)], kernels)
    assert same == kernels
