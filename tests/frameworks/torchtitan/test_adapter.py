from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from perfsuite import Case, Topology, TorchTitan
from perfsuite.case import torch_build
from perfsuite.case.case import CaseFile, LoRA
from perfsuite.case.catalog import MODELS
from perfsuite.case.model import Model
from perfsuite.frameworks.common.model import synthetic_batches, transformers_config, transformers_model
from perfsuite.frameworks.torchtitan import compat
from perfsuite.frameworks.torchtitan.adapter import MIN_TORCH
from perfsuite.launch.machine import detect
from perfsuite.launch.requirements import unsupported
from perfsuite.measure import launch_once
from perfsuite.results.run import Run
from perfsuite.worker.flops import count

SMALL = Case(
    model="llama-tiny",
    framework=TorchTitan(),
    sequence_length=32,
    micro_batch=2,
    topology=Topology(processes_per_node=2),
    hardware="cpu",
    max_warmup_steps=2,
    steps=10,
    timeout_s=240,
)
LLAMAS = [name for name, model in MODELS.items() if model.config["model_type"] == "llama"]
TINY = dict(MODELS["llama-tiny"].config)

pytestmark = [
    pytest.mark.skipif(
        torch_build.release() < MIN_TORCH,
        reason=f"torchtitan 0.3 needs a newer torch: {torch_build.summary()}",
    ),
    # torch's own compiler, which torchtitan loads, warns of torch's own torch.jit; torchdata of torch.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


@pytest.fixture(scope="module")
def titan() -> Any:
    compat.before_import("cpu")
    from perfsuite.frameworks.torchtitan import trainer

    return trainer


def measured(case: Case, directory: Path) -> Run:
    result = launch_once(case, detect(), directory)
    assert result.failure is None, f"{result.failure.message}\n{result.failure.traceback}"
    return result


@pytest.mark.launch
@pytest.mark.parametrize(
    "case",
    [
        SMALL.replace(
            activation_checkpointing="selective-op", precision="bf16-mixed", gradient_accumulation=2
        ),
        SMALL.replace(framework=TorchTitan(tensor_parallel=2), activation_checkpointing="every-2"),
        SMALL.replace(
            framework=TorchTitan(data_parallel_replicate=2),
            activation_checkpointing="full",
            precision="bf16",
        ),
    ],
    ids=lambda case: case.id,
)
def test_options_run_as_asked_for(tmp_path: Path, case: Case) -> None:
    """The worker itself refuses what is not as asked for; this checks that it looked."""
    result = measured(case, tmp_path)
    assert result.observed is not None
    settings = result.observed.settings
    recomputing = {"every-2": 2, "full": 4, "selective-op": 4}[case.activation_checkpointing]
    assert settings["recomputing_blocks"] == f"{recomputing} of 4"
    assert settings["compute_dtype"] == ("float32" if case.precision == "fp32" else "bfloat16")
    assert settings["optimizer"] == "AdamW"
    assert settings["attention"] == "sdpa"
    assert settings["spmd_backend"] == "partial_dtensor"
    assert "torchtitan.tools.utils.device_module" in settings["patched"]
    assert result.observed.environment["torchtitan"] == "0.3.0"
    assert set(result.device_probe) == {"matmul_tflops", "copy_gb_s", "all_reduce_gb_s"}

    f = result.figures
    data_parallel = 1 if "tp 2" in settings["mesh"] else 2
    tokens = 2 * 32 * case.gradient_accumulation * data_parallel
    assert f.tokens_per_s == pytest.approx(tokens / float(f.step_s_p50 or 0))
    assert f.own_tokens_per_s is not None
    assert f.own_tokens_per_s > 0
    assert float(f.loss_last or 0) < float(f.loss_first or 0)
    assert not [note for note in result.notes if "wall clock" in note], (
        "its two seconds at the end are not ours"
    )


@pytest.mark.launch
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_from_the_same_weights_it_learns_what_a_plain_loop_learns(tensor_parallel: int) -> None:
    case = SMALL.replace(framework=TorchTitan(tensor_parallel=tensor_parallel))
    asked = CaseFile(case=case, device="cpu").model_dump_json()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.frameworks.torchtitan.losses", asked],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout.splitlines()[-1])
    assert len(losses["plain"]) == 12
    assert losses["torchtitan"] == pytest.approx(losses["plain"], rel=1e-5)


@pytest.mark.parametrize("name", LLAMAS)
def test_its_llama_has_the_parameters_and_flops_of_ours(titan: Any, name: str) -> None:
    config = titan.model_spec(MODELS[name]).model
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
    shape = Model.from_config({**TINY, **changes}, name="changed")
    theirs = transformers_model(transformers_config(shape), attention="sdpa").eval()
    its = with_weights_of(theirs, titan.model_spec(shape))
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
    config = titan.trainer_config(case, case.framework)
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


@pytest.mark.parametrize(
    ("precision", "dtypes"),
    [("fp32", ("float32", "float32")), ("bf16", ("bfloat16", "bfloat16"))],
)
def test_precisions(titan: Any, precision: str, dtypes: tuple[str, str]) -> None:
    case = SMALL.replace(precision=precision)
    training = titan.trainer_config(case, case.framework).training
    assert (training.dtype, training.mixed_precision_param) == dtypes


@pytest.mark.parametrize(
    ("mode", "policy", "wrapped"),
    [("full", "FullAC", 4), ("selective-op", "SelectiveAC", 4), ("every-3", "EveryNthAC", 2)],
)
def test_activation_checkpointing_by_its_own_policies(
    titan: Any, mode: str, policy: str, wrapped: int
) -> None:
    with torch.device("meta"):
        model = titan.model_spec(MODELS["llama-tiny"]).model.build()
    built = titan.activation_checkpoint(mode).build(dump_folder="")
    assert type(built).__name__ == policy
    built.apply(model)
    kinds = [type(block).__name__ for block in model.layers.children()]
    assert kinds.count("CheckpointWrapper") == wrapped
    assert kinds[0] == "CheckpointWrapper"


def test_no_activation_checkpointing(titan: Any) -> None:
    assert titan.activation_checkpoint("none") is None


def test_each_data_parallel_rank_trains_on_our_tokens(titan: Any) -> None:
    loader = titan.trainer_config(SMALL, SMALL.framework).dataloader.build(
        dp_world_size=2, dp_rank=1, tokenizer=None, seq_len=32, local_batch_size=2
    )
    inputs, labels = next(iter(loader))
    tokens = synthetic_batches(SMALL, 1, torch.device("cpu"))[0]
    assert torch.equal(inputs["input"], tokens)
    assert torch.equal(labels[:, :-1], tokens[:, 1:])
    assert set(labels[:, -1].tolist()) == {-100}


def test_a_gpu_needs_fewer_patches() -> None:
    on_gpu, on_cpu = compat.patches("cuda"), compat.patches("cpu")
    assert on_cpu.startswith(on_gpu)
    assert "set_timeout" in on_gpu
    assert "gloo" not in on_gpu


def test_the_cpu_is_one_device_without_memory_statistics(titan: Any) -> None:
    from torchtitan.components.metrics import build_device_memory_monitor
    from torchtitan.tools.utils import get_local_device

    monitor = build_device_memory_monitor()
    assert monitor.device_name == "cpu"
    assert monitor.get_peak_stats().num_alloc_retries == -1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "1")
        assert get_local_device() == torch.device("cpu", 0)


