"""Submitting with stand-ins for Slurm's commands. tests/cli/test_slurm.py submits to a real Slurm."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from perfsuite.errors import SlurmError
from perfsuite.inputs.ini import Ini
from perfsuite.launch.slurm import commands
from perfsuite.launch.slurm import submit as jobs
from perfsuite.launch.slurm.commands import SlurmJob
from perfsuite.launch.slurm.submit import Submitted, follow, interrupts, script, store_of, submit
from tests.processes import executable

PENDING = SlurmJob(id="7", state="PENDING", state_words="PENDING", reason="Priority")
RUNNING = SlurmJob(id="7", state="RUNNING", state_words="RUNNING", nodes=("n1", "n2"))
COMPLETING = SlurmJob(id="7", state="COMPLETING", state_words="COMPLETING", exit_status=0)
DONE = SlurmJob(id="7", state="COMPLETED", state_words="COMPLETED", exit_status=0)
FAILED = replace(DONE, state="FAILED", state_words="FAILED", reason="NonZeroExitCode", exit_status=5)
CANCELLED = replace(DONE, state="CANCELLED", state_words="CANCELLED")
AWAY = SlurmError("scontrol show job 7: Unable to contact slurm controller")
Answer = SlurmJob | SlurmError | Callable[[], SlurmJob]


class Talk:
    """Answers for Slurm, one after the other and the last one for ever; keeps what was said and shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.answers: list[Answer] = []
        self.said: list[str] = []
        self.shown: list[bytes] = []
        self.cancelled: list[str] = []
        self.submitted = Submitted(id="7", log=tmp_path / "7.log")
        monkeypatch.setattr(jobs, "POLL_S", 0.0)
        monkeypatch.setattr(jobs, "TICK_S", 0.0)
        monkeypatch.setattr(commands, "job", self._job)
        monkeypatch.setattr(commands, "cancel", self.cancelled.append)

    def follow(self, *answers: Answer, wait_start_s: float | None = None) -> int:
        self.answers = list(answers)
        say = self.said.append
        show = self.shown.append
        with interrupts() as came:
            return follow(self.submitted, came, say=say, show=show, wait_start_s=wait_start_s)

    def _job(self, job_id: str) -> SlurmJob:
        assert job_id == "7"
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, SlurmError):
            raise answer
        return answer if isinstance(answer, SlurmJob) else answer()


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Talk:
    return Talk(monkeypatch, tmp_path)


