"""What a user may choose for a session. Imports neither torch nor pytest."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from perfsuite.launch.quiet import WAIT_S
from perfsuite.measure import WhenShared
from perfsuite.results.session_file import Measurement
from perfsuite.verdict.judge import Policy

MISSING_FAILS = "--perf-missing-baseline=fail"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may choose."""

    root: Path
    """The directory of the repository that holds the cases."""
    store: Path
    """The directory of the local store."""
    baselines: Path
    """The directory of reviewed baselines."""
    policy: Policy = field(default_factory=Policy)
    inject: str | None = None
    """A fault to inject into every launch: such launches are judged and never recorded."""
    counts: bool = True
    """Count what a step does, in every launch."""
    explain: bool = False
    """Have a slower case profiled in one more launch, and one whose launches may become a baseline."""
    fail_without_baseline: bool = False
    strict: frozenset[str] = frozenset()
    """Further outcomes that fail a test: `improved`, `inconclusive`."""
    min_judged: float = 0
    """Share of the cases, from 0 to 1, that must be judged: else the session fails."""
    wait_quiet_s: float = WAIT_S
    """Most seconds to wait until others stop using the machine; 0: launch again at once."""
    allow_shared: bool = False
    """Show what was measured while others used the machine; nothing of it is judged or recorded."""
    fail_if_busy: bool = False
    """Fail where another session measures on this machine, instead of waiting until it ends."""
    preflight: bool = True
    """Look at several nodes before the first launch on them, and launch nothing on bad ones."""

    @property
    def when_shared(self) -> WhenShared:
        """What to do after a launch during which others used the machine."""
        if self.allow_shared:
            return "stop"
        return "wait" if self.wait_quiet_s else "again"

    def is_failing(self, measurement: Measurement) -> bool:
        """Whether a test fails with this measurement."""
        outcome = measurement.outcome
        if outcome == "failed":
            return measurement.excused is None
        return outcome == "regressed" or outcome in self.strict
