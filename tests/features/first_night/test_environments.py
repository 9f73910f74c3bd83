"""Tests of launches in other environments. Launches are fake or simulated in this process."""

import os
from pathlib import Path
from typing import Any

import pytest

from perfsuite.features.first_night.cases import spread_case
from perfsuite.features.first_night.environments import container_rows, core_rows
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from tests.features.first_night.nights import Launches, by_check, make_night, write_numa_nodes
from tests.processes import executable
from tests.samples import make_figures, make_machine, make_run
from tests.twin_counts import counts, launch

SHM = "64 MiB of /dev/shm"
COUNTED = {"counts": launch().counts, "observed": launch().observed}


@pytest.fixture
def may_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `unshare` with a program that always succeeds."""
    directory = tmp_path / "bin"
    directory.mkdir()
    executable(directory / "unshare", "exit 0")
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.usefixtures("may_mount")
@pytest.mark.parametrize(
    ("message", "status", "said"),
    [
        (None, "pass", "training works with it"),
        ("NCCL: Error while creating /dev/shm/nccl-1: No space left", "pass", "the message says why"),
        ("NCCL: unhandled system error", "fail", "the message does not name /dev/shm"),
    ],
)
def test_a_small_shm_works_or_is_named(message: str | None, status: str, said: str) -> None:
    failure = None if message is None else Failure(kind="crash", message=message)
    launches = Launches(**{".": {"failure": failure}})
    row = by_check(container_rows(make_night(launch=launches, size="tiny")))[SHM]
    assert row.status == status
    assert said in row.found
    (_, _, directory, how) = launches.asked[0]
    assert directory == Path("night/steps/container/small-shm")
    script = Path(how.arm.python)
    assert script.is_absolute()
    assert "size=64m" in script.read_text()
    assert os.access(script, os.X_OK)


@pytest.mark.usefixtures("may_mount")
def test_simulated_training_says_nothing_about_shm() -> None:
    row = by_check(container_rows(make_night(launch=Launches())))[SHM]
    assert row.status == "unknown"
    assert (
        row.found == "not run: the launch works, but simulated on CPUs: nothing here says anything about GPUs"
    )


def test_a_python_in_a_folder_with_spaces_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`unshare` and `mount` are replaced. The replacements run the command, but mount nothing."""
    executable(tmp_path / "unshare", 'shift 2; exec "$@"')
    executable(tmp_path / "mount", "exit 0")
    python = executable(tmp_path / "my $HOME python", 'touch "$0 ran"')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("sys.executable", str(python))
    rows = by_check(container_rows(make_night(launch=Launches(), size="tiny")))
    assert rows[SHM].status == "pass"
    assert (tmp_path / "my $HOME python ran").exists()


def test_who_may_not_mount_learns_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "unshare", "echo unshare: Operation not permitted >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    rows = by_check(container_rows(make_night(launch=Launches())))
    assert rows[SHM].status == "unknown"
    assert rows[SHM].found.endswith("small /dev/shm: unshare: Operation not permitted")
    assert "image" not in rows, "nobody asked for it"


@pytest.mark.usefixtures("may_mount")
@pytest.mark.parametrize(
    ("inside", "status", "said"),
    [
        (COUNTED, "pass", "it trains in the image, and a step does the same work as outside the image"),
        ({"failure": Failure(kind="crash", message="no torch")}, "fail", "the launch in the image failed"),
        ({}, "unknown", "its work was not compared"),
        ({**COUNTED, "counts": launch(counts(host_reads={"forward": 99})).counts}, "pass", "host reads"),
    ],
)  # fmt: skip
def test_an_image_is_launched_beside_this_environment(
    tmp_path: Path, inside: dict[str, Any], status: str, said: str
) -> None:
    """The fake docker works, and its Python prints the version of perfsuite in the image."""
    executable(tmp_path / "bin" / "docker", '[ "$1" = version ] || echo 0.1')
    launches = Launches(**{".": COUNTED, "image:nvcr.io/it:1": inside})
    row = by_check(container_rows(make_night(launch=launches, image="nvcr.io/it:1")))["image"]
    *_, how = launches.asked[-1]
    assert "nvcr.io/it:1 python" in Path(how.arm.python).read_text()
    assert row.status == status
    assert said in row.found


def test_an_image_needs_a_container_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    row = by_check(container_rows(make_night(launch=Launches(), image="it")))["image"]
    assert row.status == "unknown"
    assert row.found.startswith("not run: --image 'image:it': image:it needs one of docker, podman, ")


def recorded_before(night: Any, *speeds: float) -> None:
    case = spread_case(night.machine, night.size)
    for number, speed in enumerate(speeds, 1):
        launched = RunDir.of_launch(night.directory("spread"), number)
        launched.path.mkdir(parents=True)
        run = make_run(case=case, figures=make_figures(tokens_per_s=1000 * speed))
        launched.run.write_text(run.as_json())


def test_compares_one_socket_and_one_thread(tmp_path: Path) -> None:
    usual = os.sched_getaffinity(0)
    seen: list[tuple[set[int], dict[str, str]]] = []

    def measure(case: Any, machine: Any, directory: Path, reference: Any, how: Any) -> tuple[list[Run], Any]:
        from perfsuite.verdict.judge import judge

        seen.append((os.sched_getaffinity(0), how.arm.variables))
        speed = 500 if how.arm.variables else 1000
        runs = [make_run(case=case, figures=make_figures(tokens_per_s=speed))] * 3
        return runs, judge(runs, reference.baseline, reference.noise, reference.policy)

    first = {min(usual)}
    write_numa_nodes(tmp_path, first, usual - first)
    one_core = make_machine(devices=1)  # so the case has one rank, which fits on the first socket
    night = make_night(machine=one_core, size="tiny", measure=measure)
    recorded_before(night, 1.0, 1.0, 1.0)
    rows = by_check(core_rows(night, root=tmp_path))
    assert rows["one socket"].found.startswith("tokens/s +0.0% (99% interval ")
    assert rows["one thread"].found.startswith("tokens/s -50.0% (99% interval ")
    assert seen == [(first, {}), (usual, {"OMP_NUM_THREADS": "1"})]
    assert os.sched_getaffinity(0) == usual


def test_nothing_is_compared_without_launches() -> None:
    night = make_night()
    recorded_before(night, 1.0)
    rows = by_check(core_rows(night))
    assert {row.found for row in rows.values()} == {
        "not run: the step `spread` has too few launches to compare with"
    }


def test_one_socket_must_have_cores_for_all_ranks(tmp_path: Path) -> None:
    def measure(*arguments: Any) -> Any:
        from perfsuite.results.outcome import Verdict

        return [], Verdict(outcome="unhealthy", launches=0, reasons=("GPU 1 is hot",))

    night = make_night(measure=measure)
    recorded_before(night, 1.0, 1.0)
    allowed = sorted(os.sched_getaffinity(0))
    write_numa_nodes(tmp_path, allowed)
    assert "one NUMA node only" in by_check(core_rows(night, root=tmp_path))["one socket"].found
    write_numa_nodes(tmp_path, allowed[:1], allowed[1:])
    rows = by_check(core_rows(night, root=tmp_path))
    assert rows["one thread"].found == "GPU 1 is hot"
    if len(allowed) > 1:
        assert "fewer cores than there are ranks" in rows["one socket"].found