def test_submits_a_job_with_its_log_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = tmp_path / "called"
    executable(tmp_path / "sbatch", f"printf '%s\\n' \"$@\" > {called}", 'echo "$ANSWER"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ANSWER", "4711")
    assert submit([], [], directory=tmp_path, store=tmp_path).id == "4711"
    monkeypatch.setenv("ANSWER", "4711;north")  # of several clusters
    submitted = submit(["--qos=q"], ["-k", "a b"], directory=tmp_path, store=tmp_path / "100%")
    assert submitted == Submitted(id="4711", log=tmp_path / "100%" / "slurm" / "4711.log")
    assert submitted.log.parent.is_dir()
    words = called.read_text().splitlines()
    assert f"--output={tmp_path}/100%%/slurm/%j.log" in words, "% has a meaning for Slurm"
    assert {"--parsable", "--job-name=perfsuite", "--exclusive", "--no-requeue", "--qos=q"} < set(words)
    assert called.read_text().endswith(f"--wrap={script(['-k', 'a b'], tmp_path)}\n")


def test_script_runs_pytest_on_slurm_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last launcher wins."""
    where = tmp_path / "a b"
    where.mkdir()
    python = executable(tmp_path / "python", 'pwd; printf "%s|" "$@"')
    monkeypatch.setattr(sys, "executable", str(python))
    text = script(["-k", "a b", "--perf-launcher=local"], where)

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh"], input=text, capture_output=True, text=True, check=False)

    assert run().stdout == f"{where}\n-m|pytest|--perf-launcher=slurm|-k|a b|--perf-launcher=local|"
    where.rmdir()
    assert (run().returncode, run().stdout) == (2, "")


ENDED = "job 7 ended"
RUNS = "job 7 runs on n1, n2"
OTHERWISE = replace(PENDING, reason="Resources")


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ((OTHERWISE, RUNNING, RUNNING, COMPLETING, DONE), ["job 7 is queued: Resources", RUNS, ENDED]),
        ((replace(DONE, nodes=("n1", "n2")),), [RUNS, ENDED]),  # one that was over when Slurm was asked again
        ((RUNNING, AWAY, AWAY, DONE), [RUNS, f"Slurm does not answer, asking again: {AWAY}", ENDED]),
    ],
    ids=["reasons", "short", "controller away"],
)
def test_the_job_is_told_from_queue_to_end(talk: Talk, answers: tuple[Answer, ...], said: list[str]) -> None:
    assert talk.follow(PENDING, PENDING, *answers) == 0
    assert talk.said == ["job 7 is queued: Priority", *said]


def test_shows_the_jobs_output_to_the_last_byte(talk: Talk) -> None:
    first = b"1 passed in 2 \xc2"
    second = b"\xb5s\n"  # the write ends within a letter

    def wrote(text: bytes, job: SlurmJob) -> SlurmJob:
        talk.submitted.log.write_bytes(text)
        return job

    began = partial(wrote, first, RUNNING)
    ended = partial(wrote, first + second, DONE)
    assert talk.follow(PENDING, began, RUNNING, ended) == 0
    assert b"".join(talk.shown) == first + second


def test_the_exit_status_is_that_of_pytest(talk: Talk) -> None:
    assert talk.follow(RUNNING, FAILED) == 5
    assert talk.follow(RUNNING, DONE, wait_start_s=0) == 0, "it started in the last moment"
    assert talk.cancelled == []


@pytest.mark.parametrize(
    ("why", "job"),
    [
        *(
            (state, replace(CANCELLED, state=state, state_words=state, exit_status=1))
            for state in ("CANCELLED", "NODE_FAIL", "TIMEOUT", commands.FORGOTTEN)
        ),
        ("CANCELLED by 0", replace(CANCELLED, state_words="CANCELLED by 0")),
        ("FAILED (NonZeroExitCode)", replace(FAILED, exit_status=0)),
        ("FAILED (JobLaunchFailure)", replace(FAILED, reason="JobLaunchFailure")),
    ],
)
def test_job_that_ends_otherwise_names_the_log(talk: Talk, job: SlurmJob, why: str) -> None:
    with pytest.raises(SlurmError) as caught:
        talk.follow(RUNNING, job)
    assert str(caught.value) == f"job 7 is over: {why}. What it wrote is in {talk.submitted.log}"


def test_cancels_a_queue_that_never_starts(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    def cancel(job_id: str) -> None:
        talk.cancelled.append(job_id)
        if len(talk.cancelled) < 3:
            raise AWAY

    monkeypatch.setattr(commands, "cancel", cancel)
    monkeypatch.setattr(commands, "POLL_S", 0.0)
    with pytest.raises(SlurmError) as caught:
        talk.follow(lambda: CANCELLED if talk.cancelled else PENDING, wait_start_s=0.01)
    assert str(caught.value) == (
        "job 7 has not started in 0.01 s (--wait-start) and is cancelled. "
        "Why it waited, as Slurm says: Priority"
    )
    assert talk.cancelled == ["7"] * 3


def signalled(number: signal.Signals) -> SlurmJob:
    os.kill(os.getpid(), number)
    return RUNNING


def test_interrupt_cancels_the_job_and_waits(talk: Talk) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert talk.follow(lambda: signalled(signal.SIGTERM), COMPLETING, COMPLETING, CANCELLED) == 143
    assert (talk.cancelled, talk.answers) == (["7"], [CANCELLED])
    assert talk.said[-2:] == [
        "cancelling job 7; interrupt again to leave at once",
        f"job 7 is cancelled and gone; what it wrote is in {talk.submitted.log}",
    ]
    assert signal.getsignal(signal.SIGTERM) == before
    assert talk.follow(lambda: signalled(signal.SIGINT)) == 130, "the second one leaves at once"
    assert talk.cancelled == ["7"] * 2
    assert talk.said[-1] == "left job 7, which may still be there: scancel 7"


def test_a_controller_that_stays_away_is_an_error(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SILENCE_S", 0)
    with pytest.raises(SlurmError, match=f"job 7 may still be there, .* for 0 s: {AWAY}"):
        talk.follow(RUNNING, AWAY)


@pytest.mark.parametrize(
    ("arguments", "store"),
    [
        ("", "kept"),
        ("-k x --perf-store=other -m h100", "other"),
        ("bench_cases --perf-store other bench", "other"),
        ("--perf-store /shared/store", "/shared/store"),
        ("--perf-store", "kept"),
        ("--perf-store=", "kept"),
        ("--perf-storey=1 --perf-sto=2", "kept"),
    ],
)
def test_the_store_is_that_of_the_session(tmp_path: Path, arguments: str, store: str) -> None:
    assert store_of(Ini(tmp_path, {"perf_store": "kept"}), arguments.split()) == tmp_path / store
    assert store_of(Ini(tmp_path, {}), []) == tmp_path / ".perfsuite"
