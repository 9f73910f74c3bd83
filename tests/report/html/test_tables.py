from perfsuite.report.html.tables import checks, health, launches, settings
from perfsuite.report.text import NONE, Table
from perfsuite.results.rank_report import Memory, Observed
from tests.samples import BEFORE, judged, make_result, make_run, now
from tests.sessions import make_gpu_result


def columns(table: Table) -> list[dict[str, str]]:
    """Return each row as a dictionary: heading -> cell."""
    return [dict(zip(table.headers, row, strict=True)) for row in table.rows]


def test_checks_show_metric_and_baseline() -> None:
    speed, _, memory = columns(checks(make_gpu_result(2, "regressed"), "a"))
    names = ("metric", "verdict", "measured", "baseline", "allowed")
    assert [speed[name] for name in names] == ["tokens/s", "regressed", "4,336", "4,669", "2.9%"]
    assert speed["change"].startswith("-7.")
    assert " to -" in speed["99% interval"]
    assert speed["chart"].startswith("<svg")
    assert (memory["change"], memory["99% interval"]) == ("+0.0%", NONE)


def test_checks_show_blindness_and_correction() -> None:
    result = make_result(now())
    [first, *others] = result.verdict.checks
    blind = first.replace(minimum_detectable=0.5, probe_exponent=0.8)
    table = checks(judged(result, checks=(blind, *others)), "a")
    corrected = "Some changes are corrected for the machine's own speed"
    assert columns(table)[0]["can find"] == "50.0% (blind)"
    assert (corrected in table.caption, corrected in checks(result, "a").caption) == (True, False)


def test_launch_row_shows_memory_and_times() -> None:
    first = Memory(peak=2**30, reserved=2 * 2**30, alloc_retries=1, method="cuda")
    run = BEFORE.replace(memory=(first, first.replace(peak=3 * 2**30, reserved=2**30, alloc_retries=2)))
    [row] = columns(launches(make_result(run), [run]))
    assert (row["peak memory"], row["least peak"]) == ("3.00 GiB (rank 1)", "1.00 GiB")
    assert (row["reserved"], row["retries"], row["counts"]) == ("2.00 GiB", "3", "yes")
    assert (row["window"], row["longest"], row["p95/p50"]) == ("0 to 24", "250.0 ms", "1.10")


def test_launch_row_shows_why_it_is_not_valid() -> None:
    crash = make_gpu_result(1, "crash")
    throttled = make_gpu_result(3, "throttled")
    [crashed] = columns(launches(crash, crash.runs))
    assert (crashed["counts"], crashed["window"], crashed["tokens/s"]) == ("no: crash", NONE, NONE)
    assert {row["counts"] for row in columns(launches(throttled, throttled.runs))} == {"no: set aside"}


def test_launch_row_leaves_out_unknown_figures() -> None:
    run = make_run(memory=())
    [row] = columns(launches(make_result(run, before=None), [run]))
    assert {row[name] for name in ("peak memory", "reserved", "retries", "p50")} == {NONE}


def test_tables_show_health_of_gpus_and_cores() -> None:
    gpus, cores = health(make_gpu_result(3, "throttled").runs)
    assert len(gpus.rows) == 24
    assert gpus.rows[3][:4] == ("1", "3", "1,575 MHz", "1,365 MHz")
    assert columns(gpus)[3]["throttled"] == "SwPowerCap 31%, HwThermalSlowdown 42% (bad)"
    assert columns(cores)[0]["others"] == "1%"
    assert health([make_run()]) == []


def test_settings_are_those_last_observed() -> None:
    observed = Observed(settings={"world_size": "2"}, environment={"torch": "2.13.0"})
    runs = [make_run(observed=observed), make_run(device_probe={"matmul_tflops": 712.34})]
    assert settings(runs).rows == [
        ("world_size", "2", "setting"),
        ("torch", "2.13.0", "environment"),
        ("matmul_tflops", "712.3", "before the workload"),
    ]
    assert not settings([])


def test_lists_autotuning_choices_under_settings() -> None:
    assert settings([make_run(autotuned={"mm": "extern_mm"})]).rows == [("mm", "extern_mm", "autotuning")]
