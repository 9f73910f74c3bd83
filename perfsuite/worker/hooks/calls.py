"""Detect stalls. Also detect work that torch's dispatcher does not see. Uses only public names."""

import contextlib
import functools
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch

from perfsuite.results.rank_report import REPLAYED
from perfsuite.worker.hooks.named import wrap_method

BUFFERS = ("Buffer", "HybridEPBuffer", "ElasticBuffer")  # names of DeepEP's classes
# Prefixes of the names of the methods with which these classes communicate.
SENDS = ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine")

STALLING = (  # functions that make the host wait for the device, or that training does not need
    "torch.cuda.synchronize",
    "torch.cuda.Event.synchronize",
    "torch.cuda.Stream.synchronize",
    "torch.accelerator.synchronize",
    "torch.accelerator.empty_cache",
    "torch.accelerator.memory.empty_cache",
    "torch.cuda.empty_cache",
    "torch.cuda.memory.empty_cache",
    "gc.collect",
)

seen: Counter[str] = Counter()  # message about hidden work -> number of calls that caused it since `watch`
started_threads = 0  # number of Python threads started since `watch`, without those of perfsuite
stalls: Counter[str] = Counter()  # function in `STALLING` -> number of its calls since `watch`


def watch() -> None:
    """Notice replays of CUDA graphs, stalls, and started threads.

    Call this before a script imports one of the watched functions by name.
    """
    _notice(torch.cuda.CUDAGraph, "replay", REPLAYED)
    for function in STALLING:
        owner, _, name = function.rpartition(".")
        with contextlib.suppress(AttributeError, ImportError):  # an older torch has fewer functions
            _notice(resolve_name(owner), name, function, stalls)
    if not hasattr(threading.Thread.start, "is_watched"):
        before(threading.Thread, "start", _count_thread)


def _count_thread(thread: threading.Thread) -> None:
    global started_threads
    if not str(thread.name).startswith("perfsuite"):
        started_threads += 1


def watch_packages() -> None:
    """Notice messages of packages that communicate without torch, if these packages are already imported."""
    package = sys.modules.get("deep_ep")
    for kind in (getattr(package, name, object) for name in BUFFERS):
        for name, method in [*vars(kind).items()]:
            if name.startswith(SENDS) and inspect.isfunction(method):
                _notice(kind, name, f"DeepEP's {name} was called, and its messages are not counted")


def _notice(owner: Any, name: str, said: str, counter: Counter[str] = seen) -> None:
    def look(*args: Any, **kwargs: Any) -> None:
        counter[said] += 1

    if not hasattr(getattr(owner, name), "is_watched"):
        before(owner, name, look)


def before(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Call `look` before each call of a function, with the same arguments.

    The wrapped function has the attribute `is_watched`. In code that dynamo compiles, the original function
    is called directly.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            look(*args, **kwargs)
            return original(*args, **kwargs)

        watched.is_watched = True  # type: ignore[attr-defined]
        watched._torchdynamo_inline = original  # type: ignore[attr-defined]
        return watched

    wrap_method(owner, name, wrap)
