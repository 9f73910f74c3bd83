"""perfsuite: performance regression tests for distributed training, written as pytest.

Names are imported when they are first used, so that a rank loads only what it runs, and a framework is one
removable file or folder.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfsuite.case.case import Case, KnownIssue, LoRA, Topology
    from perfsuite.case.catalog import MODELS
    from perfsuite.case.hardware import Machine
    from perfsuite.case.model import Model
    from perfsuite.errors import CaseError, PerfsuiteError
    from perfsuite.frameworks.accelerate import Accelerate
    from perfsuite.frameworks.base import Framework
    from perfsuite.frameworks.ddp import DDP
    from perfsuite.frameworks.fake import Fake
    from perfsuite.frameworks.fsdp import FSDP
    from perfsuite.frameworks.fsdp2 import FSDP2
    from perfsuite.frameworks.lightning import Lightning
    from perfsuite.frameworks.nanotron import Nanotron
    from perfsuite.frameworks.script import Script
    from perfsuite.frameworks.torchtitan import TorchTitan
    from perfsuite.frameworks.trainer import Trainer
    from perfsuite.results.session_file import Measurement

__version__ = "0.1.0"
"""The one place of the version: `pyproject.toml` reads it here."""

__all__ = [
    "DDP",
    "FSDP",
    "FSDP2",
    "MODELS",
    "Accelerate",
    "Case",
    "CaseError",
    "Fake",
    "Framework",
    "KnownIssue",
    "Lightning",
    "LoRA",
    "Machine",
    "Measurement",
    "Model",
    "Nanotron",
    "PerfsuiteError",
    "Script",
    "Topology",
    "TorchTitan",
    "Trainer",
    "__version__",
]

_MODULES = {
    "MODELS": "case.catalog",
    "Accelerate": "frameworks.accelerate",
    "Case": "case.case",
    "CaseError": "errors",
    "DDP": "frameworks.ddp",
    "FSDP": "frameworks.fsdp",
    "FSDP2": "frameworks.fsdp2",
    "Fake": "frameworks.fake",
    "Framework": "frameworks.base",
    "KnownIssue": "case.case",
    "Lightning": "frameworks.lightning",
    "LoRA": "case.case",
    "Machine": "case.hardware",
    "Measurement": "results.session_file",
    "Model": "case.model",
    "Nanotron": "frameworks.nanotron",
    "PerfsuiteError": "errors",
    "Script": "frameworks.script",
    "Topology": "case.case",
    "TorchTitan": "frameworks.torchtitan",
    "Trainer": "frameworks.trainer",
}
"""The module of each public name, below this package."""


def __getattr__(name: str) -> Any:
    """Import a public name and keep it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
