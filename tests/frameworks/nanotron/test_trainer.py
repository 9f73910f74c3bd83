from pathlib import Path

import pytest

from perfsuite import Nanotron
from perfsuite.results.run import Run
from tests.frameworks.nanotron.test_adapter import SMALL
from tests.frameworks.test_base import measured, observed


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return measured(SMALL.replace(framework=Nanotron(pp=2)), tmp_path_factory.mktemp("pipeline"))


@pytest.mark.nightly
def test_split_batch_pipeline_trains_the_same(pipeline: Run, tmp_path: Path) -> None:
    """The losses agree until a sequence repeats, which takes four steps of four sequences."""
    case = SMALL.replace(framework=Nanotron(pp=2), micro_batch=1, gradient_accumulation=4, max_warmup_steps=4)
    split = measured(case, tmp_path)
    assert split.loss[:4] == pytest.approx(pipeline.loss[:4], rel=1e-4)
    assert observed(split).settings["parallelism"] == "dp 1 x tp 1 x pp 2"
    assert observed(split).settings["pp_engine"] == "1f1b"
    activation = 1 * 32 * 128 * 4
    growth = {entry.name: entry.counts.memory.growth for entry in split.counts if entry.counts.memory}
    assert set(growth) == {"0", "1"}
    assert max(growth.values()) < activation, "the tensors that a stage has sent are kept after the step"


@pytest.mark.nightly
def test_resumed_pipeline_continues_unchanged(pipeline: Run, tmp_path: Path) -> None:
    resumed = measured(SMALL.replace(framework=Nanotron(pp=2, resume=True)), tmp_path)
    assert resumed.loss[:10] == pytest.approx(pipeline.loss[2:], rel=1e-4)
    for event in ("save checkpoint", "load checkpoint"):
        assert resumed.spans[event].steps == (0, 0), "random states have a file of their own"
    assert not (tmp_path / "checkpoints").exists()
