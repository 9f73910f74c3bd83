from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from perfsuite import Case, Topology, TorchTitan
from perfsuite.case.case import CaseFile
from perfsuite.case.catalog import MODELS
from perfsuite.errors import DryRunError
from perfsuite.frameworks.common.model import synthetic_batches, transformers_config, transformers_model
from perfsuite.worker.flops import count
from tests.frameworks.torchtitan.samples import LLAMAS, MARKS, SMALL, changed
from tests.frameworks.torchtitan.test_configuration import degree, registered

pytestmark = MARKS


@pytest.mark.launch
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_from_the_same_weights_it_learns_what_a_plain_loop_learns(tensor_parallel: int) -> None:
    case = SMALL.replace(framework=TorchTitan(tensor_parallel=tensor_parallel))
    losses = json.loads(printed(case)[-1])
    assert len(losses["plain"]) == 12
    assert losses["torchtitan"] == pytest.approx(losses["plain"], rel=1e-5)


@pytest.mark.launch
@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("Interleaved1F1B", marks=pytest.mark.nightly)])
def test_a_pipeline_learns_what_one_rank_learns(schedule: str) -> None:
    """In fp32, from the same weights; each rank tells its losses."""
    by = f"--parallelism.pipeline_parallel_schedule={schedule}"
    words = ("--training.mixed_precision_param=float32", by)
    whole, split = (
        registered("llama3", "llama3_debugmodel", *words, *more, ranks=ranks, precision="fp32")
        for ranks, more in ((1, ()), (2, (degree("pipeline", 2),)))
    )
    (losses,) = map(json.loads, printed(whole))
    assert len(losses) == 14
    assert losses[0] > losses[-1]
    for of_a_rank in map(json.loads, printed(split)):
        assert of_a_rank == pytest.approx(losses, rel=1e-5)


def printed(case: Case) -> list[str]:
    """The lines of JSON that `losses.py` prints of a case."""
    asked = CaseFile(case=case, device="cpu").model_dump_json()
    ranks = f"--nproc-per-node={case.topology.world_size}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks]
    done = subprocess.run(
        [*torchrun, "-m", "tests.frameworks.torchtitan.losses", asked],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(("[", "{")) and "titan]" not in line]


def test_a_model_by_kernels_of_triton_is_refused_by_a_dry_run_alone(
    titan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Float8Linear(torch.nn.Linear): ...

    class MXFP8Linear(torch.nn.Linear): ...

    model = torch.nn.Sequential(Float8Linear(2, 2), MXFP8Linear(2, 2))
    titan.check_pretended(model)
    monkeypatch.setattr(titan, "PRETENDED", {torch.nn.Linear: "pretended"})
    titan.check_pretended(model[0])
    with pytest.raises(DryRunError, match="1 MXFP8Linear: only the kernels of Float8Linear are"):
        titan.check_pretended(model)


@pytest.mark.parametrize("name", LLAMAS)
def test_its_llama_has_the_parameters_and_flops_of_ours(titan: Any, name: str) -> None:
    config = titan.llama.model_spec(MODELS[name]).model
    with torch.device("meta"):
        model = config.build()
    ours = count(MODELS[name], 4096)
    parameters, flops = config.get_nparams_and_flops(model, 4096)
    assert parameters == sum(p.numel() for p in model.parameters()) == ours.parameters
    norms = (2 * len(config.layers) + 1) * config.dim
    assert flops == ours.per_token + 6 * norms, "it counts the norms' weights, we do not"


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-2},
        {"tie_word_embeddings": True},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_its_llama_computes_what_transformers_computes(titan: Any, changes: dict[str, Any]) -> None:
    from torchtitan.distributed.utils import set_spmd_backend

    from tests.frameworks.torchtitan.losses import with_weights_of

    set_spmd_backend("partial_dtensor")
    shape = changed(**changes)
    theirs = transformers_model(transformers_config(shape), attention="sdpa").eval()
    its = with_weights_of(theirs, titan.llama.model_spec(shape))
    tokens = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(its(tokens), theirs(tokens).logits)