def test_set_timeout_is_patched_only_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    own = vars(dist.distributed_c10d)["_set_pg_timeout"]
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    compat.before_import("cuda")
    assert vars(dist)["set_timeout"] is own
    newer = object()
    monkeypatch.setattr(dist, "set_timeout", newer)
    compat.before_import("cuda")
    assert vars(dist)["set_timeout"] is newer


@pytest.mark.parametrize(
    ("framework", "mesh", "sharding"),
    [
        (TorchTitan(), "fsdp 8", "Shard(0)"),
        (TorchTitan(data_parallel_replicate=2), "dp_replicate 2 x fsdp 4", "Replicate, Shard(0)"),
        (
            TorchTitan(tensor_parallel=4),
            "fsdp 2 x tp 4",
            "Shard(0), Replicate and Shard(0), Shard(1) and StridedShard(0), Shard(0)",
        ),
    ],
    ids=lambda value: value.slug() if isinstance(value, TorchTitan) else "",
)
def test_what_must_be_observed(framework: TorchTitan, mesh: str, sharding: str) -> None:
    case = SMALL.replace(framework=framework, topology=Topology(processes_per_node=8))
    assert framework.expected(case) == {"wrapper": "FSDPModule", "mesh": mesh, "sharding": sharding}


def changed(**config: Any) -> Model:
    return Model.from_config({**TINY, **config}, name="changed")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "gpt2-tiny"}, "torchtitan's llama3 builds Llama models, gpt2-tiny is a gpt2"),
        (
            {"model": Model.from_config({"model_type": "mamba"}, name="mamba-tiny")},
            "torchtitan's llama3 builds Llama models, mamba-tiny is a mamba",
        ),
        ({"model": changed(attention_bias=True)}, "has attention_bias=False only, changed has True"),
        ({"model": changed(hidden_act="gelu")}, "has hidden_act='silu' only, changed has 'gelu'"),
        ({"model": changed(head_dim=64)}, "has heads of size 32, changed of 64"),
        (
            {"model": changed(rope_scaling={"type": "yarn", "factor": 2.0})},
            "knows rope_type default and llama3, changed has 'yarn'",
        ),
        ({"precision": "fp16-mixed"}, "precision 'fp16-mixed' is not one of fp32, bf16-mixed, bf16"),
        ({"lora": LoRA(rank=4, alpha=8)}, "torchtitan knows no lora"),
        ({"attention": "eager"}, "attention='sdpa' only, not 'eager'"),
        (
            {"sequence_length": 20},
            "loss in chunks splits a sequence into 8 equal parts, which sequence_length=20",
        ),
        (
            {"framework": TorchTitan(tensor_parallel=3)},
            "tensor_parallel=3 times data_parallel_replicate=1 must divide the number of processes, 2",
        ),
        (
            {"framework": TorchTitan(data_parallel_replicate=4)},
            "tensor_parallel=1 times data_parallel_replicate=4 must divide the number of processes, 2",
        ),
        (
            {"framework": TorchTitan(tensor_parallel=2), "model": changed(num_key_value_heads=1)},
            "tensor_parallel=2 must divide num_key_value_heads, 1",
        ),
    ],
)
def test_what_cannot_run_is_known_beforehand(changes: dict[str, Any], reason: str) -> None:
    assert reason in str(unsupported(SMALL.replace(**changes), detect()))


