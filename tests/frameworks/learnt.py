"""Helper: train a case in one process with a plain loop, for comparison with launches of the case."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from perfsuite.case.case import Case
from perfsuite.frameworks.common import float8
from perfsuite.frameworks.common.model import COMPUTE_DTYPES, build_model, build_optimizer, synthetic_batches
from perfsuite.results.counts import COUNTED_STEP
from perfsuite.results.run import Run
from tests.fake_group import CPU


@dataclass(frozen=True)
class Learnt:
    loss: Sequence[float]
    """The loss of each step, as the mean over all data-parallel ranks."""
    gradient_norm: float | None
    """The norm of the gradients in the step that a launch counts."""


@cache
def learnt(case: Case, *, data_ranks: int = 2) -> Learnt:
    """Train with AdamW on the tokens of this many ranks, in float8 if the framework of `case` uses it."""
    model = build_model(case, CPU)
    float8.convert(getattr(case.framework, "float8", None), model, CPU)
    optimizer = build_optimizer(case, model)
    batches = [itertools.cycle(synthetic_batches(case, rank, CPU)) for rank in range(data_ranks)]
    dtype = COMPUTE_DTYPES[case.precision]
    parts = case.gradient_accumulation * data_ranks
    losses = []
    norm = None
    for step in range(1, case.total_steps + 1):
        shares = []
        for tokens in (next(own) for own in batches * case.gradient_accumulation):
            with torch.autocast("cpu", dtype, enabled="mixed" in case.precision):
                share = model(input_ids=tokens, labels=tokens).loss / parts
            share.backward()
            shares.append(float(share.detach()))
        losses.append(sum(shares))
        if step == COUNTED_STEP:
            squares = (
                parameter.grad.square().sum()
                for parameter in model.parameters()
                if parameter.grad is not None
            )
            norm = float(sum(squares)) ** 0.5
        optimizer.step()
        optimizer.zero_grad()
    return Learnt(losses, norm)


def check_learnt(run: Run, case: Case) -> None:
    """Check that `run` has the losses that `case` learns in a plain loop.

    If gradients are counted, their norm must agree as well.
    """
    plain = learnt(case)
    is_counted = case.max_warmup_steps >= COUNTED_STEP
    assert run.loss == pytest.approx(plain.loss, rel=1e-4)
    norm = pytest.approx(plain.gradient_norm, rel=1e-4) if is_counted else None
    assert run.figures.gradient_norm == norm
