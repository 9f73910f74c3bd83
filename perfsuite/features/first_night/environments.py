"""Launch in other environments: a container, one socket, one thread for each rank."""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from perfsuite import documents
from perfsuite.case.case import Case
from perfsuite.doctor.injected import small_case
from perfsuite.doctor.rows import Row, failed, passed, unknown
from perfsuite.errors import CaseError
from perfsuite.features.first_night.cases import SIMULATED, spread_case
from perfsuite.features.first_night.night import Night, healthy_launches, not_run, numa_nodes
from perfsuite.launch.arm import HERE, Arm, resolve
from perfsuite.launch.lock import machine_lock
from perfsuite.node.processes import captured
from perfsuite.report.text import between, percent, plural
from perfsuite.results.baseline import from_runs
from perfsuite.results.count_baseline import from_runs as counts_of
from perfsuite.results.metric import TOKENS_PER_S
from perfsuite.results.run import Run
from perfsuite.verdict import exact
from perfsuite.verdict.noise import class_noise
from perfsuite.verdict.overall import Reference
from perfsuite.verdict.policy import Policy

SMALL_SHM_MIB = 64  # default size of /dev/shm in a container
SMALL_SHM = """\
#!/bin/sh
# Python in a namespace whose /dev/shm has the size that containers have by default.
exec unshare --map-root-user --mount sh -c \\
    'mount -t tmpfs -o size={mib}m tmpfs /dev/shm && exec "$0" "$@"' {python} "$@"
"""


def container_rows(night: Night) -> Iterator[Row]:
    """Launch with a container's small /dev/shm, and in a container image."""
    directory = night.new_directory("container")
    case = _quick_case(night)
    with machine_lock(night.say):
        yield from _small_shm_rows(case, night, directory)
        yield from _image_rows(case, night, directory)


def _quick_case(night: Night) -> Case:
    """Return a small case with the framework of `spread_case`. Only the start of the training matters."""
    case = spread_case(night.machine, night.size)
    return case if night.size == "simulated" else small_case(night.machine).replace(framework="fsdp2")


def _small_shm_rows(case: Case, night: Night, directory: Path) -> Iterator[Row]:
    check = f"{SMALL_SHM_MIB} MiB of /dev/shm"
    script = directory / "python-small-shm"
    python = shlex.quote(sys.executable)
    documents.write_text(script, SMALL_SHM.format(mib=SMALL_SHM_MIB, python=python))
    script.chmod(0o755)
    try:
        tried = captured([str(script), "-c", ""])
        problem = tried.stderr.strip() if tried.returncode else None
    except OSError as error:
        problem = str(error.strerror)
    if problem is not None:
        last = (problem.splitlines() or ["it failed without a message"])[-1]
        yield not_run(check, f"this user may not mount a small /dev/shm: {last}")
        return
    run = _launched(case, night, directory / "small-shm", replace(HERE, python=str(script.absolute())))
    if run.failure is None and night.size == "simulated":
        yield not_run(check, f"the launch works, but {SIMULATED}")
        return
    if run.failure is None:
        yield passed(check, "training works with it")
        return
    is_clear = "/dev/shm" in run.failure.message
    advice = "start containers with --ipc=host or --shm-size=8g"
    observed = f"{run.failure.kind}: {run.failure.message}"
    if is_clear:
        yield passed(check, f"training fails, and the message says why: {observed}")
    else:
        yield failed(check, f"training fails, and the message does not name /dev/shm: {observed}", advice)


def _image_rows(case: Case, night: Night, directory: Path) -> Iterator[Row]:
    check = "image"
    if night.image is None:
        return  # no image was requested
    try:
        arm = resolve("--image", f"image:{night.image}", root=Path.cwd(), store=directory)
    except CaseError as error:
        yield not_run(check, str(error))
        return
    here = _launched(case, night, directory / "here", HERE)
    inside = _launched(case, night, directory / "image", arm)
    for where, run in (("here", here), ("in the image", inside)):
        if run.failure is not None:
            yield failed(check, f"the launch {where} failed: {run.failure.message}")
            return
    result = exact.check([inside], counts_of([here]), of_arm=True) if here.counts else None
    different = [finding.sentence for finding in result.findings] if result is not None else []
    observed = "; ".join(different) or "it trains in the image"
    if result is None or result.outcome == "not counted":
        yield unknown(check, f"{observed}, but its work was not compared: it was not counted")
    else:
        alike = f"{observed}, and a step does the same work as outside the image"
        yield passed(check, observed if different else alike)


def _launched(case: Case, night: Night, directory: Path, arm: Arm) -> Run:
    night.say(f"launching {case.id} in {directory.name}")
    return night.launch(case, night.machine, directory, replace(night.launching(), arm=arm))


def core_rows(night: Night, *, root: Path = Path("/")) -> Iterator[Row]:
    """Repeat the case of the step `spread` on one socket, and with one thread for each rank.

    The sockets are those in /sys under `root`.
    """
    directory = night.new_directory("cores")
    case = spread_case(night.machine, night.size)
    before = healthy_launches(night.directory("spread"), case)
    checks = ("one socket", "one thread")
    if len(before) < 2:
        for check in checks:
            yield not_run(check, "the step `spread` has too few launches to compare with")
        return
    nodes = [node & os.sched_getaffinity(0) for node in numa_nodes(root)]
    nodes = [node for node in nodes if node]
    with machine_lock(night.say):
        if len(nodes) < 2:
            yield not_run(checks[0], "this process may use the cores of one NUMA node only")
        elif len(nodes[0]) < case.topology.world_size:
            yield not_run(checks[0], "the first NUMA node has fewer cores than there are ranks")
        else:
            with _bound_to(nodes[0]):
                yield _compared(checks[0], case, night, directory / "socket", before, HERE)
        one_thread = replace(HERE, given={"OMP_NUM_THREADS": "1"})
        yield _compared(checks[1], case, night, directory / "thread", before, one_thread)


@contextmanager
def _bound_to(cores: frozenset[int]) -> Iterator[None]:
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, usual)


def _compared(check: str, case: Case, night: Night, directory: Path, before: Sequence[Run], arm: Arm) -> Row:
    """Return a row that compares two or three launches with the launches of the step `spread`."""
    night.say(f"{case.id}: {check}")
    recorded = from_runs(before)
    reference = Reference(
        baseline=recorded, noise=class_noise([recorded]), policy=Policy(max_launches=3, max_unhealthy=2)
    )
    launching = replace(night.launching(), arm=arm)
    runs, verdict = night.measure(case, night.machine, directory, reference, launching)
    speed = verdict.check(TOKENS_PER_S.name)
    if speed is None or speed.change is None or verdict.outcome in ("failed", "unhealthy"):
        return unknown(check, "; ".join(verdict.reasons) or f"{verdict.outcome}, without a comparison")
    interval = "" if speed.interval is None else f" (99% interval {between(speed.interval)})"
    return passed(check, f"tokens/s {percent(speed.change)}{interval} in {plural(len(runs), 'launch')}")
