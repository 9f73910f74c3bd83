"""torchtitan's own Trainer for a case: configuration, model, data. On a CPU after `compat.before_import`."""

# ruff: noqa: E402  compat.without_triton comes before the imports of torchtitan

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from perfsuite.frameworks.torchtitan import compat

compat.without_triton()

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from perfsuite.case.case import Case
from perfsuite.case.model import Model
from perfsuite.frameworks.base import NCCL_AFTER_S, StepClock
from perfsuite.frameworks.common.model import COMPUTE_DTYPES, DTYPES, synthetic_batches, transformers_config
from perfsuite.frameworks.common.patches import nothing


class CaseTrainer(Trainer):  # type: ignore[misc]
    """torchtitan's Trainer, which also keeps the losses and tells the clock when it is done."""

    def __init__(self, config: Any, clock: StepClock) -> None:
        super().__init__(config)
        self._clock = clock
        self._micro_losses: list[Tensor] = []
        self.last_metrics: dict[str, float] = {}
        self.metrics_processor.logger = SimpleNamespace(
            log=lambda metrics, step: self.last_metrics.update(metrics),  # at the first and at the last step
            close=nothing,
        )
        compat.after_build(self)

    @property
    def model(self) -> Any:
        return self.model_parts[0]

    @property
    def data_parallel(self) -> int:
        """Number of ranks that see different data."""
        return int(self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard)

    def forward_backward_step(self, **batch: Any) -> Tensor:
        """Train one micro-batch. Return its loss: this rank's sum, divided by all ranks' tokens."""
        loss: Tensor = super().forward_backward_step(**batch)
        kept = loss.detach()
        if not self.config.training.disable_cuda_graphs:
            kept = kept.clone()  # the next replay writes into the same tensor
        self._micro_losses.append(kept.to_local() if isinstance(kept, DTensor) else kept)
        return loss

    def should_continue_training(self) -> bool:
        more = bool(super().should_continue_training())
        if not more:
            self._clock.finish()  # `train` waits two seconds at its end
        return more

    def settings(self) -> dict[str, str]:
        """Return the settings as the model and the optimizer have them."""
        modules = self.model.named_modules()
        attention = {type(module) for name, module in modules if name.endswith("inner_attention")}
        mesh = next(parameter.device_mesh for parameter in self.model.parameters())
        (optimizer,) = self.optimizers
        fused = " fused" if optimizer.param_groups[0]["fused"] else ""
        return {
            "attention": "sdpa" if attention == {ScaledDotProductAttention} else str(attention),
            "mesh": " x ".join(f"{name} {mesh.size(i)}" for i, name in enumerate(mesh.mesh_dim_names)),
            "optimizer": f"{type(optimizer).__name__}{fused}",
            "spmd_backend": self.config.parallelism.spmd_backend,
            "cuda_graphs": "no" if self.config.training.disable_cuda_graphs else "yes",
            "loss_chunks": str(self.loss_fn.num_chunks),
            "gradient_clipping": f"max_norm={self.config.training.max_norm}: the norm is computed only",
            "patched": compat.patches(self.device.type),
        }

    def losses(self) -> list[Tensor]:
        """Return the loss of each step: the mean over this rank's tokens."""
        micro = torch.stack(self._micro_losses).view(-1, self.gradient_accumulation_steps)
        return list(micro.sum(dim=1) * self.data_parallel)


def trainer_config(case: Case) -> Trainer.Config:
    """Return torchtitan's configuration of a case. What is not named here has torchtitan's default."""
    options: Any = case.framework
    dtype, compute_dtype = (
        str(dtypes[case.precision]).removeprefix("torch.") for dtypes in (DTYPES, COMPUTE_DTYPES)
    )
    spec = model_spec(case.model)
    watchdog_s = math.ceil(case.timeout_s) + NCCL_AFTER_S
    ranks_with_data = case.topology.world_size // options.tensor_parallel
    optimizer = default_adamw(lr=case.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer.implementation = "fused" if torch.cuda.is_available() else "for-loop"
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(
            num_chunks=options.loss_chunks,
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        ),
        tokenizer=SimpleNamespace(build=nothing),  # there is no text
        dataloader=SyntheticData.Config(
            batches=lambda dp_rank: synthetic_batches(case, dp_rank, torch.device("cpu"))
        ),
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=case.micro_batch,
            global_batch_size=case.micro_batch * case.gradient_accumulation * ranks_with_data,
            seq_len=case.sample_length,
            steps=case.total_steps,
            max_norm=float("inf"),
            dtype=dtype,
            mixed_precision_param=compute_dtype,
            disable_cuda_graphs=options.disable_cuda_graphs,
            gc_freq=case.total_steps + 1,  # the clock collects garbage, between steps
        ),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=options.tensor_parallel,
            data_parallel_replicate_degree=options.data_parallel_replicate,
            spmd_backend="partial_dtensor",  # its default wants a `fully_shard` that torch 2.13 does not have
        ),
        activation_checkpoint=activation_checkpoint(case.activation_checkpointing),
        compile=CompileConfig(enable=case.compile, components=["model"]),
        checkpoint=CheckpointManager.Config(enable=False, initial_load_model_only=False),
        metrics=MetricsProcessor.Config(log_freq=case.total_steps),
        comm=CommConfig(
            init_timeout_seconds=watchdog_s,
            train_timeout_seconds=watchdog_s,
            trace_buf_size=0,  # or it makes a folder
        ),
        debug=DebugConfig(seed=case.seed, enable_structured_logging=False),
    )


