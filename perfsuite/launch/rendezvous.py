"""Where the ranks of a job meet: the agent of node 0 opens a port and tells it to the others by a file.

Imports torch only inside functions. The order of ranks is that of the nodes' numbers: torch's "c10d"
rendezvous sorts nodes by the text of their addresses instead, by which n10 comes before n2.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

from perfsuite.errors import LaunchError
from perfsuite.results.run_dir import RunDir

MEET_S = 300
"""Seconds in which every node must have joined: importing torch from a shared file system takes long."""
POLL_S = 0.05


def host_name(nodes: int) -> str:
    """Return the name by which the other nodes reach this one; one node alone need not be reached."""
    return "127.0.0.1" if nodes == 1 else socket.gethostname()


def open_store(run_dir: RunDir, node: int, nodes: int) -> tuple[str, Any]:
    """Return where the nodes meet, as `HOST:PORT`, and on node 0 torch's store that listens there.

    The store must be kept as long as ranks need it. Torch's static rendezvous joins it in this process.
    Raises `LaunchError` if node 0 tells nothing in time.
    """
    if node > 0:
        return read_endpoint(run_dir), None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host = host_name(nodes)
    store = TCPStore(
        host,
        0,
        nodes,
        is_master=True,
        timeout=timedelta(seconds=MEET_S),
        wait_for_workers=False,
        multi_tenant=True,
    )
    endpoint = f"{host}:{store.port}"
    tell_endpoint(run_dir, endpoint)
    return endpoint, store


def tell_endpoint(run_dir: RunDir, endpoint: str) -> None:
    """Tell the other nodes where ranks meet."""
    run_dir.endpoint.write_text(f"{endpoint}\n")


def read_endpoint(run_dir: RunDir) -> str:
    """Return what node 0 told. Raises `LaunchError` if it tells nothing for `MEET_S` seconds."""
    until = time.monotonic() + MEET_S
    while time.monotonic() < until:
        text = run_dir.endpoint.read_text() if run_dir.endpoint.exists() else ""
        if text.endswith("\n"):
            return text.strip()
        time.sleep(POLL_S)
    raise LaunchError(
        f"node 0 has not told within {MEET_S} s where ranks meet ({run_dir.endpoint}): did its agent start, "
        "and is the directory the same on every node?"
    )
