from __future__ import annotations

import pytest

from perfsuite.case.hardware import Machine
from perfsuite.errors import MachineError
from perfsuite.launch.slurm.commands import gres
from perfsuite.launch.slurm.launcher import refuse_other_gpus
from perfsuite.node.describe import Described


def described(seen: int, granted: int | None) -> Described:
    machine = Machine(device="cuda", device_name="c", hardware_class="h100", devices=seen, memory_bytes=2**34)
    return Described(name="n2", machine=machine, interconnect=None, granted_gpus=granted, probe=None)


def test_all_nodes_have_as_many_gpus() -> None:
    assert gres({}) == []
    assert gres({"n1": 8, "n2": 8}) == ["--gres=gpu:8"]
    with pytest.raises(MachineError, match=r"7 on n1, 1 on n2\. Ask for them per node: --gres=gpu:8"):
        gres({"n1": 7, "n2": 1})


def test_a_node_that_sees_other_gpus_than_slurm_gave_is_named() -> None:
    refuse_other_gpus([described(8, 8), described(8, None)])
    with pytest.raises(MachineError, match=r"^n2: Slurm gave a step 8 GPUs, and it sees 7\. .*--exclude"):
        refuse_other_gpus([described(8, 8), described(7, 8)])
