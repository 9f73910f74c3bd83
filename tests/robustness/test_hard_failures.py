"""Tests of hard failures that are injected into real processes. Each failure must have a type and a message
that names the cause, and no process may be left. Tests of faults have the mark `fault`, and
`docs/evidence/faults.md` lists the faults of all test files.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from perfsuite import DDP, Script, Topology
from perfsuite.results.run_dir import RunDir
from tests.launch.test_local import failed, processes_of, started
from tests.processes import agent_among, pid_of
from tests.samples import make_case
from tests.suite import measuring

FAKE = make_case(max_warmup_steps=20, steps=50, timeout_s=120)

pytestmark = pytest.mark.launch


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PERFSUITE_TEST", str(tmp_path))
    yield
    _, alive = psutil.wait_procs(processes_of(tmp_path), timeout=20)
    assert alive == []


@pytest.mark.parametrize(
    ("inject", "kind", "words"),
    [
        pytest.param(
            "crash", "crash", "RuntimeError: injected crash", marks=pytest.mark.fault("rank raises")
        ),
        pytest.param("exit", "crash", "exit code 13", marks=pytest.mark.fault("rank exits silently")),
        pytest.param("oom", "out_of_memory", "MemoryError", marks=pytest.mark.fault("out of memory")),
        pytest.param("nan", "loss", "the loss is nan at step 69", marks=pytest.mark.fault("loss is NaN")),
        pytest.param(
            "missing-rank",
            "missing_report",
            "no report from rank 1 of 2",
            marks=pytest.mark.fault("report is missing"),
        ),
    ],
)
def test_names_a_broken_rank_with_its_kind(tmp_path: Path, inject: str, kind: str, words: str) -> None:
    failure = failed(FAKE, tmp_path, inject)
    assert failure.kind == kind
    assert words in failure.message
    assert failure.rank == (None if kind == "loss" else 1)
    assert ("_break_down" in str(failure.traceback)) == (inject in ("crash", "oom"))


def kill_once(find: Callable[[], psutil.Process | None], *, from_step: int = 0) -> Callable[[int, int], None]:
    """Return a progress listener that sends SIGKILL to the first process that `find` returns."""
    killed: list[int] = []

    def listen(step: int, tokens: int) -> None:
        if not killed and step >= from_step:
            process = find()
            if process is not None:
                process.kill()
                killed.append(process.pid)

    return listen


@pytest.mark.fault("rank is killed")
def test_killed_rank_not_its_peer_is_the_cause(tmp_path: Path) -> None:
    """Rank 1 sleeps at step 5, and rank 0 waits for it in a collective."""
    listen = kill_once(lambda: psutil.Process(pid_of(1, RunDir(tmp_path))), from_step=1)
    failure = failed(FAKE.replace(framework=DDP()), tmp_path, "hang", listen)
    assert (failure.kind, failure.rank, failure.message) == ("crash", 1, "exit code -9 (SIGKILL)")


@pytest.mark.fault("agent is killed")
def test_a_launcher_that_is_killed_is_the_cause(tmp_path: Path) -> None:
    def launcher() -> psutil.Process | None:
        return agent_among(psutil.Process().children()) if started(tmp_path) else None

    failure = failed(FAKE, tmp_path, "hang", kill_once(launcher))
    assert failure.kind == "missing_report"
    assert failure.message.startswith("the agent died before rank ")


STUCK_IN_FORWARD = """
import os, time, torch
from pathlib import Path

rank, one_is_stuck = os.environ.get("RANK"), Path(__file__).with_name("stuck1")
if rank is not None:
    torch.distributed.init_process_group("gloo")

