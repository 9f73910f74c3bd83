"""accelerate's environment variables and state, for the adapters that train through it.

Imports torch and accelerate when used.
"""

from __future__ import annotations

import os
from typing import Any


def clear_environment() -> None:
    """Remove every variable that accelerate would read: the case alone decides."""
    for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[key]


def force_fsdp(accelerator: Any, plugin: Any) -> str:
    """Turn FSDP on for a CPU, where accelerate silently trains DDP instead. Returns what to record.

    FSDP1's plugin must be without `sync_module_states`; each rank makes the same weights anyway.
    """
    import torch
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    # AcceleratorState copies PartialState's attributes whenever somebody asks for it.
    for state in (PartialState(), accelerator.state):
        state.distributed_type = DistributedType.FSDP
        state.device = torch.device("cpu")
    accelerator.state.fsdp_plugin = plugin
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    forced = "FSDP on a CPU, where accelerate turns it into DDP"
    if plugin.fsdp_version == 1:
        forced += "; without sync_module_states, which broadcasts from a GPU"
    return forced
