import _thread
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from perfsuite import documents
from perfsuite.frameworks.common import private
from perfsuite.results.collective_calls import CollectiveCallsFile
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import flight_recorder
from perfsuite.worker.flight_recorder import GLOO, MOST_CALLS, groups_of, place_of
from perfsuite.worker.hooks.named import replace_everywhere
from tests.fake_group import alone
from tests.processes import wait_until

SECOND = 10**9


def entry(number: int = 1, **changes: Any) -> dict[str, Any]:
    """Return an entry like one of torch 2.13."""
    return {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[7, 2]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "retired": True,
        "is_p2p": False,
        "time_created_ns": 100 * SECOND,
        "frames": [{"filename": "/home/me/train.py", "line": 22, "name": "step"}],
        **changes,
    }


def read(*entries: dict[str, Any]) -> Any:
    return groups_of(entries, {"0": (0, 1)}, now_ns=218 * SECOND)


def test_reads_a_call_of_nccl() -> None:
    [group] = read(entry(57, state="scheduled", retired=False, profiling_name="nccl:_all_gather_base"))
    assert (group.backend, group.name, group.description, group.ranks) == ("nccl", "0", "default_pg", (0, 1))
    [call] = group.calls
    assert (call.number, call.name, call.is_done, call.age_s) == (57, "all_gather", False, 118)
    assert (call.sizes, call.dtypes, call.place) == (((7, 2),), ("Float",), "train.py:22")


@pytest.mark.parametrize(
    ("backend", "state", "retired", "is_done"),
    [
        ("nccl", "completed", False, True),
        ("nccl", "started", False, False),
        ("nccl", "started", True, False),  # the collective has timed out
        ("gloo", "scheduled", True, True),
        ("gloo", "scheduled", False, False),
    ],
)
def test_each_backend_has_its_sign_of_the_end(backend: str, state: str, retired: bool, is_done: bool) -> None:
    [group] = read(entry(profiling_name=f"{backend}:barrier", state=state, retired=retired))
    assert [call.is_done for call in group.calls] == [is_done]


def test_only_open_messages_are_kept() -> None:
    message: dict[str, Any] = {"is_p2p": True, "p2p_seq_id": 4, "profiling_name": "nccl:recv 0<-1"}
    [group] = read(entry(**message), entry(**message, state="scheduled"))
    assert group.calls == ()
    assert [(call.number, call.name) for call in group.open_messages] == [(4, "recv 0<-1")]


def test_groups_of_unknown_ranks_are_left_out() -> None:
    assert read(entry(process_group=("7", "mesh_dp"))) == []


def test_calls_of_a_destroyed_group_are_left_out() -> None:
    [group] = read(entry(5), entry(6), entry(1), entry(2), entry(2))
    assert [call.number for call in group.calls] == [1, 2, 2]


def test_backends_of_a_group_count_apart() -> None:
    groups = read(entry(3), entry(1, profiling_name="gloo:broadcast"))
    assert [(group.backend, group.calls[0].number) for group in groups] == [("nccl", 3), (GLOO, 1)]


def test_keeps_the_newest_calls_and_the_open_one() -> None:
    [group] = read(
        *(entry(number, state="scheduled" if number == 3 else "completed") for number in range(200))
    )
    assert [call.number for call in group.calls] == [3, *range(200 - MOST_CALLS, 200)]


def test_the_place_is_in_the_training_code() -> None:
    of_torch = {
        "filename": f"{flight_recorder.OF_TORCH}distributed/c10d.py",
        "line": 1,
        "name": "all_reduce",
    }
    of_library = {"filename": f"{flight_recorder.OF_TORCH[:-1]}titan/trainer.py", "line": 2, "name": "step"}
    decorator = {"filename": "/lib/typing_extensions.py", "line": 3, "name": "wrapper"}
    own = {"filename": "/home/me/train.py", "line": 4, "name": "step"}
    server = {"filename": "<string>", "line": 1, "name": "<module>"}
    assert place_of([of_torch, decorator, of_library, own, server]) == "train.py:4"
    assert place_of([of_torch, decorator, of_library, server]) == "trainer.py:2"
    hook = {"filename": f"{flight_recorder.OF_HOOKS}counting/gradients.py", "line": 199, "name": "watched"}
    loop = {"filename": f"{Path(flight_recorder.__file__).parents[1]}/frameworks/common/loop.py", "line": 5}
    assert place_of([of_torch, hook, loop, server]) == "loop.py:5"
    assert place_of([of_torch, hook]) is None
    assert place_of([of_torch]) is None
    assert place_of([]) is None


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    """Return a directory. A thread that listens for requests in it ends with the test."""
    monkeypatch.setattr(flight_recorder, "_listening", 0)
    run_dir = RunDir(tmp_path)
    yield run_dir
    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):  # nothing listens
        send(run_dir, b"")


