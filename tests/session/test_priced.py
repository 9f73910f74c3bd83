from pathlib import Path
from typing import Any

import pytest

from perfsuite.case.case import Topology
from perfsuite.results import device_log_file
from perfsuite.results.counts import Collective, Compiled, Counts, RankCounts
from perfsuite.results.device_log import Communicate, EndOfStep, Entry, HostWait, Kernel, RecordEvent
from perfsuite.results.outcome import Cost, CountCheck, Finding
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.session.priced import NO_LOG_OF_BASELINE, in_words, priced, priced_launches
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


def check(*findings: Finding) -> CountCheck:
    return CountCheck(outcome="regressed", findings=findings)


def cost_of(tmp_path: Path, before: int, now: int, *, stream: int = 0) -> tuple[Cost, str]:
    arms = (run_of(before), run_of(now))
    directories = [
        directory_of(tmp_path / name, size, stream=stream) for name, size in (("a", before), ("b", now))
    ]
    (result,) = priced(check(finding(before, now)), arms, directories).findings
    assert result.cost is not None
    return result.cost, result.sentence


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
    assert ", and nothing if each GPU can send " in sentence


def test_fewer_bytes_save_what_they_cost(tmp_path: Path) -> None:
    cost, sentence = cost_of(tmp_path, 3 * GIB, GIB)
    assert cost.least_s is not None
    assert cost.most_s is not None
    assert cost.least_s < cost.most_s < 0
    assert "; predicted saving: " in sentence


def test_the_most_expensive_finding_comes_first(tmp_path: Path) -> None:
    arms = (run_of(GIB), run_of(2 * GIB))
    directories = [directory_of(tmp_path / name, size) for name, size in (("a", GIB), ("b", 2 * GIB))]
    memory = finding(1, 2, "peak of live tensors")
    found = priced(check(memory, finding(GIB, 2 * GIB)), arms, directories).findings
    assert [each.quantity for each in found] == ["all_gather of 8 ranks", "peak of live tensors"]
    assert found[1].cost is None


def test_without_a_log_the_naive_time_is_given(tmp_path: Path) -> None:
    arms = (run_of(GIB), run_of(3 * GIB))
    directories = [RunDir(tmp_path / "a"), RunDir(tmp_path / "b")]
    (found,) = priced(check(finding(GIB, 3 * GIB)), arms, directories).findings
    assert found.cost is not None
    assert found.cost.most_s == pytest.approx(2 * GIB / 300e9)
    assert "; sending these bytes takes 7.2 ms, but how much of that " in found.sentence
    assert "does not exist. Run the case dry again" in found.sentence


def test_launches_get_the_time_of_the_bytes_alone() -> None:
    run = run_of(3 * GIB)
    kernels = changed_calls("kernels", 50, 60, "kernels in forward")
    gather, of_kernels = priced_launches(check(finding(GIB, 3 * GIB), kernels), run).findings
    assert gather.sentence == (
        "more bytes; sending these bytes takes 7.2 ms, but how much of that the step waits for is unknown: "
        "only dry runs log when streams wait for each other"
    )
    assert of_kernels == kernels


def test_launches_on_cpus_have_no_prices() -> None:
    findings = check(finding(GIB, 3 * GIB))
    assert priced_launches(findings, run_of(3 * GIB).replace(machine=make_machine())) == findings


def test_launches_across_machines_have_no_prices() -> None:
    findings = check(finding(GIB, 3 * GIB))
    one_gpu = make_gpu_machine(A100, count=1)
    assert priced_launches(findings, run_of(3 * GIB).replace(machine=one_gpu)) == findings


def test_more_bytes_than_in_a_baseline_are_replayed(tmp_path: Path) -> None:
    run = run_of(3 * GIB)
    logs = (NO_LOG_OF_BASELINE, directory_of(tmp_path / "b", 3 * GIB))
    (found,) = priced(check(finding(GIB, 3 * GIB)), (run, run), logs).findings
    assert "; predicted cost: " in found.sentence


