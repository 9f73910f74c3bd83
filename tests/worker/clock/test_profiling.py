"""Test what the profiler of a rank records, and that the cause of a slower step is named first."""

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from perfsuite import documents
from perfsuite.results.profile import PROFILED_STEPS, Profile, RankProfileFile, merged
from perfsuite.results.run_dir import RunDir
from perfsuite.verdict.profiled import compared
from perfsuite.worker.clock.profiling import ProfileTaken, Profiling
from tests.fake_group import alone

WARMUP = 2


def fused(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x)


class Attention(nn.Module):
    """A model with attention between two linear layers."""

    def __init__(self, attend: Callable[[Tensor], Tensor] = fused) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.after = nn.Linear(8, 8)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.attend(self.before(x)))
        return out


def taken(
    directory: Path, model: nn.Module | None = None, *, warmup: int = WARMUP, **limits: int
) -> Profiling:
    """Return the profiling after up to 20 steps. Like in a rank, the profiler is called between the steps.

    The profiler ends the training when it is done, unless the warm-up is too long.
    """
    profiling = Profiling(warmup=warmup, device="cpu", **limits)
    model = model or Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(ProfileTaken) if warmup == WARMUP else nullcontext():
        for number in range(1, 21):
            model(torch.ones(2, 1, 4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiling.boundary(number)
    assert number == min(warmup + PROFILED_STEPS + 2, 20)
    directory.mkdir(exist_ok=True)
    profiling.write(RunDir(directory), 0)
    return profiling


def profiled(directory: Path, model: nn.Module) -> Profile:
    assert not taken(directory, model).notes
    assert RunDir(directory).trace(0).exists()
    return documents.read(RunDir(directory).profile(0), RankProfileFile).profile


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Return the profile of an unchanged model.

    The profiler must not warn, because tests turn warnings into errors.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return profiled(tmp_path_factory.mktemp("usual") / "0", Attention())


def first_cause(before: Profile, now: Profile) -> str:
    return compared(merged({0: before}), merged({0: now}), "the baseline").calls[0]


def test_records_three_steps_after_warm_up(usual: Profile) -> None:
    assert usual.steps == PROFILED_STEPS
    assert not usual.unsteady
    assert (usual.calls()["aten::linear"], usual.calls()["Optimizer.step#SGD.step"]) == (2, 1)
    assert 0 < usual.split.optimizer_us < usual.split.step_us


def test_an_error_of_the_profiler_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training still ends after the same number of steps as on the other ranks."""
    monkeypatch.setattr(torch.profiler, "profile", Mock(side_effect=RuntimeError("no profiler here")))
    assert taken(tmp_path).notes == ["no profile: RuntimeError: no profiler here"]
    assert not list(tmp_path.iterdir())


def test_a_trace_that_is_too_large_is_only_kept(tmp_path: Path) -> None:
    (note,) = taken(tmp_path, largest_trace=1000).notes
    trace = RunDir(tmp_path).trace(0)
    assert note.startswith(f"no profile: ReportError: {trace} is kept, but too large ")
    assert list(tmp_path.iterdir()) == [trace]


def test_short_training_leaves_no_profile(tmp_path: Path) -> None:
    assert taken(tmp_path, warmup=30).notes == []
    assert not list(tmp_path.iterdir())


def copying(x: Tensor) -> Tensor:
    return fused(x).clone()


def reading(x: Tensor) -> Tensor:
    x[0, 0, 0, 0].item()
    return fused(x)


def eager(x: Tensor) -> Tensor:
    return (x @ x.transpose(-2, -1)).softmax(-1) @ x


@pytest.mark.parametrize(
    ("attend", "pattern"),
    [
        (copying, "(CloneBackward0|aten::clone) 0 -> 1 calls a step"),
        (reading, ".*0 -> 1 calls a step: the host reads a value"),
        (eager, "aten::bmm 0 -> .*"),
    ],
)
def test_the_cause_is_named_first(attend: Any, pattern: str, usual: Profile, tmp_path: Path) -> None:
    assert re.fullmatch(pattern, first_cause(usual, profiled(tmp_path / "slower", Attention(attend))))


def test_smaller_buckets_are_named_first(tmp_path: Path) -> None:
    with alone():
        one, several = (
            profiled(tmp_path / str(size), DistributedDataParallel(Attention(), bucket_cap_mb=size))
            for size in (25, 0.0001)
        )
    assert first_cause(one, several).startswith(("gloo:all_reduce 1 -> ", "c10d::allreduce_ 1 -> "))
