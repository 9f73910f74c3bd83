from typing import Any

import pytest

from perfsuite.plugin.benchmark import ReplayClock, replay, replay_nothing
from tests.suite import ID, read_json, run, run_cpu


class Pedantic:
    """Measures like pytest-benchmark: reads a clock before and after each call, and takes the difference."""

    def __init__(self, clock: ReplayClock) -> None:
        self.clock = clock
        self.measured: list[float] = []
        self.is_used = False

    def pedantic(self, function: Any, args: Any = (), rounds: int = 1) -> None:
        self.is_used = True
        for _ in range(rounds):
            began = self.clock()
            function(*args)
            self.measured.append(self.clock() - began)


def test_benchmark_has_a_round_for_each_step() -> None:
    benchmark = Pedantic(ReplayClock())
    assert (benchmark.clock(), benchmark.clock()) == (0.0, 0.0)
    replay(benchmark, benchmark.clock, [0.25, 0.5, 0.125])
    assert benchmark.measured == [0.25, 0.5, 0.125]


def test_empty_benchmark_counts_as_used() -> None:
    benchmark = Pedantic(ReplayClock())
    replay_nothing(benchmark)
    assert (benchmark.is_used, benchmark.measured) == (True, [])


@pytest.mark.launch
@pytest.mark.usefixtures("simulated")
def test_pytest_benchmark_has_every_step(suite: pytest.Pytester) -> None:
    result = run_cpu(suite, "--benchmark-json=b.json", "--benchmark-save=one", "--perf-json=out.json")
    result.stdout.no_fnmatch_line("Name (time in *")
    report = read_json(suite, "b.json")
    (saved,) = report["benchmarks"]
    machine = report["machine_info"]
    runs = read_json(suite)["results"][0]["runs"]
    assert len(runs) == 3
    assert saved["stats"]["data"] == [
        step for run in runs for step in run["step_s"][run["window"][0] : run["window"][1]]
    ]
    assert saved["extra_info"]["case_id"] == ID
    assert machine["hardware"]["hardware_class"].startswith("cpu-")
    assert machine["frameworks"]["torch"].startswith("2.")
    compared = run_cpu(suite, "--benchmark-compare")
    compared.stdout.fnmatch_lines([f"*test_it?{ID}?*"])
    (file,) = suite.path.glob(".benchmarks/*/*.json")
    file.write_text(file.read_text().replace(machine["hardware"]["hardware_class"], "h100-80gb-sxm"))
    unlike = run_cpu(suite, "--benchmark-compare", status=pytest.ExitCode.USAGE_ERROR)
    unlike.stderr.fnmatch_lines(["*h100-80gb-sxm*different hardware cannot be compared*"])


@pytest.mark.launch
def test_benchmarks_of_others_can_be_compared(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_cases="def test_other(benchmark):\n    benchmark.pedantic(sum, ([1, 2],))\n")
    suite.runpytest("-W", "ignore", "-p", "no:perfsuite", "--benchmark-save=one")
    assert list(suite.path.glob(".benchmarks/*/*.json"))
    run(suite, "-W", "ignore", "--benchmark-compare")


@pytest.mark.launch
def test_reports_missing_pytest_benchmark(suite: pytest.Pytester) -> None:
    result = run(suite, "-p", "no:benchmark", status=pytest.ExitCode.USAGE_ERROR)
    result.stderr.fnmatch_lines(
        ["*test_cases.py::test_it?fake-*? uses bench, which needs pytest-benchmark*-p no:benchmark"]
    )
    suite.makepyfile(test_cases="def test_other():\n    pass\n")
    run(suite, "-p", "no:benchmark")
