"""Who decided each observed setting: whoever wrote the case, or a library, which the gate judges."""

ASKED = frozenset(
    [
        # a field of the case
        *("world_size", "device", "attention", "recomputing_blocks", "trained", "lora", "quantised_layers"),
        # an option of the framework, a configuration of the user, or the script
        *("wrapper", "sharding", "parallelism", "tp_mode", "tp_linear_async_communication", "pp_engine"),
        *("gradient_dtype", "config_sha256", "mesh", "cuda_graphs", "accelerate_config"),
        *("context_parallel", "experts_per_rank", "low_precision_modules"),
        *("rank_holds", "offload", "pipeline"),
        # a switch of torch, or NVIDIA_TF32_OVERRIDE
        *("fp32_matmul", "fp32_convolution", "deterministic"),
    ]
)
"""Settings that the case or its user asks for. One that differs makes launches `unlike`; any other is a
finding, and all is judged as ever."""
NOT_OBSERVED = "not observed"  # how a value begins that says that nothing could be seen


def is_unlike(setting: str, then: str, now: str) -> bool:
    """Whether launches with these two values do work that was asked for otherwise."""
    return setting in ASKED and then != now and is_seen(then) and is_seen(now)


def is_seen(value: str) -> bool:
    """Whether a worker has seen what it looked for."""
    return value != "?" and not value.startswith(NOT_OBSERVED)
