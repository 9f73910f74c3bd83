"""What a session of cases shares: options, machine, noise, results. Imports neither torch nor pytest."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path

from perfsuite import baseline, data
from perfsuite.case import Case
from perfsuite.hardware import Machine, detect
from perfsuite.judge import UNMEASURED, Outcome, Policy, Verdict, judge
from perfsuite.noise import ClassNoise, class_noise
from perfsuite.progress import Progress
from perfsuite.report import Result, Skipped
from perfsuite.result import Run
from perfsuite.run import measure, unsupported


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user may choose."""

    store: Path
    baselines: Path
    policy: Policy
    inject: str | None = None
    fail_without_baseline: bool = False
    strict_improved: bool = False
    strict_inconclusive: bool = False


@dataclass
class Session:
    """Measures one case after another on this machine."""

    options: Options
    progress: Progress
    results: list[Result] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    @cached_property
    def machine(self) -> Machine:
        """Looked at once, and only if something is measured."""
        return detect()

    @cached_property
    def baseline_directories(self) -> list[Path]:
        """Reviewed baselines come before local ones."""
        return [self.options.baselines, self.options.store / "baselines"]

    @cached_property
    def noise(self) -> ClassNoise:
        """Pooled over all baselines of this machine's class, as they were when it was first asked for."""
        return class_noise(baseline.of_class(self.baseline_directories, self.machine.hardware_class))

    @cached_property
    def _files(self) -> Path:
        return self.options.store / "runs" / datetime.now().strftime("%Y%m%d-%H%M%S-%f")

    def skip_reason(self, case: Case, nodeid: str) -> str | None:
        """Why this machine cannot run `case`, which is then kept as skipped, or None."""
        reason = unsupported(case, self.machine)
        if reason is not None:
            skipped = Skipped(nodeid=nodeid, case_id=case.id, framework=case.framework.name, reason=reason)
            self.skipped.append(skipped)
        return reason

    def measure(self, case: Case, nodeid: str) -> Result:
        """Launch, compare and judge until decided; record what has no baseline yet."""
        hardware_class = self.machine.hardware_class
        found = baseline.find(self.baseline_directories, hardware_class, case)
        accepted, file = found or (None, None)
        directory = self._files / case.id
        if accepted is None and self.options.fail_without_baseline:
            runs: list[Run] = []
            verdict = self._no_baseline()
        else:
            runs, verdict = measure(
                case,
                self.machine,
                directory,
                lambda runs: judge(runs, accepted, self.noise, self.options.policy),
                inject=self.options.inject,
                on_launch=lambda launch: self.progress.begin(case.id, case.total_steps, launch),
                on_progress=self.progress.step,
            )
            self.progress.end(verdict.outcome)
        if verdict.outcome == "recorded" and self.options.inject is None:
            file = baseline.path(self.baseline_directories[-1], hardware_class, case)
            data.write(file, baseline.from_runs(runs))
        result = Result(
            nodeid=nodeid,
            case_id=case.id,
            framework=case.framework.name,
            runs=tuple(runs),
            verdict=verdict,
            baseline_file=str(file) if file else None,
            directory=str(directory),
        )
        self.results.append(result)
        return result

    def _no_baseline(self) -> Verdict:
        directories = " or ".join(map(str, self.baseline_directories))
        reason = f"no baseline on {self.machine.hardware_class} in {directories}, and --perf-no-baseline=fail"
        return Verdict(outcome="failed", launches=0, failure="no_baseline", reasons=(reason,))

    def is_failing(self, outcome: Outcome) -> bool:
        """Whether a test fails with this outcome."""
        return (
            outcome in ("regressed", "failed")
            or (outcome == "improved" and self.options.strict_improved)
            or (outcome == "inconclusive" and self.options.strict_inconclusive)
        )

    @property
    def nothing_measured(self) -> bool:
        """Whether no result says anything about the speed of the code."""
        return all(result.verdict.outcome in UNMEASURED for result in self.results)
