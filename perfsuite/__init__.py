"""perfsuite: performance regression tests for distributed training, written as pytest.

Names are imported when they are first used, so that a rank loads only what it runs, and a framework is one
removable file or folder.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # each name `as` itself is public to type checkers
    from perfsuite.case.case import Case as Case
    from perfsuite.case.case import KnownIssue as KnownIssue
    from perfsuite.case.case import LoRA as LoRA
    from perfsuite.case.case import Topology as Topology
    from perfsuite.case.catalog import MODELS as MODELS
    from perfsuite.case.hardware import Machine as Machine
    from perfsuite.case.model import Model as Model
    from perfsuite.errors import CaseError as CaseError
    from perfsuite.errors import PerfsuiteError as PerfsuiteError
    from perfsuite.frameworks.accelerate import Accelerate as Accelerate
    from perfsuite.frameworks.base import Framework as Framework
    from perfsuite.frameworks.ddp import DDP as DDP
    from perfsuite.frameworks.deepspeed import DeepSpeed as DeepSpeed
    from perfsuite.frameworks.fake import Fake as Fake
    from perfsuite.frameworks.fsdp import FSDP as FSDP
    from perfsuite.frameworks.fsdp2 import FSDP2 as FSDP2
    from perfsuite.frameworks.lightning import Lightning as Lightning
    from perfsuite.frameworks.nanotron import Nanotron as Nanotron
    from perfsuite.frameworks.script import Script as Script
    from perfsuite.frameworks.torchtitan import TorchTitan as TorchTitan
    from perfsuite.frameworks.trainer import Trainer as Trainer
    from perfsuite.results.session_file import Measurement as Measurement
    from perfsuite.worker.spans.phases import phase as phase

__version__ = "0.1.0"  # the one place of the version: `pyproject.toml` reads it here

_NAMES = {  # public names, except those of frameworks, by their module below this package
    "case.case": ["Case", "KnownIssue", "LoRA", "Topology"],
    "case.catalog": ["MODELS"],
    "case.hardware": ["Machine"],
    "case.model": ["Model"],
    "errors": ["CaseError", "PerfsuiteError"],
    "frameworks.base": ["Framework"],
    "results.session_file": ["Measurement"],
    "worker.spans.phases": ["phase"],
}
_FRAMEWORKS = (  # each is in a module with the name of the class
    *("Accelerate", "DDP", "DeepSpeed", "FSDP", "FSDP2", "Fake"),
    *("Lightning", "Nanotron", "Script", "TorchTitan", "Trainer"),
)
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
_MODULES |= {name: f"frameworks.{name.lower()}" for name in _FRAMEWORKS}

__all__ = sorted([*_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name and keep it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