def test_what_torchtitan_is_told(titan: Any) -> None:
    case = SMALL.replace(
        framework=TorchTitan(tensor_parallel=2, data_parallel_replicate=2),
        topology=Topology(processes_per_node=8),
        gradient_accumulation=3,
        precision="bf16-mixed",
        compile=True,
        learning_rate=0.01,
        seed=7,
    )
    config = titan.trainer_config(case)
    training, parallelism = config.training, config.parallelism
    assert (training.local_batch_size, training.global_batch_size) == (2, 2 * 3 * 4)
    assert (training.seq_len, training.steps, training.max_norm) == (32, 12, float("inf"))
    assert (training.dtype, training.mixed_precision_param) == ("float32", "bfloat16")
    assert (parallelism.tensor_parallel_degree, parallelism.data_parallel_replicate_degree) == (2, 2)
    assert config.compile.enable
    assert config.debug.seed == 7
    assert (config.comm.init_timeout_seconds, config.comm.train_timeout_seconds) == (300, 300), (
        "NCCL's watchdog ends a rank only after the driver would have, after timeout_s=240"
    )
    assert config.optimizer.param_groups[0].optimizer_kwargs == {
        "lr": 0.01,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
    }


def test_a_loss_that_a_replay_overwrites_is_kept(titan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    static = torch.zeros(())

    def replayed(trainer: Any, **batch: Any) -> torch.Tensor:
        return static.add_(1)

    monkeypatch.setattr(titan.Trainer, "forward_backward_step", replayed)
    for is_off, kept in ((False, [1.0, 2.0]), (True, [4.0, 4.0])):
        trainer = object.__new__(titan.CaseTrainer)
        case = SMALL.replace(framework=TorchTitan(disable_cuda_graphs=is_off))
        trainer.config, trainer._micro_losses = titan.trainer_config(case), []
        assert trainer.config.training.disable_cuda_graphs is is_off
        for _ in range(2):
            trainer.forward_backward_step()
        assert [float(loss) for loss in trainer._micro_losses] == kept


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_precisions(titan: Any, precision: str, dtype: str) -> None:
    training = titan.trainer_config(SMALL.replace(precision=precision)).training
    assert (training.dtype, training.mixed_precision_param) == (dtype, dtype)


@pytest.mark.parametrize(
    ("mode", "policy", "wrapped"),
    [("full", "FullAC", 4), ("selective-op", "SelectiveAC", 4), ("every-3", "EveryNthAC", 2)],
)
def test_activation_checkpointing_by_its_own_policies(
    titan: Any, mode: str, policy: str, wrapped: int
) -> None:
    with torch.device("meta"):
        model = titan.llama.model_spec(MODELS["llama-tiny"]).model.build()
    built = titan.llama.activation_checkpoint(mode).build(dump_folder="")
    assert type(built).__name__ == policy
    built.apply(model)
    kinds = [type(block).__name__ for block in model.layers.children()]
    assert kinds.count("CheckpointWrapper") == wrapped
    assert kinds[0] == "CheckpointWrapper"
    assert titan.llama.activation_checkpoint("none") is None


def test_each_data_parallel_rank_trains_on_our_tokens(titan: Any) -> None:
    loader = titan.trainer_config(SMALL).dataloader.build(
        dp_world_size=2, dp_rank=1, tokenizer=None, seq_len=32, local_batch_size=2
    )
    batches = synthetic_batches(SMALL, 1, torch.device("cpu"))
    for (inputs, labels), tokens in zip(loader, [*batches, *batches], strict=False):
        assert torch.equal(inputs.pop("input"), tokens), "round and round, in a dictionary of its own"
        assert torch.equal(labels[:, :-1], tokens[:, 1:])
        assert set(labels[:, -1].tolist()) == {-100}