class Stuck(torch.nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 2:
            Path(__file__).with_name(f"stuck{rank}").touch()
            time.sleep(1000)
        return super().forward(x)

model = Stuck(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while rank == "0" and not one_is_stuck.exists():  # the hang counts from rank 0's first step
    time.sleep(0.01)
while True:
    model(torch.ones(2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.fault("hang in forward")
@pytest.mark.parametrize(
    "is_command",
    [False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["ranks of a script", "a command"],
)
def test_hang_in_forward_shows_every_rank(tmp_path: Path, is_command: bool) -> None:
    """This command is a single process, for which perfsuite starts no ranks."""
    file = tmp_path / "train.py"
    file.write_text(STUCK_IN_FORWARD)
    script = Script(command=("python", str(file))) if is_command else Script(path=str(file))
    ranks = Topology(processes_per_node=1 if is_command else 2)
    failure = failed(FAKE.replace(framework=script, topology=ranks), tmp_path / "run", hang_s=2)
    assert (failure.kind, failure.rank) == ("timeout", None)
    assert processes_of(tmp_path) == [], "all are gone at once"
    who, _, where = str(failure.traceback).partition(" stopped at:")
    assert who == ("rank 0" if is_command else "rank 0, rank 1")
    assert "train.py" in where.splitlines()[2]
    assert "in forward" in where.splitlines()[2]


SKIPS_A_COLLECTIVE = """
import time, torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
while True:
    step += 1
    model(torch.ones(2)).sum().backward()
    if step == 3 and dist.get_rank() == 1:
        time.sleep(1000)
    dist.all_reduce(model.weight.grad)
    optimizer.step()
"""


@pytest.mark.fault("hang in a collective")
@pytest.mark.parametrize(
    "is_torchrun",
    [False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["ranks of a script", "torchrun"],
)
def test_names_the_rank_that_lacks_a_collective(tmp_path: Path, is_torchrun: bool) -> None:
    file = tmp_path / "train.py"
    file.write_text(SKIPS_A_COLLECTIVE)
    torchrun = ("torchrun", "--standalone", "--nproc-per-node=2", str(file))
    script = Script(command=torchrun) if is_torchrun else Script(path=str(file))
    failure = failed(FAKE.replace(framework=script), tmp_path / "run", hang_s=8)
    assert failure.kind == "timeout"
    assert re.search(
        r"steps: rank 1 has not called all_reduce 3 of group default_pg, in which rank 0 has waited for \d+ "
        r"s \(train\.py:14\)$",
        failure.message,
    )
    assert "flight_recorder.py" not in str(failure.traceback)


CASES = (FAKE, FAKE.replace(micro_batch=8))
ONE, TWO = (case.id for case in CASES)
FULL_DISK = """
    import errno, tempfile

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    def pytest_runtest_setup(item):
        if "-b8-" in item.nodeid:
            tempfile.NamedTemporaryFile = full
"""

INTERRUPTED_TWICE = """
    import os, signal, threading, time
    from pathlib import Path
    import pytest

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell might ignore SIGINT

    def interrupt():
        while not list(Path(".perfsuite").glob("runs/*/*b8*/launch-1/rank-1.log")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()

    @pytest.hookimpl(wrapper=True)
    def again():
        os.kill(os.getpid(), signal.SIGINT)
        return (yield)

    class BeforeAllOthers:
        pytest_keyboard_interrupt = staticmethod(pytest.hookimpl(wrapper=True, tryfirst=True)(again))

    def first_of_all(session):
        session.config.pluginmanager.register(BeforeAllOthers)
"""


def on_disk(suite: pytest.Pytester) -> list[str]:
    """Return the cases in the results file that the session left in its store."""
    (file,) = suite.path.glob(".perfsuite/runs/*/results.json")
    return [result["case_id"] for result in json.loads(file.read_text())["results"]]


@pytest.mark.fault("disk is full")
def test_full_disk_keeps_earlier_measurements(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_cases=measuring(*CASES), conftest=FULL_DISK)
    result = suite.runpytest_subprocess("--perf-record-launches=1")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "perfsuite: cannot write *results.json: No space left on device*",
            f"{ONE} *recorded",
            f"{TWO} *failed",
            "*the results were not written*",
        ]
    )
    result.stdout.fnmatch_lines([f"cannot write *{TWO}/launch-1/case.json: No space left on device*"])
    assert on_disk(suite) == [ONE]


@pytest.mark.fault("Ctrl-C twice")
@pytest.mark.parametrize(
    ("when", "ends_as_after_one"),
    [
        pytest.param("before pytest takes note of the first", False, marks=pytest.mark.nightly),
        ("while pytest takes note of the first, and before the results are written", True),
    ],
)
def test_second_ctrl_c_costs_nothing(suite: pytest.Pytester, when: str, ends_as_after_one: bool) -> None:
    hooks = (
        "pytest_keyboard_interrupt = pytest_sessionfinish = again"
        if ends_as_after_one
        else "pytest_sessionstart = first_of_all"
    )
    suite.makepyfile(test_cases=measuring(*CASES), conftest=f"{INTERRUPTED_TWICE}\n    {hooks}\n")
    result = suite.runpytest_subprocess("--perf-record-launches=2", "--perf-report=out")
    assert (result.ret == pytest.ExitCode.INTERRUPTED) == ends_as_after_one
    assert ("Traceback" in result.stderr.str()) != ends_as_after_one
    assert on_disk(suite) == [ONE]
    content = json.loads(next(suite.path.glob(".perfsuite/runs/*/results.json")).read_text())
    assert (content["status"], content["interrupted_case"]) == ("interrupted", TWO)
    for name in ("index.html", "summary.md"):
        assert f"The session was interrupted: {TWO} was not judged" in (suite.path / "out" / name).read_text()
