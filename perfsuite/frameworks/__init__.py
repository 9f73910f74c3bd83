"""Train cases with each library: one file or folder per framework, using `base` and helpers in `common`."""

from perfsuite.case.framework import Promises
from perfsuite.frameworks.base import (
    Command,
    DryPlan,
    Engine,
    Framework,
    LaunchPlan,
    Library,
    Ranks,
    StepClock,
    Workload,
)

__all__ = [
    "Command",
    "DryPlan",
    "Engine",
    "Framework",
    "LaunchPlan",
    "Library",
    "Promises",
    "Ranks",
    "StepClock",
    "Workload",
]
