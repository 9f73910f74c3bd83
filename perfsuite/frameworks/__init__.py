"""How each library trains a case: one file or folder per framework, over `base` and helpers in `common`."""

from perfsuite.frameworks.base import Command, Framework, LaunchPlan, Ranks, StepClock, Workload, framework_of

__all__ = ["Command", "Framework", "LaunchPlan", "Ranks", "StepClock", "Workload", "framework_of"]
