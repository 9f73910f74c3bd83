"""Tests that read Slurm's output: recorded output of several versions, and that of a real Slurm."""

import os
from pathlib import Path
from typing import Any

import pytest

from perfsuite.features.slurm import commands
from perfsuite.features.slurm.commands import SlurmError, fields, parse_duration_s, parse_job
from tests.features.slurm.emulated import Cluster
from tests.processes import executable, wait_until

PENDING_22_05 = (
    "JobId=4 JobName=wrap UserId=root(0) Account=(null) JobState=PENDING Reason=PartitionDown "
    "Dependency=(null) ExitCode=0:0 RunTime=00:00:00 TimeLimit=00:01:00 TimeMin=N/A StartTime=Unknown "
    "AllocNode:Sid=localhost:4495 ReqNodeList=(null) NodeList= NumNodes=2-2 NumTasks=2 CPUs/Task=1 "
    "ReqB:S:C:T=0:0:*:* TRES=cpu=2,mem=16000M,node=2,billing=2 Command=(null) WorkDir=/tmp/x Power= \n"
)
"""Recorded from Slurm 22.05, like the next job. Fields that add nothing to the test are left out."""
FAILED_22_05 = (
    "JobId=3 JobName=wrap UserId=root(0) GroupId=root(0) JobState=FAILED Reason=NonZeroExitCode "
    "Dependency=(null) ExitCode=3:0 RunTime=00:00:02 TimeLimit=UNLIMITED SubmitTime=2026-11-22T06:44:12 "
    "StartTime=2026-11-22T06:44:14 EndTime=2026-11-22T06:44:16 Deadline=N/A Partition=bench "
    "ReqNodeList=(null) ExcNodeList=(null) NodeList=n[1-2] BatchHost=n1 NumNodes=2 Command=(null) Power= \n"
)
NEWER = (
    "JobId=34815931 ArrayJobId=7 JobName=two words UserId=a(2) QOS=normal WCKey=* JobState=COMPLETING "
    "Reason=None ExitCode=0:0 DerivedExitCode=2:0 RunTime=00:00:07 TimeLimit=1-00:10:00 "
    "AllocNode:Sid=b-an01:626814 NodeList=b-cn[1703,1705] BatchHost=b-cn1703 StepMgrEnabled=Yes "
    "ReqTRES=cpu=12,mem=30192M,node=1,gres/gpu=16 AllocTRES=cpu=12,mem=30192M,node=2,gres/gpu=16 "
    "LicensesAlloc=(null) Comment=why not; JobState= Command=/shared/run.sh --x=1 JobState=FAILED "
    "WorkDir=/shared TresPerNode=gres/gpu:8 TresPerTask=cpu=1\n"
)
"""A job with fields of later versions, such as ReqTRES, AllocTRES, TresPerNode and StepMgrEnabled."""


WAITING = ("CONFIGURING", "PENDING", "REQUEUED")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (PENDING_22_05, {"state": "PENDING", "reason": "PartitionDown", "why_over": None}),
        (FAILED_22_05, {"state": "FAILED", "nodes": ("n1",)}),
        (FAILED_22_05, {"why_over": "FAILED (NonZeroExitCode)"}),
        (NEWER, {"state": "COMPLETING", "reason": None, "is_completing": True}),
        (NEWER, {"is_over": True, "left_s": 86993, "spreads_gpus": False}),
        ("JobId=1 JobState=RUNNING\n", {"state": "RUNNING", "reason": None}),
        ("JobState=RUNNING TresPerJob=gres:gpu:9", {"spreads_gpus": True}),
        ("JobState=RUNNING TresPerTask=cpu=4,gres/gpu:1", {"spreads_gpus": True}),
        *(
            (f"JobState=RUNNING {times}", {"left_s": None})
            for times in ("", "TimeLimit=UNLIMITED RunTime=00:00:07", "TimeLimit=1-00:10:00")
        ),
        ("", {"state": "UNKNOWN", "is_over": False}),
    ],
)
def test_reads_what_scontrol_prints_of_a_job(line: str, expected: dict[str, Any]) -> None:
    job = parse_job("1", fields(line), ("n1",))
    assert {name: getattr(job, name) for name in expected} == expected


