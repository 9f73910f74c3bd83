"""Write the last collective calls of this process on request, even while its training hangs.

A thread waits for the request. Until the request arrives, the thread runs no Python code. It therefore costs
the training nothing, and does not appear in the counts. `perfsuite.node.processes` sends the request before
it ends a job that hangs.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import pickle
import socket
import sysconfig
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from perfsuite import documents
from perfsuite.frameworks.common import private
from perfsuite.results.collective_calls import CollectiveCall, CollectiveCallsFile, GroupCalls
from perfsuite.results.run_dir import NODE, RunDir
from perfsuite.worker.clock.startup_clock import PERFSUITE, Part
from perfsuite.worker.hooks.named import replace_everywhere

# Number of the newest calls to write for each group. The oldest call that is not done is written as well.
MOST_CALLS = 50
MOST_SIZES = 8  # maximum number of tensors per call whose sizes and dtypes are written
MOST_NAME = 80  # maximum length of a name that torch or the training has chosen
GLOO = "gloo"
OF_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
OF_LIBRARIES = tuple(
    f"{directory}{os.sep}"
    for directory in (
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        Path(__file__).parents[1],
    )
)
OF_HOOKS = f"{Path(__file__).parent}{os.sep}"  # our hooks wrap functions of torch, so they are in many stacks
# Modules outside of torch whose decorators wrap functions of torch, so these modules are in many stacks.
OF_DECORATORS = ("typing_extensions.py", "contextlib.py")


def watch(run_dir: RunDir) -> None:
    """Call `listen` as soon as this process has created its process group.

    `listen` is not called earlier, because a script that forks processes should not have an additional thread
    when it forks.
    """
    function = getattr(dist, "init_process_group", None)
    if function is None or hasattr(function, "is_recorded"):
        return

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        with Part(PERFSUITE):
            listen(run_dir)
        return result

    watched.is_recorded = True  # type: ignore[attr-defined]
    replace_everywhere(dist, "init_process_group", function, watched)


def listen(run_dir: RunDir) -> None:
    """Start the thread that waits for requests. Later calls in the same process have no effect.

    A forked child does not have its parent's thread. The child can start a thread of its own, because its
    socket has another address than the parent's.
    """
    # Ignore errors, because they must not end the training. The address is in use if this process listens
    # already. If there can be no socket or no thread, the calls of this process are unknown.
    with contextlib.suppress(OSError, RuntimeError), contextlib.ExitStack() as opened:
        requests = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        requests.bind(run_dir.request_address(os.getpid()))
        # Do not use `threading.Thread`. A script can list such threads, and starting one runs Python code.
        _thread.start_new_thread(_serve, (requests, run_dir))
        opened.pop_all()  # the thread keeps the socket open


def _serve(requests: socket.socket, run_dir: RunDir) -> None:
    # A script can close all its files, including this socket.
    with contextlib.suppress(OSError), requests:
        while requests.recv(1):
            with contextlib.suppress(Exception):  # if this fails, the hang is not explained
                documents.write(run_dir.collectives(os.getpid(), int(os.environ.get(NODE, "0"))), read())


def read() -> CollectiveCallsFile:
    """Return the last collective calls of this process, from torch's flight recorders."""
    entries: list[dict[str, Any]] = []
    for name in ("dump_flight_recorder", "dump_nccl_flight_recorder"):
        dump = private.or_none(name)
        if dump is not None:
            entries += pickle.loads(dump()).get("entries", [])
    return CollectiveCallsFile(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        groups=tuple(groups_of(entries, ranks_of_groups(), now_ns=time.time_ns())),
    )


def ranks_of_groups() -> dict[str, tuple[int, ...]]:
    """Return the global ranks of each process group of this process. The keys are torch's group names."""
    world = private.or_none("process_groups")
    groups = [] if world is None else list(world.pg_map)
    return {group.group_name: tuple(dist.get_process_group_ranks(group)) for group in groups}


def groups_of(
    entries: Iterable[Mapping[str, Any]], ranks: Mapping[str, tuple[int, ...]], *, now_ns: int
) -> list[GroupCalls]:
    """Return each group's calls from a flight recorder's entries. Groups with unknown ranks are left out."""
    collectives: dict[tuple[str, str, str], list[CollectiveCall]] = {}
    messages: dict[tuple[str, str, str], list[CollectiveCall]] = {}
    for entry in entries:
        backend, _, function = str(entry["profiling_name"]).partition(":")
        name, description = entry["process_group"]
        if name not in ranks:
            continue
        key = (backend, str(name), str(description))
        call = _call(entry, function or backend, is_gloo=backend == GLOO, now_ns=now_ns)
        earlier = collectives.setdefault(key, [])
        if not entry["is_p2p"]:
            if call.number == 1 and earlier and earlier[-1].number > 1:
                earlier.clear()  # the earlier calls belong to a destroyed group of the same name
            earlier.append(call)
        elif not call.is_done:
            messages.setdefault(key, []).append(call)
    return [
        GroupCalls(
            backend=backend,
            name=name,
            description=description[:MOST_NAME],
            ranks=ranks[name],
            calls=_newest(calls),
            open_messages=_newest(messages.get((backend, name, description), [])),
        )
        for (backend, name, description), calls in collectives.items()
    ]


def _newest(calls: list[CollectiveCall]) -> tuple[CollectiveCall, ...]:
    """Return the newest calls, and the oldest call that is not done.

    The oldest call is needed because another rank might not have made it.
    """
    kept = calls[-MOST_CALLS:]
    is_open = next((call for call in calls if not call.is_done), None)
    return tuple(kept if is_open is None or is_open in kept else [is_open, *kept])


def _call(entry: Mapping[str, Any], function: str, *, is_gloo: bool, now_ns: int) -> CollectiveCall:
    # gloo has no events, so its entries never become `completed`. They are `retired` when their work has
    # ended. NCCL's watchdog also retires calls that have timed out, so a retired call of NCCL is not
    # necessarily done.
    is_done = entry["state"] == "completed" or (is_gloo and bool(entry["retired"]))
    return CollectiveCall(
        number=int(entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]),
        name=function.removeprefix("_").removesuffix("_base")[:MOST_NAME],
        sizes=tuple(tuple(map(int, size)) for size in entry["input_sizes"][:MOST_SIZES]),
        dtypes=tuple(map(str, entry["input_dtypes"][:MOST_SIZES])),
        is_done=is_done,
        age_s=max(0.0, (now_ns - int(entry["time_created_ns"])) / 1e9),
        place=place_of(entry.get("frames", ())),
    )


def place_of(frames: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the place (file and line) from which the training has made a call.

    `frames` are the frames of the call, the innermost first. The place is the innermost frame in the
    training's own code. If there is none, it is the innermost frame outside of torch and perfsuite's hooks.
    If there is none either, torch alone made the call, and the result is None.
    """
    outside = [
        frame
        for frame in frames
        # A fork server runs the code of `python -c`, whose file name is `<string>`.
        if not str(frame["filename"]).startswith((OF_TORCH, OF_HOOKS, "<"))
        and Path(frame["filename"]).name not in OF_DECORATORS
    ]
    own = [frame for frame in outside if not str(frame["filename"]).startswith(OF_LIBRARIES)]
    for frame in own or outside:
        return f"{Path(frame['filename']).name}:{frame['line']}"
    return None
