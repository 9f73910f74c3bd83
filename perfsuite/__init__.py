"""perfsuite: performance regression tests for distributed training, written as pytest."""

from perfsuite.case import Case, Topology
from perfsuite.framework import Framework
from perfsuite.frameworks.ddp import DDP
from perfsuite.frameworks.fake import Fake
from perfsuite.frameworks.fsdp import FSDP
from perfsuite.frameworks.fsdp2 import FSDP2
from perfsuite.frameworks.lightning import Lightning
from perfsuite.models import MODELS, Model

__all__ = ["DDP", "FSDP", "FSDP2", "MODELS", "Case", "Fake", "Framework", "Lightning", "Model", "Topology"]
