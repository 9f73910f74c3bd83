"""Helper: attach the measurement to this process, as `perfsuite.worker.startup` does in a script's."""

import gc
import importlib.metadata
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from perfsuite import Case, Model, Script, Topology
from perfsuite.case.case import CaseFile
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import leash
from perfsuite.worker.observation import scalers
from perfsuite.worker.script import attach
from perfsuite.worker.script.attach import Attached
from perfsuite.worker.script.script_rank import ScriptRank
from perfsuite.worker.spans import phases, running
from tests.samples import make_case

ALONE = make_case(
    model=Model.named("net"),
    framework=Script(path="train.py"),
    topology=Topology(processes_per_node=1),
    max_warmup_steps=2,
    steps=10,
)
Start = Callable[..., Attached]
# The installed packages do not change during the tests, and reading them takes half a second.
providers = cache(importlib.metadata.packages_distributions)
version = cache(importlib.metadata.version)


class Unprobed(ScriptRank):
    """A rank whose device is not probed."""

    def probed(self) -> dict[str, float]:
        return {}


@contextmanager
def attaching(directory: Path) -> Iterator[Start]:
    """Yield a function that attaches the measurement of a case to this process. All is undone afterwards.

    The keyword arguments of that function change the request after the attachment.
    """
    handles: list[Any] = []
    collector_callbacks = [*gc.callbacks]

    def hooking(register: Any) -> Any:
        return lambda hook: handles.append(register(hook))

    def start(
        case: Case = ALONE, *, new_rank: Callable[..., ScriptRank] = ScriptRank, **later: Any
    ) -> Attached:
        run_dir = RunDir(directory / "launch-1")
        run_dir.path.mkdir(parents=True, exist_ok=True)
        request = CaseFile(case=case, device="cpu", counts=case.max_warmup_steps >= COUNTED_STEP)
        attached = Attached(run_dir, request, new_rank=new_rank)
        attached.request = request.replace(**later)
        return attached

    with pytest.MonkeyPatch.context() as patched:
        for name in ("register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"):
            patched.setattr(attach, name, hooking(getattr(attach, name)))
        for owner, name in (
            *((torch.autograd, "backward"), (torch.cuda.CUDAGraph, "replay")),
            *((DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__")),
            *((_MapDatasetFetcher, "fetch"), (_IterableDatasetFetcher, "fetch")),
        ):
            patched.setattr(owner, name, getattr(owner, name))
        for name in ("__init__", "scale", "step"):
            patched.setattr(torch.amp.GradScaler, name, getattr(torch.amp.GradScaler, name))
        patched.setattr(scalers, "_skipped", scalers._skipped)
        for name in ("save", "load"):
            for owner in (torch, torch.serialization):
                patched.setattr(owner, name, getattr(owner, name))
        patched.setattr(phases, "spans", None)
        patched.setattr(running, "LOOKS_EVERY_S", 0.01)  # the thread ends after its next look
        patched.setattr(sys, "meta_path", [*sys.meta_path])
        # The tests' own objects are frozen (conftest.py), but none of them belongs to a script.
        patched.setattr(gc, "get_freeze_count", lambda: 0)
        patched.setattr(importlib.metadata, "packages_distributions", providers)
        patched.setattr(importlib.metadata, "version", version)
        for owner, name in ((leash, "die_with_parent"), (leash, "listen"), (signal, "alarm")):
            patched.setattr(owner, name, lambda *args: None)
        patched.delenv("RANK", raising=False)
        try:
            yield start
        finally:
            if phases.spans is not None:
                phases.spans.stop_reporting()
            for handle in handles:
                handle.remove()
            gc.callbacks[:] = collector_callbacks  # a script that ends early would take its callbacks with it
