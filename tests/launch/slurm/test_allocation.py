"""What a launcher in an allocation settles before a launch and reads after it. No Slurm is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.errors import CaseError, MachineError
from perfsuite.launch.slurm.launcher import SlurmLauncher, alike, refuse_other_gpus, said_by_slurm
from perfsuite.node.describe import Described
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import LaunchFile
from perfsuite.results.run_dir import RunDir
from tests.samples import make_machine


def described(
    name: str = "n2", *, granted: int | None = None, interconnect: str | None = "8xib400", **machine: Any
) -> Described:
    return Described(
        name=name,
        machine=make_machine(**machine),
        interconnect=interconnect,
        granted_gpus=granted,
        probe=None,
    )


def test_a_node_that_sees_other_gpus_than_slurm_gave_is_named() -> None:
    eight, seven = (described(granted=8, device="cuda", devices=seen) for seen in (8, 7))
    refuse_other_gpus([eight, described(device="cuda", devices=8)])
    with pytest.raises(MachineError, match=r"^n2: Slurm gave a step 8 GPUs, and it sees 7\. .*--exclude"):
        refuse_other_gpus([eight, seven])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": 1}, "n2 has devices 1 instead of 2 of n1"),
        ({"hardware_class": "cpu-d"}, "n2 has hardware_class 'cpu-d' instead of 'cpu-test-2c' of n1"),
        ({"driver": "580"}, "n2 has driver '580' instead of None of n1"),
        # As if a port of one is down: NCCL would fall back to sockets, or the others would wait for it.
        ({"interconnect": "7xib400"}, "n2 has interconnect '7xib400' instead of '8xib400' of n1"),
        ({"interconnect": None}, "n2 has interconnect None instead of '8xib400' of n1"),
    ],
)
def test_unlike_nodes_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(MachineError, match=words):
        alike([described("n1"), described(**changes)])
    assert alike([described("n1"), described()]) == make_machine(interconnect="8xib400")


KILLED = "srun: error: n2: task 1: Killed\n"
SIGNALLED = "srun: error: n2: task 1: Exited with exit code 143\n"
ABORTED = "srun: Job step aborted: Waiting up to 4 seconds for job step to finish.\n"
LIMIT = "*** STEP 7.0 ON n1 CANCELLED AT 2026-11-22T07:34:28 DUE TO TIME LIMIT ***"
BY_SLURM = f"slurmstepd: error: {LIMIT}\n"


@pytest.mark.parametrize(
    ("said", "by_agent", "kind", "message"),
    [
        (KILLED, "", "crash", "an agent ended without a word: n2: task 1: Killed"),
        # The end of the agents that Slurm killed may be known before the abort, and instead of it.
        (KILLED + ABORTED, "", "cancelled", "Slurm ended the step: somebody cancelled it"),
        (ABORTED + KILLED, BY_SLURM, "cancelled", f"Slurm ended the step: {LIMIT}"),
        (KILLED, BY_SLURM, "cancelled", f"Slurm ended the step: {LIMIT}"),
        (SIGNALLED, "", "cancelled", "Slurm ended the step: somebody cancelled it"),
        ("srun: cluster configuration lacks support for cpu binding\n", "", None, None),
    ],
)
def test_a_step_that_slurm_aborts_is_told_from_an_agent_that_dies(
    tmp_path: Path, said: str, by_agent: str, kind: str | None, message: str | None
) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.scheduler_log.write_text(said)
    run_dir.agent_log(0).write_text(by_agent)
    failure = said_by_slurm(run_dir, 2)
    assert (failure and failure.kind, failure and failure.message) == (kind, message)
    told = LaunchFile(host="n2", failures=(Failure(kind="crash", message="exit code 1", rank=1),))
    documents.write(run_dir.launch(1), told.replace(is_over=False))
    failure = said_by_slurm(run_dir, 2)
    assert (failure is not None) is (kind == "cancelled"), "ranks fail by an abort"
    documents.write(run_dir.launch(1), told)
    assert said_by_slurm(run_dir, 2) is None, "the agent knows better"


def test_how_steps_are_started_is_told_by_the_environment_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def options_and_python() -> tuple[list[str], str]:
        launcher = SlurmLauncher()
        return list(launcher._options), launcher._python

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", "/this/python")
    assert options_and_python() == ([], "/this/python")
    settings = "perf_slurm_srun_options = --image='a b.sqsh' -v\nperf_slurm_python = /opt/python\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{settings}")
    assert options_and_python() == (["--image=a b.sqsh", "-v"], "/opt/python")
    monkeypatch.setenv("PERFSUITE_SLURM_SRUN_OPTIONS", "")
    monkeypatch.setenv("PERFSUITE_SLURM_PYTHON", "python3")
    assert options_and_python() == ([], "python3")
    monkeypatch.setenv("PERFSUITE_SLURM_SRUN_OPTIONS", "'x")
    with pytest.raises(CaseError, match=r"PERFSUITE_SLURM_SRUN_OPTIONS is \"'x\": No closing quotation"):
        SlurmLauncher()
