"""perfsuite: performance regression tests for distributed training, written as pytest."""

from perfsuite.case.case import Case, KnownIssue, LoRA, Topology
from perfsuite.case.model import MODELS, Model
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

__version__ = "0.1.0"
"""The one place of the version: `pyproject.toml` reads it here."""

__all__ = [
    "DDP",
    "FSDP",
    "FSDP2",
    "MODELS",
    "Accelerate",
    "Case",
    "Fake",
    "Framework",
    "KnownIssue",
    "Lightning",
    "LoRA",
    "Model",
    "Nanotron",
    "Script",
    "Topology",
    "TorchTitan",
    "Trainer",
    "__version__",
]