def test_tensor_parallel_wants_sequences_that_it_can_split() -> None:
    case = SMALL.replace(
        framework=TorchTitan(tensor_parallel=6),
        topology=Topology(processes_per_node=6),
        sequence_length=32,
    )
    reason = TorchTitan(tensor_parallel=6).unsupported(case, detect())
    assert "torchtitan's tensor_parallel splits a sequence into 6 equal parts" in str(reason)


def test_an_older_torch_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "installed", lambda: {"__version__": "2.11.0+cu130", "cuda": "13.0"})
    reason = "torchtitan 0.3 needs torch 2.13 or newer, this is 2.11.0+cu130, built for CUDA 13.0"
    assert unsupported(SMALL, detect()) == reason


@pytest.mark.parametrize("model", LLAMAS)
def test_every_llama_is_supported(model: str) -> None:
    assert unsupported(SMALL.replace(model=model), detect()) is None


@pytest.mark.parametrize("option", ["tensor_parallel", "data_parallel_replicate"])
def test_a_degree_is_at_least_one(option: str) -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        TorchTitan.model_validate({option: 0})


def test_options_in_the_id() -> None:
    assert SMALL.id.startswith("torchtitan-llama-tiny-")
    assert SMALL.replace(framework=TorchTitan(tensor_parallel=2)).id.startswith(
        "torchtitan-tensor_parallel2-llama-tiny-"
    )
