"""Who decided each setting that a worker observed: whoever wrote the case, or a library. Pure.

What the case or its user asks for makes other work of a launch, which is then `unlike` its baseline. What a
library decides by itself, in this version or on this machine, is what the gate is there to judge.
"""

from __future__ import annotations

from collections.abc import Mapping

ASKED = frozenset(
    [
        # a field of the case
        *("world_size", "device", "attention", "recomputing_blocks", "trained", "lora", "quantised_layers"),
        # an option of the framework, a configuration of the user, or the script
        *("wrapper", "sharding", "parallelism", "tp_mode", "tp_linear_async_communication", "pp_engine"),
        *("gradient_dtype", "config_sha256", "mesh", "cuda_graphs", "accelerate_config"),
        # a switch of torch, or NVIDIA_TF32_OVERRIDE
        *("fp32_matmul", "fp32_convolution", "deterministic"),
    ]
)
"""Settings that the case or its user asks for. One that differs makes launches `unlike`."""
CHOSEN: Mapping[str, str] = {
    # A launch whose dtypes or compilation are not those of the case is a `mismatch`: what is left is not
    # asked for, as the dtype of adapters, or a loss that a library compiles.
    "parameter_dtype": "the library that builds the model",
    "compute_dtype": "the framework",
    "compiled": "the framework, or the script",
    "optimizer_parameters": "the framework, or the script",
    "parameters_changed": "the training",
    "adapters": "the library of the adapters",
    "optimizer": "the framework, or the script",
    "wrapped_modules": "the framework",
    "backend": "the framework",
    "attention_kernel": "torch, by device, shapes, dtype and cuDNN",
    "mamba_ssm": "transformers, which takes the package where it finds it",
    "reduce_dtype": "the framework",
    "fabric_strategy": "Lightning",
    "fabric_precision": "Lightning",
    "gradient_norm": "the Trainer",
    "gradient_clipping": "torchtitan",
    "spmd_backend": "torchtitan",
    "loss_chunks": "torchtitan",
    "rope": "nanotron",
    "forced": "perfsuite, as that version of the library needs it",
    "patched": "perfsuite, as that version of the library needs it",
}
"""What chooses a setting that no case asks for. One that differs is a finding, and all is judged as ever."""
A_LIBRARY = "a library"
"""What chooses the settings that are not known here: those of other packages' frameworks, whose
`Framework.expected` refuses a launch that is not as the case asks."""
NOT_OBSERVED = "not observed"
"""How a value begins that says that nothing could be seen."""


def is_unlike(setting: str, then: str | None, now: str | None) -> bool:
    """Whether launches with these two values (None: there is none) do work that was asked for otherwise."""
    return setting in ASKED and then != now and is_seen(then) and is_seen(now)


def is_seen(value: str | None) -> bool:
    """Whether a worker has seen what it looked for."""
    return value is not None and value != "?" and not value.startswith(NOT_OBSERVED)