def test_fields_may_hold_spaces_and_omit_nulls() -> None:
    assert "NodeList" not in fields(PENDING_22_05)
    values = fields(NEWER)
    assert (values["JobName"], values["AllocTRES"]) == (
        "two words",
        "cpu=12,mem=30192M,node=2,gres/gpu=16",
    )


@pytest.mark.parametrize(
    ("words", "state"),
    [
        *((state, state) for state in sorted(commands.ENDED - {"FORGOTTEN"})),
        *(("CANCELLED by 0", "CANCELLED"), ("CANCELLED+", "CANCELLED")),
        *(("COMPLETING,NODE_FAIL", "NODE_FAIL"), ("TIMEOUT COMPLETING", "TIMEOUT")),
        *((state, None) for state in ("RUNNING", "SUSPENDED", "NOVELTY", *WAITING)),
    ],
)
def test_knows_whether_an_allocation_is_over(words: str, state: str | None) -> None:
    job = parse_job("1", {"JobState": words}, ())
    assert (job.state, job.state_words, job.is_completing) == (state or words, words, "COMPLETING" in words)
    assert (job.is_over, job.why_over) == ((False, None) if state is None else (True, words))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("0:07\n", 7), ("10:00", 600), ("1:00:01", 3601), ("2-03:04:05", 183845)),
        *((text, None) for text in ("UNLIMITED", "INVALID", "NOT_SET", "")),
    ],
)
def test_reads_durations(text: str, seconds: int | None) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    ("name", "script", "ask", "said"),
    [
        (
            *("squeue", "echo 'Unable to contact slurm controller' >&2; exit 1"),
            *(lambda: commands.steps("7", "a"), "squeue --noheader .*--jobs=7.*: Unable to contact slurm"),
        ),
        ("scancel", "exit 3", lambda: commands.cancel("7"), "scancel 7: exit status 3$"),
        (
            *("scontrol", "echo 'Access denied' >&2; exit 1"),
            *(lambda: commands.job("7"), "scontrol show .*: Access denied$"),
        ),
        (
            *("scontrol", "exec sleep 60", lambda: commands.ask("scontrol", "show", answer_s=0.01)),
            "scontrol show: no answer within 0.01 s. Check Slurm's controller with",
        ),
    ],
    ids=["away", "silent", "denied", "late"],
)
def test_error_names_the_command_and_slurms_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str, ask: Any, said: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    executable(tmp_path / name, script)
    with pytest.raises(SlurmError, match=f"^{said}"):
        ask()


def test_names_a_command_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SlurmError, match=r"^scontrol, a command of Slurm, cannot be started: No such file"):
        commands.job("7")


@pytest.mark.launch
def test_commands_agree_with_a_real_slurm(slurm: Cluster) -> None:
    """One job is cancelled, some request GPUs (but not per node), and one id belongs to no job."""

    def submit(*words: str) -> str:
        return slurm.run("sbatch", "--parsable", "--output=/dev/null", "--nodes=2", *words).strip()

    job_id = submit("--time=10", "--wrap=srun --nodes=2 --ntasks=2 --job-name='the step' sleep 3600")
    wait_until(lambda: len(commands.steps(job_id, "the step")) == 1, "the step")
    assert commands.steps(job_id, "another") == []
    job = commands.job(job_id)
    assert (job.state, job.nodes) == ("RUNNING", ("n1", "n2"))
    assert job.left_s is not None
    assert 500 < job.left_s <= 600
    commands.cancel(job_id)

    def is_gone() -> bool:
        job = commands.job(job_id)
        return job.is_over and not job.is_completing

    wait_until(is_gone, "the job to end")
    assert (commands.job(job_id).state, commands.steps(job_id, "the step")) == ("CANCELLED", [])
    commands.cancel(job_id)
    for spread in (["--gpus=16"], ["--gpus-per-task=1", "--ntasks-per-node=8"]):
        job_id = submit("--hold", *spread, "--wrap=true")
        assert commands.job(job_id).spreads_gpus
        commands.cancel(job_id)
    unknown = commands.job("99999")
    assert (unknown.is_over, unknown.why_over) == (True, "no longer known to Slurm")
    assert commands.steps("99999", "x") == []
    commands.cancel("99999")
