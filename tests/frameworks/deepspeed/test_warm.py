"""Test that launches of DeepSpeed are forked from a process that has imported it."""

from pathlib import Path

import pytest

from perfsuite import DeepSpeed
from tests.repository.test_warm import kind_of_agent


@pytest.mark.usefixtures("deepspeed")
def test_deepspeed_forks_from_its_own_server(tmp_path: Path) -> None:
    assert kind_of_agent(tmp_path, DeepSpeed(config={})) == "deepspeed"
