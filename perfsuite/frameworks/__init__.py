"""How each library trains a case: one file or folder per framework, using `base` and helpers in `common`."""

from perfsuite.case.framework import Promises
from perfsuite.frameworks.base import Command, DryPlan, Framework, LaunchPlan, Ranks, StepClock, Workload

__all__ = ["Command", "DryPlan", "Framework", "LaunchPlan", "Promises", "Ranks", "StepClock", "Workload"]
