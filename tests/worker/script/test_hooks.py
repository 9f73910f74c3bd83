"""Test that no error of perfsuite reaches a script. Each function of perfsuite is made to fail once.

A tracer finds the functions that run during a training, so that no new hook is forgotten.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import perfsuite
from perfsuite import documents
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.results.rank_report import RankReport
from perfsuite.worker.clock.collector import CollectorClock
from perfsuite.worker.clock.timers import HostTimer
from perfsuite.worker.counting.steps import warm_up
from perfsuite.worker.observation import observe  # noqa: F401  imported before it is seen
from perfsuite.worker.script import attach  # noqa: F401  imported before it is seen
from perfsuite.worker.script.attach import Attached, Measured
from tests.worker.attaching import ALONE, Unprobed, attaching

OURS = str(Path(perfsuite.__file__).parent)
STEPS = COUNTED_STEP + 3
CASE = ALONE.model_copy(update={"max_warmup_steps": COUNTED_STEP, "steps": 3})  # users' cases need more steps
GUARDS = {
    "_guarded.<locals>.guarded",
    "_Hook.__call__",
    "before.<locals>.wrap.<locals>.watched",
    "LiveMemory._see_storage.<locals>.<lambda>",
    "LiveMemory._died",
    "LiveMemory._see_collector",
    "_clips",
    "_show",
    "_notice_backward.<locals>.watched",
    "_notice_passes_with_graph.<locals>.watched",
    "CollectorClock._see",
    "Collector.collect",
    "PythonCounter._collection_begins",
    "PythonCounter._collection_ends",
}
"""Functions that cannot fail. Everything in them is in a `try`, or in another one of these functions.
`_see_collector` only stores the number of a thread."""


class IdleBetweenSteps(Unprobed):
    """A rank whose probe after each step takes no time."""

    def build(self, timer: HostTimer, **how: Any) -> None:
        super().build(timer, **{**how, "probe": lambda: None})


def train() -> list[float]:
    """Train like a script, for as many steps as are measured. Return the loss of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    losses = []
    try:
        for _ in range(STEPS):
            loss = (model(torch.ones(2, 4)) - 1).square().mean()
            loss.backward()
            losses.append(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()
    except Measured:
        assert len(losses) == STEPS
    assert not model._forward_hooks
    assert not model[0]._forward_pre_hooks
    return losses


@contextmanager
def calls(seen: Callable[[CodeType], object]) -> Iterator[None]:
    """Call `seen` for each function of perfsuite that is called.

    If `seen` raises an error, that function raises it, and no further function is seen.
    """

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            seen(frame.f_code)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def attached(directory: Path, seen: Callable[[CodeType], object]) -> tuple[list[float], RankReport | None]:
    """Return the losses of the script when it is measured, and its report."""
    with attaching(directory) as start:
        measured: Attached = start(CASE, new_rank=IdleBetweenSteps)
        with calls(seen):
            losses = train()
            measured.exits()
    return losses, documents.read_or_none(measured.run_dir.rank(0), RankReport)


@pytest.mark.parametrize(
    "every",
    [pytest.param(1, marks=pytest.mark.nightly, id="each function"), pytest.param(10, id="every tenth")],
)
def test_no_error_of_ours_reaches_the_training(
    every: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    warm_up()  # work that is done once per process cannot fail a second time
    gc.freeze()  # otherwise each collection takes a tenth of a second, here and in later tests
    thresholds = gc.get_threshold()
    request.addfinalizer(lambda: gc.set_threshold(*thresholds))
    gc.set_threshold(10**9)  # otherwise it would depend on chance which functions a collection runs in a step
    alone = train()
    attached(tmp_path / "warm", lambda code: None)  # imports what a measured training needs
    codes: dict[CodeType, None] = {}
    losses, report = attached(
        tmp_path / "seen", lambda code: code.co_qualname in GUARDS or codes.setdefault(code)
    )
    assert losses == alone
    assert report is not None
    assert (report.failure, report.notes) == (None, ())
    assert report.counts is not None
    wrong = {}
    for number, code in enumerate([*codes][::every]):
        try:
            problem = failing(code, tmp_path / str(number), alone)
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            wrong[f"{Path(code.co_filename).stem}.{code.co_qualname}:{code.co_firstlineno}"] = problem
    assert not wrong
    assert len(codes) > 300


def failing(code: CodeType, directory: Path, alone: list[float]) -> str | None:
    """Return what goes wrong if the first call of this function fails, or None."""

    def fail(called: CodeType) -> None:
        if called is code:
            raise LookupError("a fault of ours")

    losses, report = attached(directory, fail)
    if losses != alone:
        return "another training"
    is_timed = any(
        isinstance(getattr(callback, "__self__", None), CollectorClock) for callback in gc.callbacks
    )
    if is_timed or _get_current_dispatch_mode() is not None:
        gc.callbacks.clear()
        return "something of ours is left"
    if report is None:
        return "no report"
    messages = [*report.notes, *([] if report.failure is None else [report.failure.message])]
    return None if any("a fault of ours" in message for message in messages) else f"told only {messages}"
