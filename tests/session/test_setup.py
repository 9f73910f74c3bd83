from __future__ import annotations

from typing import Any

import pytest

from perfsuite.launch import local
from perfsuite.node.machine import gpu_machine
from tests.samples import make_case, never_run
from tests.session.making import Sessions


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "wait"),
        ({"wait_quiet_s": 0}, "again"),
        ({"allow_shared": True}, "stop"),
        ({"allow_shared": True, "wait_quiet_s": 0}, "stop"),
    ],
)
def test_what_is_done_about_others_follows_from_the_options(
    sessions: Sessions, options: dict[str, Any], expected: str
) -> None:
    assert sessions.make(**options).setup.options.when_shared == expected


@pytest.mark.parametrize("strict", [frozenset[str](), frozenset({"improved"}), frozenset({"inconclusive"})])
def test_which_outcomes_fail(sessions: Sessions, strict: frozenset[str]) -> None:
    options = sessions.make(strict=strict).setup.options
    for outcome in ("regressed", "failed", "passed", "unhealthy", "improved", "inconclusive"):
        result = never_run().replace(verdict=never_run().verdict.replace(outcome=outcome))
        assert options.is_failing(result) is (outcome in {"regressed", "failed", *strict})


def test_a_machine_with_gpus_is_a_cpu_machine_for_a_cpu_case(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = gpu_machine(["NVIDIA H100 80GB HBM3"], count=8, memory_bytes=2**36, driver=None)
    monkeypatch.setattr(local, "detect", lambda: gpus)
    ours = sessions.make()
    assert ours.setup.host.machine_for(make_case(hardware="cpu")).device == "cpu"
    assert ours.setup.host.machine_for(make_case(hardware=("cpu", "h100"))) == gpus
    assert ours.setup.host.machine_for(make_case(hardware="a100")) == gpus
    assert "this machine is h100-80gb-sxm" in str(ours.skip_reason(make_case(hardware="a100")))
    assert ours.skip_reason(make_case(hardware="cpu")) is None