def send(run_dir: RunDir, request: bytes) -> None:
    """Send a request to the thread that listens. An empty request ends the thread."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as requests:
        requests.sendto(request, run_dir.request_address(os.getpid()))


def ask(run_dir: RunDir) -> CollectiveCallsFile:
    send(run_dir, b"?")
    file = run_dir.collectives(os.getpid())
    wait_until(file.exists, "the calls")
    return documents.read(file, CollectiveCallsFile)


def test_writes_its_calls_when_asked(run_dir: RunDir) -> None:
    with alone():
        flight_recorder.listen(run_dir)
        dist.all_reduce(torch.ones(3))
        line = sys._getframe().f_lineno - 1
        # The recorder learns in another thread that a call has ended.
        wait_until(lambda: ask(run_dir).groups[0].calls[-1].is_done, "the end of the call")
        [group] = ask(run_dir).groups
    call = group.calls[-1]
    assert (call.name, call.sizes) == ("all_reduce", ((3,),))
    assert call.place == f"{Path(__file__).name}:{line}"
    assert group.ranks == (0,)


def test_starts_one_thread_that_python_does_not_list(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(_thread, "start_new_thread", lambda *what: started.append(what))
    before = threading.active_count()
    flight_recorder.listen(run_dir)
    flight_recorder.listen(run_dir)
    assert len(started) == 1
    assert threading.active_count() == before
    monkeypatch.setattr(os, "getpid", lambda: 1)
    flight_recorder.listen(run_dir)
    assert len(started) == 2, "a forked child does not have its parent's thread"
    for _, (requests, *_) in started:
        requests.close()


def test_an_address_in_use_ends_nothing(run_dir: RunDir) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(run_dir.request_address(os.getpid()))
        flight_recorder.listen(run_dir)


def test_a_closed_socket_ends_the_thread(run_dir: RunDir) -> None:
    closed = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    closed.close()
    flight_recorder._serve(closed, run_dir, flight_recorder.read)


def test_an_error_does_not_end_the_thread(tmp_path: Path) -> None:
    failing = iter((True, False))
    answer = CollectiveCallsFile(rank=0, world_size=1)

    def read_calls() -> CollectiveCallsFile:
        if next(failing):
            raise RuntimeError("the process group is gone")
        return answer

    run_dir = RunDir(tmp_path)
    sending, receiving = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with sending:
        for request in (b"?", b"?", b""):
            sending.send(request)
        flight_recorder._serve(receiving, run_dir, read_calls)
    assert documents.read(run_dir.collectives(os.getpid()), CollectiveCallsFile) == answer


@pytest.fixture
def _watched(run_dir: RunDir) -> Iterator[None]:
    function = dist.init_process_group
    flight_recorder.watch(run_dir)
    yield
    replace_everywhere(dist, "init_process_group", dist.init_process_group, function)


@pytest.mark.usefixtures("_watched")
def test_listens_once_a_process_group_exists(run_dir: RunDir) -> None:
    with pytest.raises(ConnectionRefusedError):  # nothing listens
        send(run_dir, b"?")
    with alone():
        assert ask(run_dir).world_size == 1


@pytest.mark.usefixtures("_watched")
def test_watches_a_process_group_once(run_dir: RunDir) -> None:
    wrapped = dist.init_process_group
    flight_recorder.watch(run_dir)
    assert dist.init_process_group is wrapped


def test_without_flight_recorders_calls_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dump_flight_recorder", "dump_nccl_flight_recorder"):
        owner, private_name = private.place(name)
        monkeypatch.delattr(owner, private_name, raising=False)
    with alone():
        dist.all_reduce(torch.ones(3))
        assert flight_recorder.read() == CollectiveCallsFile(rank=0, world_size=1)


def test_without_torchs_groups_their_ranks_are_unknown() -> None:
    assert flight_recorder.ranks_of_groups(None) == {}
