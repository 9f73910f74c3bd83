"""What the profiler of a rank records, and that each cause of a slower step is named first."""

import re
import warnings
from collections.abc import Callable
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
from perfsuite.worker import profiling as profiling_module
from perfsuite.worker.profiling import ProfileTaken, Profiling
from tests.fake_group import alone

WARMUP = 2
ENOUGH = WARMUP + PROFILED_STEPS + 2


def fused(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x)


class Attention(nn.Module):
    """Two layers with an attention between them."""

    def __init__(self, attend: Callable[[Tensor], Tensor] = fused) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.attend(self.before(x)))
        return out


def train(profiling: Profiling, model: nn.Module, steps: int = ENOUGH) -> int:
    """Train with the profiler between steps, as a rank does. Returns how many it took until it was over."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(1, steps + 1):
        model(torch.ones(2, 1, 4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        try:
            profiling.boundary(number)
        except ProfileTaken:
            return number
    return steps


def profiled(directory: Path, model: nn.Module) -> Profile:
    profiling = Profiling(warmup=WARMUP, device="cpu")
    assert train(profiling, model, steps=20) == ENOUGH
    directory.mkdir()
    run_dir = RunDir(directory)
    profiling.write(run_dir, 3)
    assert not profiling.notes
    assert run_dir.trace(3).exists()
    return documents.read(run_dir.profile(3), RankProfileFile).profile


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Though warnings are errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return profiled(tmp_path_factory.mktemp("usual") / "0", Attention())


def first_cause(before: Profile, now: Profile) -> str:
    return compared(merged({0: before}), merged({0: now}), "the baseline").calls[0]


def test_three_steps_are_recorded_after_the_warm_up_and_then_it_is_over(usual: Profile) -> None:
    assert usual.steps == PROFILED_STEPS
    assert not usual.unsteady
    assert (usual.calls()["aten::linear"], usual.calls()["Optimizer.step#SGD.step"]) == (2, 1)
    assert 0 < usual.split.optimizer_us < usual.split.step_us


def test_an_error_of_the_profiler_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.profiler, "profile", Mock(side_effect=RuntimeError("no profiler here")))
    profiling = Profiling(warmup=WARMUP, device="cpu")
    assert train(profiling, Attention(), steps=20) == ENOUGH
    profiling.write(RunDir(tmp_path), 0)
    assert profiling.notes == ["no profile: RuntimeError: no profiler here"]
    assert not list(tmp_path.iterdir())


def test_a_trace_that_is_too_large_is_only_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling_module, "LARGEST_TRACE", 1000)
    profiling, run_dir = Profiling(warmup=WARMUP, device="cpu"), RunDir(tmp_path)
    train(profiling, Attention(), steps=20)
    profiling.write(run_dir, 0)
    (note,) = profiling.notes
    assert note.startswith(f"no profile: ReportError: {run_dir.trace(0)} is larger than ")
    assert run_dir.trace(0).exists()
    assert not run_dir.profile(0).exists()


def test_a_training_that_ends_too_early_leaves_no_profile(tmp_path: Path) -> None:
    profiling = Profiling(warmup=9, device="cpu")
    train(profiling, Attention(), steps=3)
    profiling.write(RunDir(tmp_path), 0)
    assert not list(tmp_path.iterdir())


def copying(x: Tensor) -> Tensor:
    return fused(x).clone()


def reading(x: Tensor) -> Tensor:
    x[0, 0, 0, 0].item()
    return fused(x)


def eager(x: Tensor) -> Tensor:
    return (x @ x.transpose(-2, -1)).softmax(-1) @ x


@pytest.mark.parametrize(
    ("attend", "told"),
    [
        (copying, "(CloneBackward0|aten::clone) 0 -> 1 calls a step"),
        (reading, ".*0 -> 1 calls a step: the host reads a value"),
        (eager, "aten::bmm 0 -> .*"),
    ],
)
def test_the_cause_is_named_first(attend: Any, told: str, usual: Profile, tmp_path: Path) -> None:
    assert re.fullmatch(told, first_cause(usual, profiled(tmp_path / "slower", Attention(attend))))


def test_smaller_buckets_are_named_first(tmp_path: Path) -> None:
    with alone():
        one, several = (
            profiled(tmp_path / str(size), DistributedDataParallel(Attention(), bucket_cap_mb=size))
            for size in (25, 0.0001)
        )
    assert first_cause(one, several).startswith(("gloo:all_reduce 1 -> ", "c10d::allreduce_ 1 -> "))
