"""No error of ours reaches a script: each function of ours that its training runs is made to fail once.

The functions are those that a tracer sees, so that a new hook cannot be forgotten.
"""

from __future__ import annotations

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
from perfsuite.errors import FileError
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run_dir import RunDir
from perfsuite.worker import attach, observe, timers  # noqa: F401  imported before it is seen
from perfsuite.worker.attach import Measured
from perfsuite.worker.counting import warm_up
from perfsuite.worker.script_rank import ScriptRank
from tests.worker.attaching import ALONE, attaching

OURS = str(Path(perfsuite.__file__).parent)
CASE = ALONE.replace(max_warmup_steps=COUNTED_STEP)
STEPS = CASE.total_steps
GUARDS = {
    "_guarded.<locals>.guarded",
    "SecondStep._hook.<locals>.run",
    "before.<locals>.watched",
    "LiveMemory._see_storage.<locals>.<lambda>",
    "LiveMemory._died",
}
"""Functions that cannot fail: all that they do is in a `try`, or in another one of these."""


def train() -> list[float]:
    """A script: more steps than are measured, each with its loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    try:
        for _ in range(STEPS):
            loss = (model(torch.ones(2, 4)) - 1).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    except Measured:
        assert len(losses) == STEPS
    hooks = [*model._forward_hooks.values(), *model[0]._forward_pre_hooks.values()]
    assert not hooks
    return losses


@contextmanager
def calls(seen: Callable[[CodeType], object]) -> Iterator[None]:
    """Call `seen` for each function of perfsuite that is called; what it raises, that function raises."""

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            seen(frame.f_code)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def name(code: CodeType) -> str:
    return f"{Path(code.co_filename).stem}.{code.co_qualname}:{code.co_firstlineno}"


def report_of(run_dir: RunDir) -> RankReport | None:
    try:
        return documents.read(run_dir.rank(0), RankReport)
    except FileError:
        return None


def test_an_error_in_a_function_of_ours_never_reaches_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptRank, "probed", lambda rank: {})
    warm_up()  # what is done once in a process cannot fail a second time
    gc.freeze()  # so that a collection takes no tenth of a second, neither here nor in later tests
    monkeypatch.setattr(timers, "cpu_probe", lambda: lambda: None)
    alone = train()
    codes: dict[CodeType, None] = {}
    with attaching(tmp_path / "seen") as start:
        attached = start(CASE)
        with calls(lambda code: code.co_qualname in GUARDS or codes.setdefault(code)):
            assert train() == alone
            attached.exits()
    report = report_of(attached.run_dir)
    assert report is not None
    assert (report.failure, report.notes) == (None, ())
    assert report.counts is not None
    wrong = []
    for number, code in enumerate(codes):
        try:
            told = failing(code, tmp_path / str(number), alone)
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        if told is not None:
            wrong.append(f"{name(code)}: {told}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(codes)} functions:", *wrong])
    assert len(codes) > 100


def failing(code: CodeType, directory: Path, alone: list[float]) -> str | None:
    """What is wrong when this function fails the first time that it is called."""

    def fail(called: CodeType) -> None:
        if called is code:
            raise LookupError("a fault of ours")

    with attaching(directory) as start:
        attached = start(CASE)
        with calls(fail):
            losses = train()
            attached.exits()
    if losses != alone:
        return "another training"
    if not gc.isenabled() or _get_current_dispatch_mode() is not None:
        gc.enable()
        return "something of ours is left"
    report = report_of(attached.run_dir)
    if report is None:
        return "no report"
    told = [*report.notes, *([] if report.failure is None else [report.failure.message])]
    return None if any("a fault of ours" in each for each in told) else f"told only {told}"