def model_spec(model: Model) -> ModelSpec:
    """Return torchtitan's Llama 3 in the sizes of a transformers Llama configuration."""
    shape = transformers_config(model)
    rope = shape.rope_parameters
    scaling: dict[str, Any] = {}
    if rope["rope_type"] == "llama3":
        same = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = {name: rope[name] for name in same}
        scaling |= {"scaling": "llama", "scaling_factor": rope["factor"]}
    layers = llama3._build_llama3_layers(
        n_layers=shape.num_hidden_layers,
        dim=shape.hidden_size,
        n_heads=shape.num_attention_heads,
        n_kv_heads=shape.num_key_value_heads,
        hidden_dim=shape.intermediate_size,
        rope=llama3.ComplexRoPE.Config(
            dim=shape.hidden_size // shape.num_attention_heads,
            max_seq_len=shape.max_position_embeddings,
            theta=rope["rope_theta"],
            **scaling,
        ),
        attn_backend="flex",  # the builder takes no other that needs no packed documents
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention_norm.eps = layer.ffn_norm.eps = shape.rms_norm_eps
    tied = shape.tie_word_embeddings
    return replace(
        llama3.model_registry("debugmodel"),
        flavor=model.name,
        model=llama3.Llama3Model.Config(
            dim=shape.hidden_size,
            vocab_size=shape.vocab_size,
            enable_weight_tying=tied,
            tok_embeddings=llama3.Embedding.Config(
                num_embeddings=shape.vocab_size,
                embedding_dim=shape.hidden_size,
                param_init=llama3._EMBEDDING_SKIP_INIT if tied else llama3._EMBEDDING_INIT,
            ),
            norm=llama3.RMSNorm.Config(
                normalized_shape=shape.hidden_size, eps=shape.rms_norm_eps, param_init=llama3._NORM_INIT
            ),
            lm_head=llama3.Linear.Config(
                in_features=shape.hidden_size,
                out_features=shape.vocab_size,
                param_init=llama3._output_linear_init(shape.hidden_size),
            ),
            layers=layers,
        ),
        state_dict_adapter=None,
    )


class EveryNthAC(FullAC):  # type: ignore[misc]
    """Policy that recomputes every N-th block: torchtitan's selective layer checkpointing before 0.3."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):  # type: ignore[misc]
        """Every `every`-th block is recomputed."""

        every: int

    def _wrap_block(self, module: Any, *, base_fqn: str) -> Any:
        index = int(base_fqn.removeprefix("layers."))
        return super()._wrap_block(module, base_fqn=base_fqn) if index % self.config.every == 0 else module


def activation_checkpoint(mode: str) -> Any:
    """Return torchtitan's policy for a case's `activation_checkpointing`."""
    if mode.startswith("every-"):
        return EveryNthAC.Config(every=int(mode.removeprefix("every-")))
    return {"none": None, "full": FullAC.Config(), "selective-op": SelectiveAC.Config()}[mode]


class SyntheticData(BaseDataLoader):  # type: ignore[misc]
    """The tokens that every framework is given, by data-parallel rank, round and round without end."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """`batches`: data-parallel rank -> its `perfsuite.frameworks.common.model.synthetic_batches`."""

        batches: Callable[[int], list[Tensor]]

    def __init__(self, config: Config, *, dp_rank: int, **unused: Any) -> None:
        self._pairs = [(tokens, tokens.roll(-1, dims=1)) for tokens in config.batches(dp_rank)]
        for _, labels in self._pairs:  # the token after each one
            labels[:, -1] = IGNORE_INDEX  # the last has none, as in transformers' own loss

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for tokens, labels in itertools.cycle(self._pairs):
            yield {"input": tokens}, labels  # a new dictionary: the Trainer moves its tensors in place
