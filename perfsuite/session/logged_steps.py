"""Read the logged steps of two dry runs, or explain why a step cannot be replayed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perfsuite.analysis.figures import is_in_tf32
from perfsuite.analysis.step_time.expected import why_unknown
from perfsuite.analysis.step_time.prediction import Replays
from perfsuite.analysis.step_time.streams import reported_step
from perfsuite.errors import FileError, PredictionError
from perfsuite.results import device_log_file
from perfsuite.results.counts import COUNTED_STEP, Counts, numbers, of_rank
from perfsuite.results.outcome import Finding
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir

NOT_IN_EACH_STEP = f"not all steps have this change, and a dry run logs only step {COUNTED_STEP}"
IN_TF32 = "the script multiplies fp32 matrices in TF32, whose speed is not known"

Log = RunDir | str  # the directory with the log of a dry run, or the reason why there is no log


class LoggedSteps:
    """The logged steps of arm A and arm B. Each log is read once, and replayed once for each machine."""

    def __init__(self, arms: Sequence[Run], logs: Sequence[Log]) -> None:
        self.arms = arms
        self.logs = logs
        self._steps: dict[Path, Replays | PredictionError | FileError] = {}

    def step(self, arm: int, finding: Finding) -> Replays:
        """Return the reported step as arm A (0) or B (1) logged it on the finding's first rank.

        Raises `PredictionError` or `FileError` if the step cannot be replayed.
        """
        log = self.logs[arm]
        run = self.arms[arm]
        if isinstance(log, str):
            raise PredictionError(log)
        if finding.steps:
            raise PredictionError(NOT_IN_EACH_STEP)
        if is_in_tf32(run):
            raise PredictionError(IN_TF32)
        rank = numbers(finding.ranks)[0]
        reason = why_unknown(of_rank(run.counts, rank) or Counts(), run.case, run.machine)
        if reason is not None:
            raise PredictionError(reason)
        return self._read(log.device_log(rank))

    def _read(self, file: Path) -> Replays:
        if file not in self._steps:
            try:
                self._steps[file] = Replays(reported_step(device_log_file.read(file)))
            except (PredictionError, FileError) as error:
                self._steps[file] = error
        step = self._steps[file]
        if isinstance(step, Exception):
            raise step
        return step
