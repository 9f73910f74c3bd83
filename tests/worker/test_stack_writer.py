from __future__ import annotations

import faulthandler
import os
from pathlib import Path

import pytest

from perfsuite.results.run_dir import STACKS_SIGNAL, RunDir
from perfsuite.worker import stack_writer


@pytest.mark.parametrize("rank", [None, 3])
def test_who_listens_writes_its_stacks_each_time_it_is_asked(tmp_path: Path, rank: int | None) -> None:
    stack_writer.listen(RunDir(tmp_path), rank)
    try:
        file = RunDir(tmp_path).stacks(rank, os.getpid())
        assert file.read_text() == ""
        os.kill(os.getpid(), STACKS_SIGNAL)
        once = file.read_text()
        assert "test_who_listens_writes_its_stacks_each_time_it_is_asked" in once
        os.kill(os.getpid(), STACKS_SIGNAL)
        assert len(file.read_text()) > len(once)
    finally:
        faulthandler.unregister(STACKS_SIGNAL)
