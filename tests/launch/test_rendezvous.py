from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perfsuite.errors import LaunchError
from perfsuite.launch import rendezvous
from perfsuite.results.run_dir import RunDir


def test_one_node_needs_no_name() -> None:
    assert rendezvous.host_name(1) == "127.0.0.1"
    assert rendezvous.host_name(2) == socket.gethostname()


def test_node_0_opens_a_store_that_the_others_are_told_of(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.endpoint.touch()
    with ThreadPoolExecutor() as pool:
        other = pool.submit(rendezvous.open_store, run_dir, 1, 1)
        endpoint, store = rendezvous.open_store(run_dir, 0, 1)
        assert other.result() == (endpoint, None)
    assert endpoint == f"127.0.0.1:{store.port}"
    with socket.create_connection(("127.0.0.1", store.port)):
        pass


@pytest.mark.parametrize("half", ["", "n1:29", None])
def test_what_node_0_has_not_told_in_full_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: str | None
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    run_dir = RunDir(tmp_path)
    if half is not None:
        run_dir.endpoint.write_text(half)
    with pytest.raises(LaunchError, match="node 0 has not told within 300 s where ranks meet"):
        rendezvous.read_endpoint(run_dir)
    assert sum(slept) == pytest.approx(rendezvous.MEET_S, abs=1)
