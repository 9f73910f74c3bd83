"""What the launches of a case are judged by. Pure; imports neither torch nor pytest."""

from __future__ import annotations

from dataclasses import dataclass, field

from perfsuite.results.baseline import Baseline
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.verdict.judge import Policy
from perfsuite.verdict.noise import ClassNoise


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the launches of a case are judged by."""

    baseline: Baseline | None = None
    """None: there is none to compare with, and the launches may become one."""
    counts: CountBaseline | None = None
    """What a step did when that was accepted or recorded."""
    noise: ClassNoise = field(default_factory=ClassNoise)
    """The noise between launches on this hardware class."""
    policy: Policy = field(default_factory=Policy)
    """How many launches the verdict may cost."""
