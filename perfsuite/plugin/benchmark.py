"""Turn recorded step times into an ordinary pytest-benchmark benchmark, using only its public API.

pytest-benchmark takes its timer from the test's `benchmark` marker when the fixture is built. `pedantic`
never calibrates, so each round is a replayed step.
"""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.errors import PerfsuiteError
from perfsuite.frameworks.base import optional_packages
from perfsuite.plugin.collection import SESSION

TABLE_OPTIONS = tuple(  # options for pytest-benchmark's table: if one is given, the table includes cases
    f"--benchmark-{name}"
    for name in ("columns", "compare", "cprofile", "group-by", "histogram", "name", "sort", "verbose")
)
Groups = list[tuple[str | None, list[dict[str, Any]]]]


class ReplayClock:
    """A timer that is read before and after each round. It advances by the duration of the replayed step."""

    __name__ = "optimizer_step_clock"  # appears in the JSON as options.timer
    times: Iterator[float] = iter(())

    def __call__(self) -> float:
        """Return the time in seconds."""
        return next(self.times, 0.0)


CLOCK = pytest.StashKey[ReplayClock]()


def set_clock(item: pytest.Item) -> None:
    """Give pytest-benchmark a clock that replays steps. Must be called before the fixtures are set up."""
    clock = item.stash[CLOCK] = ReplayClock()
    closest = item.get_closest_marker("benchmark")
    options = {**(closest.kwargs if closest else {}), "timer": clock}
    item.add_marker(pytest.mark.benchmark(**options), append=False)


def replay(benchmark: Any, clock: ReplayClock, step_s: Sequence[float]) -> None:
    """Make `benchmark` measure exactly the step times `step_s`, in seconds."""
    clock.times = (second for step in step_s for second in (0.0, step))
    benchmark.pedantic(lambda: None, rounds=len(step_s))


def replay_nothing(benchmark: Any) -> None:
    """Use `benchmark` without a round, because pytest-benchmark warns if nothing uses the fixture."""
    with contextlib.suppress(StopIteration):
        benchmark.pedantic(next, args=(iter(()),))


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Add versions and, if known, the hardware to the JSON, even if the JSON contains no case."""
    with contextlib.suppress(PerfsuiteError):
        machine_info["hardware"] = documents.plain(config.stash[SESSION].setup.host.machine)
    versions = {}
    for package in optional_packages():
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    machine_info["frameworks"] = versions


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_benchmark_compare_machine_info(
    machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
) -> None:
    """Refuse to compare cases on different hardware. Other benchmarks are not checked."""
    saved = compared_benchmark.get("benchmarks", ())
    if not any("case_id" in benchmark.get("extra_info", {}) for benchmark in saved):
        return  # none of the saved benchmarks is a case
    now = machine_info.get("hardware", {}).get("hardware_class")
    then = compared_benchmark.get("machine_info", {}).get("hardware", {}).get("hardware_class")
    if now != then:
        raise pytest.UsageError(
            f"--benchmark-compare: the saved run is from {then}, but this machine is {now}. Times on "
            "different hardware cannot be compared"
        )


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_benchmark_group_stats(config: pytest.Config) -> Generator[None, Groups, Groups]:
    """Leave cases out of pytest-benchmark's table, because perfsuite prints its own.

    If one of `TABLE_OPTIONS` is given, cases remain in the table.
    """
    groups = yield
    arguments = [*config.invocation_params.args, *config.getini("addopts")]
    if any(str(argument).startswith(TABLE_OPTIONS) for argument in arguments):
        return groups
    others = [
        (name, [benchmark for benchmark in group if "case_id" not in benchmark["extra_info"]])
        for name, group in groups
    ]
    return [(name, group) for name, group in others if group]
