from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.launch import local
from perfsuite.node.machine import gpu_machine
from tests.samples import (
    make_case,
)
from tests.session.making import make_session


def test_a_machine_with_gpus_is_a_cpu_machine_for_a_cpu_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = gpu_machine(["NVIDIA H100 80GB HBM3"], count=8, memory_bytes=2**36, driver=None)
    monkeypatch.setattr(local, "detect", lambda: gpus)
    ours = make_session(tmp_path)
    assert ours.setup.host.machine_for(make_case(hardware="cpu")).device == "cpu"
    assert ours.setup.host.machine_for(make_case(hardware=("cpu", "h100"))) == gpus
    assert ours.setup.host.machine_for(make_case(hardware="a100")) == gpus
    assert "this machine is h100-80gb-sxm" in str(ours.skip_reason(make_case(hardware="a100")))
    assert ours.skip_reason(make_case(hardware="cpu")) is None
