"""Test that launches of DeepSpeed are forked from a process that has imported it."""

import os
from pathlib import Path

import pytest

from perfsuite import DeepSpeed
from tests.repository.test_warm import ENVIRONMENT, asked_for
from tests.warm import kind_of


@pytest.mark.usefixtures("deepspeed")
def test_deepspeed_forks_from_its_own_server(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "PYTHONPATH": os.environ["PYTHONPATH"]}
    assert kind_of(asked_for(tmp_path, DeepSpeed(config={})), environment) == "deepspeed"
