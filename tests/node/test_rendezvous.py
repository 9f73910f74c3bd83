import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perfsuite.errors import LaunchError
from perfsuite.node import rendezvous
from perfsuite.results.run_dir import RunDir
from tests.node.conftest import Passing


def test_node_0_chooses_and_shares_a_port(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.endpoint.touch()
    with ThreadPoolExecutor() as pool, socket.socket() as listens, socket.socket() as another:
        other = pool.submit(lambda: rendezvous.meeting(run_dir, 1, 1).__enter__())
        with rendezvous.meeting(run_dir, 0, 1) as variables:
            assert other.result() == variables
            address = (variables["MASTER_ADDR"], int(variables["MASTER_PORT"]))
            with pytest.raises(OSError, match="Address already in use"):
                another.bind(("127.0.0.2", address[1]))  # on every address: torch listens on all of them
            listens.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listens.bind(address)
            listens.listen()
    assert address[0] == "127.0.0.1", "one node needs no name"


def test_other_nodes_learn_the_first_nodes_name(tmp_path: Path) -> None:
    with rendezvous.meeting(RunDir(tmp_path), 0, 2) as variables:
        assert variables["MASTER_ADDR"] == socket.gethostname()


@pytest.mark.parametrize("half", ["", "n1:29", None])
def test_waits_for_node_0_to_finish_writing(tmp_path: Path, passing: Passing, half: str | None) -> None:
    run_dir = RunDir(tmp_path)
    if half is not None:
        run_dir.endpoint.write_text(half)
    with pytest.raises(LaunchError, match=r"node 0 did not write the address .* within 300 s\. Did"):
        rendezvous.meeting(run_dir, 1, 2).__enter__()
    assert passing.seconds == pytest.approx(rendezvous.MEET_S, abs=1)
