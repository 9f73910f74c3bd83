import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from perfsuite import Case, Topology, TorchTitan
from perfsuite.case.case import CaseFile
from perfsuite.errors import DryRunError
from perfsuite.frameworks.common.model import synthetic_batches
from perfsuite.frameworks.common.own_list import OwnList
from perfsuite.results.run_dir import FLIGHT_RECORDER_FILE, RunDir
from tests.frameworks.learnt import learnt
from tests.frameworks.torchtitan.samples import MARKS, SMALL
from tests.frameworks.torchtitan.test_configuration import degree, overridden, registered

pytestmark = MARKS


Losses = Callable[[Case], list[float]]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Losses]:
    """Yield a function that returns the losses of a case. One process imports torchtitan for all tests."""
    errors = tmp_path_factory.mktemp("losses") / "errors"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-u", "-m", "tests.frameworks.torchtitan.losses"],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        asked = process.stdin
        stdout = process.stdout
        assert asked is not None
        assert stdout is not None

        def of_case(case: Case) -> list[float]:
            print(CaseFile(case=case, device="cpu").model_dump_json(), file=asked, flush=True)
            lines = (line for line in stdout if line.startswith("[") and "titan]" not in line)
            line = next(lines, None)
            assert line is not None, errors.read_text()
            return list(json.loads(line))

        yield of_case


@pytest.mark.nightly
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_learns_as_a_plain_loop_does(losses: Losses, tensor_parallel: int) -> None:
    case = SMALL.replace(framework=TorchTitan(tensor_parallel=tensor_parallel))
    plain = learnt(case, data_ranks=2 // tensor_parallel).loss
    assert losses(case) == pytest.approx(plain, rel=1e-5)


IN_FP32 = registered("llama3", "llama3_debugmodel", "--training.mixed_precision_param=float32")
IN_FP32 = IN_FP32.replace(precision="fp32")


@pytest.fixture(scope="module")
def whole(losses: Losses) -> list[float]:
    return losses(IN_FP32.replace(topology=Topology(processes_per_node=1)))


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("Interleaved1F1B", marks=pytest.mark.nightly)])
def test_a_pipeline_learns_what_one_rank_learns(losses: Losses, whole: list[float], schedule: str) -> None:
    """The training is in fp32, with the same weights."""
    by = f"--parallelism.pipeline_parallel_schedule={schedule}"
    assert len(whole) == 14
    assert whole[0] > whole[-1]
    assert losses(overridden(degree("pipeline", 2), by, case=IN_FP32)) == pytest.approx(whole, rel=1e-5)


def test_only_a_dry_run_refuses_triton_kernels(titan: Any) -> None:
    class Float8Linear(torch.nn.Linear): ...

    class MXFP8Linear(torch.nn.Linear): ...

    model = torch.nn.Sequential(Float8Linear(2, 2), MXFP8Linear(2, 2))
    titan.check_pretended(model, is_dry=False)
    titan.check_pretended(model[0], is_dry=True)
    with pytest.raises(DryRunError, match="1 MXFP8Linear have their own kernels"):
        titan.check_pretended(model, is_dry=True)


SPLIT_CASE = SMALL.replace(
    framework=TorchTitan(tensor_parallel=2, data_parallel_replicate=2),
    topology=Topology(processes_per_node=8),
    gradient_accumulation=3,
    compile=True,
    learning_rate=0.01,
    seed=7,
)


@pytest.fixture(params=["fp32", "bf16", "bf16-mixed"])
def config(titan: Any, request: pytest.FixtureRequest) -> Any:
    """Return the configuration that torchtitan gets for a case on eight ranks, with each precision."""
    return titan.trainer_config(SPLIT_CASE.replace(precision=request.param))


