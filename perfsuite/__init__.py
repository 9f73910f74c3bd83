"""perfsuite: performance regression tests for distributed training, written as pytest tests.

Names are imported on first use, so that a rank loads only the modules that it needs. At run time, the class
names of frameworks come from their entry points (`pyproject.toml`), so this module still works after the file
or folder of a framework was removed together with its entry point.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers, a name is public if it is imported `as` itself
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

__version__ = "0.1.0"  # the only place for the version; `pyproject.toml` reads it from here

_NAMES = {  # public names by module, except those of frameworks
    "case.case": ["Case", "KnownIssue", "LoRA", "Topology"],
    "case.catalog": ["MODELS"],
    "case.hardware": ["Machine"],
    "case.model": ["Model"],
    "errors": ["CaseError", "PerfsuiteError"],
    "frameworks.base": ["Framework"],
    "results.session_file": ["Measurement"],
    "worker.spans.phases": ["phase"],
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}


def _frameworks() -> dict[str, str]:
    """Return the module of each framework, by the class name of the framework."""
    from perfsuite import extensions

    entry_points = (extension.entry_point for extension in extensions.own(extensions.FRAMEWORKS).values())
    return {entry_point.attr: entry_point.module for entry_point in entry_points}


def __getattr__(name: str) -> Any:
    """Import a public name and store it in this module."""
    if name == "__all__":
        return __dir__()
    module = _MODULES.get(name)
    # Only names with a capital letter can be frameworks, because frameworks are classes. For all other names,
    # such as those of modules that Python looks up here on import, the entry points are not read.
    if module is None and name[:1].isupper():
        module = _frameworks().get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_MODULES, *_frameworks(), "__version__"])
