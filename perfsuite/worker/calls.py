"""Notices calls whose work torch's dispatcher does not see, for `worker.hidden`, by public names alone."""

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

BUFFERS = ("Buffer", "HybridEPBuffer", "ElasticBuffer")  # classes of DeepEP
SENDS = ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine")  # how methods begin that send

seen: Counter[str] = Counter()  # what was called in this process since `watch`, by what is said of it


def watch() -> None:
    """Notice CUDA graphs that are replayed. To be called before a script takes the method by its own name."""
    _notice(torch.cuda.CUDAGraph, "replay", "a CUDA graph was replayed, whose operators are not seen")


def watch_packages() -> None:
    """Notice what sends by itself, in packages that were imported meanwhile."""
    package = sys.modules.get("deep_ep")
    for kind in (getattr(package, name, object) for name in BUFFERS):
        for name, method in [*vars(kind).items()]:
            if name.startswith(SENDS) and inspect.isfunction(method):
                _notice(kind, name, f"DeepEP's {name} was called, whose messages are not counted")


def _notice(owner: Any, name: str, said: str) -> None:
    def look(*args: Any, **kwargs: Any) -> None:
        seen[said] += 1

    if not hasattr(getattr(owner, name), "is_watched"):
        before(owner, name, look)


def before(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Call `look` with the arguments before each call of a function, which then has `is_watched`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        return original(*args, **kwargs)

    watched.is_watched = True  # type: ignore[attr-defined]
    setattr(owner, name, watched)