@pytest.mark.parametrize(
    ("precision", "dtypes"),
    [
        ("fp32", ("float32", "float32")),
        ("bf16", ("bfloat16", "bfloat16")),
        ("bf16-mixed", ("float32", "bfloat16")),
    ],
)
def test_a_case_determines_the_precision(titan: Any, precision: str, dtypes: tuple[str, str]) -> None:
    training = titan.trainer_config(SPLIT_CASE.replace(precision=precision)).training
    assert (training.dtype, training.mixed_precision_param) == dtypes


def test_a_case_determines_the_batches_and_steps(config: Any) -> None:
    training = config.training
    assert (training.local_batch_size, training.global_batch_size) == (2, 2 * 3 * 4)
    assert (training.seq_len, training.steps, training.max_norm) == (32, 12, float("inf"))


def test_a_case_determines_the_parallelism(config: Any) -> None:
    parallelism = config.parallelism
    assert (parallelism.tensor_parallel_degree, parallelism.data_parallel_replicate_degree) == (2, 2)


def test_a_case_determines_compilation_and_seed(config: Any) -> None:
    assert config.compile.enable
    assert config.debug.seed == 7


def test_a_watchdog_waits_longer_than_the_driver(config: Any) -> None:
    """NCCL's watchdog ends a rank only after the driver would have, after timeout_s=240."""
    assert (config.comm.init_timeout_seconds, config.comm.train_timeout_seconds) == (300, 300)


def test_a_case_determines_the_optimizer(config: Any) -> None:
    adam = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    assert config.optimizer.param_groups[0].optimizer_kwargs == adam


def test_records_calls_in_a_launch_without_a_new_folder(
    titan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FLIGHT_RECORDER_FILE, raising=False)
    assert titan.trainer_config(SMALL).comm.trace_buf_size == 0, "like in a dry run"
    monkeypatch.setenv(FLIGHT_RECORDER_FILE, str(RunDir(tmp_path).flight_recorder))
    comm = titan.trainer_config(SMALL).comm
    assert comm.trace_buf_size == 2000
    # torchtitan joins the names in this way
    folder = os.path.join("./outputs", comm.save_traces_folder)
    assert f"{folder}/{comm.save_traces_file_prefix}" == str(RunDir(tmp_path).flight_recorder)


@pytest.mark.parametrize(
    ("is_off", "kept"), [(False, [1.0, 2.0]), (True, [2.0, 2.0])], ids=["graphs", "no graphs"]
)
def test_a_loss_that_a_replay_overwrites_is_kept(
    titan: Any, monkeypatch: pytest.MonkeyPatch, is_off: bool, kept: list[float]
) -> None:
    static = torch.zeros(())

    def replayed(trainer: Any, **batch: Any) -> torch.Tensor:
        return static.add_(1)

    monkeypatch.setattr(titan.Trainer, "forward_backward_step", replayed)
    trainer = object.__new__(titan.CaseTrainer)
    case = SMALL.replace(framework=TorchTitan(disable_cuda_graphs=is_off))
    trainer.config = titan.trainer_config(case)
    trainer._micro_losses = OwnList[torch.Tensor]()
    assert trainer.config.training.disable_cuda_graphs is is_off
    for _ in range(2):
        trainer.forward_backward_step()
    assert [float(loss) for loss in trainer._micro_losses] == kept


def test_each_data_rank_trains_on_our_tokens(titan: Any) -> None:
    loader = titan.trainer_config(SMALL).dataloader.build(
        dp_world_size=2, dp_rank=1, tokenizer=None, seq_len=32, local_batch_size=2
    )
    batches = [*synthetic_batches(SMALL, 1, torch.device("cpu"))]
    loaded = [*itertools.islice(loader, 2 * len(batches))]
    assert len(loaded) == 2 * len(batches)
    for (inputs, labels), tokens in zip(loaded, [*batches, *batches], strict=True):
        assert torch.equal(inputs.pop("input"), tokens), "the batches repeat, each in a dictionary of its own"
        assert torch.equal(labels[:, :-1], tokens[:, 1:])
        assert set(labels[:, -1].tolist()) == {-100}
