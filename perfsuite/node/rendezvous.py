"""Where the ranks of a job meet: node 0's agent chooses a port and passes it to the others in a file.

Ranks follow the order of the nodes' numbers; torch's "c10d" rendezvous would put n10 before n2.
"""

import contextlib
import socket
from collections.abc import Iterator

from perfsuite.errors import LaunchError
from perfsuite.node.processes import wait_until
from perfsuite.results.run_dir import RunDir

MEET_S = 300  # seconds that node 0 has to publish its port: Python may start slowly on a shared file system


@contextlib.contextmanager
def meeting(run_dir: RunDir, node: int, nodes: int) -> Iterator[dict[str, str]]:
    """Yield MASTER_ADDR and MASTER_PORT, torch's environment variables for the rendezvous.

    Node 0 chooses a port that is free on every address, because torch listens on all of them. Until the
    `with` ends, the kernel does not give it to anyone who requests any free port.

    Raises `LaunchError` if node 0 does not publish the port in time.
    """
    file = run_dir.endpoint
    if node > 0:
        if not wait_until(lambda: file.exists() and file.read_text().endswith("\n"), MEET_S):
            raise LaunchError(
                f"node 0 has not reported within {MEET_S} s where ranks meet ({file}): did its agent start, "
                "and is the directory the same on every node?"
            )
        host, _, port = file.read_text().strip().rpartition(":")
        yield {"MASTER_ADDR": host, "MASTER_PORT": port}
        return
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
        # The name under which the other nodes reach this one.
        host = "127.0.0.1" if nodes == 1 else socket.gethostname()
        port = str(reserved.getsockname()[1])
        file.write_text(f"{host}:{port}\n")
        yield {"MASTER_ADDR": host, "MASTER_PORT": port}
