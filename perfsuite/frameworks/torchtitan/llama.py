"""Configure torchtitan from a case's options, with torchtitan's Llama 3 in the sizes of the case's model."""

# ruff: noqa: I001  configuration must come first: it makes torchtitan importable without Triton

from dataclasses import dataclass, replace
from typing import Any

from perfsuite.frameworks.torchtitan import configuration  # noqa: F401

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import llama3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from perfsuite.case.case import Case
from perfsuite.case.model import Model
from perfsuite.frameworks.common.model import COMPUTE_DTYPES, DTYPES, dtype_name, transformers_config


def from_options(case: Case) -> Trainer.Config:
    """Return the configuration for a case's options. All other fields have torchtitan's defaults."""
    options: Any = case.framework
    spec = model_spec(case.model)
    ranks_with_data = case.topology.world_size // options.tensor_parallel
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(
            num_chunks=options.loss_chunks,
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        ),
        optimizer=default_adamw(lr=case.learning_rate, betas=(0.9, 0.95), weight_decay=0.1),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=case.micro_batch,
            global_batch_size=case.micro_batch * case.gradient_accumulation * ranks_with_data,
            seq_len=case.sample_length,
            steps=case.total_steps,
            max_norm=float("inf"),
            dtype=dtype_name(DTYPES[case.precision]),
            mixed_precision_param=dtype_name(COMPUTE_DTYPES[case.precision]),
            disable_cuda_graphs=options.disable_cuda_graphs,
        ),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=options.tensor_parallel,
            data_parallel_replicate_degree=options.data_parallel_replicate,
        ),
        activation_checkpoint=activation_checkpoint(case.activation_checkpointing),
        compile=CompileConfig(enable=case.compile, components=["model"]),
        debug=DebugConfig(seed=case.seed),
    )


def model_spec(model: Model) -> ModelSpec:
    """Return torchtitan's Llama 3 with the sizes of a transformers Llama configuration."""
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
        attn_backend="flex",  # the only backend of this builder that works without packed documents
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention_norm.eps = layer.ffn_norm.eps = shape.rms_norm_eps
    usual = llama3.model_registry("debugmodel")
    model_of = usual.model
    width = shape.hidden_size
    vocabulary = shape.vocab_size
    tied = shape.tie_word_embeddings
    embedding = replace(model_of.tok_embeddings, num_embeddings=vocabulary, embedding_dim=width)
    if tied:  # the head owns the weight and initialises it
        embedding = replace(embedding, param_init=llama3._EMBEDDING_SKIP_INIT)
    sized = replace(
        model_of,
        dim=width,
        vocab_size=vocabulary,
        enable_weight_tying=tied,
        tok_embeddings=embedding,
        norm=replace(model_of.norm, normalized_shape=width, eps=shape.rms_norm_eps),
        lm_head=replace(
            model_of.lm_head,
            in_features=width,
            out_features=vocabulary,
            param_init=llama3._output_linear_init(width),
        ),
        layers=layers,
    )
    return replace(usual, flavor=model.name, model=sized, state_dict_adapter=None)


class EveryNthAC(FullAC):  # type: ignore[misc]
    """A policy that recomputes every N-th block, as torchtitan's own policy did before version 0.3."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):  # type: ignore[misc]
        """Recompute every `interval`-th block."""

        interval: int

    def _wrap_block(self, module: Any, *, base_fqn: str) -> Any:
        index = int(base_fqn.removeprefix("layers."))
        return super()._wrap_block(module, base_fqn=base_fqn) if index % self.config.interval == 0 else module


def activation_checkpoint(mode: str) -> Any:
    """Return torchtitan's policy for a case's `activation_checkpointing`. None for `none`."""
    if mode.startswith("every-"):
        return EveryNthAC.Config(interval=int(mode.removeprefix("every-")))
    return {"none": None, "full": FullAC.Config(), "selective-op": SelectiveAC.Config()}[mode]
