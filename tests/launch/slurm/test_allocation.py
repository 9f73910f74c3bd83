"""What a launcher in an allocation settles before it starts anything. No Slurm is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.case.hardware import Machine
from perfsuite.errors import CaseError, MachineError
from perfsuite.launch.slurm.launcher import SlurmLauncher, refuse_other_gpus
from perfsuite.node.describe import Described


def described(seen: int, granted: int | None) -> Described:
    machine = Machine(device="cuda", device_name="c", hardware_class="h100", devices=seen, memory_bytes=2**34)
    return Described(name="n2", machine=machine, interconnect=None, granted_gpus=granted, probe=None)


def test_a_node_that_sees_other_gpus_than_slurm_gave_is_named() -> None:
    refuse_other_gpus([described(8, 8), described(8, None)])
    with pytest.raises(MachineError, match=r"^n2: Slurm gave a step 8 GPUs, and it sees 7\. .*--exclude"):
        refuse_other_gpus([described(8, 8), described(7, 8)])


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
