"""Let the ranks of a job meet: the agent of node 0 chooses a port and publishes it in a file.

Ranks are assigned in the order of the nodes' numbers. torch's own rendezvous ("c10d") would put n10 before
n2.
"""

import contextlib
import socket
from collections.abc import Iterator

from perfsuite.errors import LaunchError
from perfsuite.node.processes import wait_until
from perfsuite.results.run_dir import RunDir

# Seconds within which node 0 must publish its port. On a shared file system, Python can start slowly.
MEET_S = 300


@contextlib.contextmanager
def meeting(run_dir: RunDir, node: int, nodes: int) -> Iterator[dict[str, str]]:
    """Yield MASTER_ADDR and MASTER_PORT, torch's environment variables for the rendezvous.

    Node 0 chooses a port that is free on every address, because torch listens on all addresses. Until the
    `with` block ends, the kernel does not give this port to another process that asks for any free port.

    Raises `LaunchError` if node 0 does not publish the port in time.
    """
    file = run_dir.endpoint
    if node > 0:
        if not wait_until(lambda: file.exists() and file.read_text().endswith("\n"), MEET_S):
            raise LaunchError(
                f"node 0 did not write the address of the rendezvous to {file} within {MEET_S} s. Did its "
                "agent start, and is the directory the same on every node?"
            )
        host, _, port = file.read_text().strip().rpartition(":")
        yield {"MASTER_ADDR": host, "MASTER_PORT": port}
        return
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
        # The name with which other nodes can reach this node.
        host = "127.0.0.1" if nodes == 1 else socket.gethostname()
        port = str(reserved.getsockname()[1])
        file.write_text(f"{host}:{port}\n")
        yield {"MASTER_ADDR": host, "MASTER_PORT": port}