def test_fewer_bytes_than_in_a_baseline_get_the_naive_time(tmp_path: Path) -> None:
    run = run_of(GIB)
    logs = (NO_LOG_OF_BASELINE, directory_of(tmp_path / "b", GIB))
    (found,) = priced(check(finding(3 * GIB, GIB)), (run, run), logs).findings
    assert f"takes 7.2 ms, but how much of that the step waits for is unknown: {NO_LOG_OF_BASELINE}" in (
        found.sentence
    )


def test_compiled_models_get_the_naive_time_too(tmp_path: Path) -> None:
    compiled = Compiled(graphs=1, recompilations=0, kernels=None, extern_calls=None)
    arms = (run_of(GIB), run_of(3 * GIB, compiled=compiled))
    directories = [directory_of(tmp_path / name, size) for name, size in (("a", GIB), ("b", 3 * GIB))]
    (found,) = priced(check(finding(GIB, 3 * GIB)), arms, directories).findings
    assert "the step waits for is unknown: the model is compiled" in found.sentence


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
    for priced_finding in priced(check(kernels, flops), arms, directories).findings:
        cost = priced_finding.cost
        assert cost is not None
        assert cost.most_s == pytest.approx(1.25 * 10 * 2 * 8192**3 / (312e12 * 0.82), rel=0.1)
        assert "; predicted cost: " in priced_finding.sentence


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
    (more,) = priced(check(changed_calls(quantity, 0, 1, field)), arms, directories).findings
    assert more.cost is not None
    assert more.cost.most_s is not None
    assert more.cost.most_s > 0
    (fewer,) = priced(check(changed_calls(quantity, 1, 0, field)), arms[::-1], directories[::-1]).findings
    assert fewer.cost is not None
    assert fewer.cost.least_s == pytest.approx(-more.cost.most_s)


def test_a_garbage_collection_has_no_price(tmp_path: Path) -> None:
    arms = (run_of(GIB), run_of(GIB))
    directories = [log_of(tmp_path / name, PRODUCT) for name in "ab"]
    collected = changed_calls("stalling calls", 0, 1, "calls of gc.collect")
    assert priced(check(collected), arms, directories).findings == (collected,)


def test_a_host_read_without_a_log_says_what_is_missing(tmp_path: Path) -> None:
    arms = (run_of(GIB), run_of(GIB))
    directories = [RunDir(tmp_path / "a"), RunDir(tmp_path / "b")]
    (read,) = priced(check(changed_calls("host reads", 0, 1)), arms, directories).findings
    assert "; how much the step waits for it is unknown: " in read.sentence
    assert "does not exist. Run the case dry again" in read.sentence


def test_kernels_of_a_cpu_have_no_price(tmp_path: Path) -> None:
    arms = (make_run(dry=True), make_run(dry=True))
    kernels = changed_calls("kernels", 50, 60, "kernels in forward")
    (same,) = priced(check(kernels), arms, [RunDir(tmp_path), RunDir(tmp_path)]).findings
    assert same == kernels


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (
            Cost(least_s=0.0, most_s=0.006, step_s=0.43, hidden_above=31e9),
            "; predicted cost: 0.0 ms to 6.0 ms of a step of 430.0 ms (at most 1.4%), "
            "and nothing if each GPU can send 31 GB/s or more",
        ),
        (
            Cost(least_s=-0.003, most_s=0.006, step_s=0.6),
            "; predicted cost: -3.0 ms to 6.0 ms of a step of 600.0 ms (at most 1.0%)",
        ),
        (
            Cost(least_s=-0.006, most_s=-0.003, step_s=0.6),
            "; predicted saving: 3.0 ms to 6.0 ms of a step of 600.0 ms (at most 1.0%)",
        ),
        (
            Cost(hidden_above=31e9),
            "; predicted cost: unknown, because the speed of the network is unknown, "
            "but nothing if each GPU can send 31 GB/s or more",
        ),
        (Cost(why_naive="why"), "; how much the step waits for it is unknown: why"),
    ],
)
def test_a_price_in_words(cost: Cost, words: str) -> None:
    assert in_words(cost) == words
