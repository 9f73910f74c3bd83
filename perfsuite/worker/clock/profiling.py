"""Has torch's profiler record some steps, after the warm-up, of a launch that is made for that."""

import gzip
import json
import warnings
from collections.abc import Callable
from typing import Any, Literal

from perfsuite import documents
from perfsuite.analysis.trace import reduced
from perfsuite.errors import ReportError
from perfsuite.results.profile import PROFILED_STEPS, RankProfileFile
from perfsuite.results.run_dir import RunDir

WARM_STEPS = 1  # steps in which the profiler is there and records nothing: its own start takes time
LARGEST_TRACE = 1 << 30  # characters of a trace that is reduced: that takes many times its bytes, and minutes


class ProfileTaken(BaseException):
    """Ends a training loop when its steps are recorded; no framework takes it for its own error."""


class Profiling:
    """Records the steps after the first `warmup` ones. An error of the profiler becomes a note."""

    def __init__(self, *, warmup: int, device: Literal["cpu", "cuda"]) -> None:
        self.notes: list[str] = []  # why there is no profile
        self.is_over = False  # whether the steps that are to be recorded have ended
        self._warmup = warmup
        self._device = device
        self._profiler: Any = None

    def boundary(self, steps: int) -> None:
        """So many steps have ended, and the next one is about to begin. Raises `ProfileTaken` at the end."""
        if self.is_over or steps < self._warmup:
            return
        self._try(self._start if steps == self._warmup else lambda: self._profiler.step())
        # One more than is asked for: its begin is the end of the last.
        if steps == self._warmup + WARM_STEPS + PROFILED_STEPS + 1:
            self._try(lambda: self._profiler.stop())
            self.is_over = True
            raise ProfileTaken

    def write(self, run_dir: RunDir, rank: int) -> None:
        """Write the trace and what it comes to, after the last step."""
        if self.is_over:
            self._try(lambda: self._write(run_dir, rank))

    def abandon(self) -> None:
        """Stop recording."""
        if self._profiler is not None and not self.is_over:
            self._try(self._profiler.stop)

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile, schedule

        on_gpu = [ProfilerActivity.CUDA] if self._device == "cuda" else []
        plan = schedule(wait=0, warmup=WARM_STEPS, active=PROFILED_STEPS + 1, repeat=1)
        self._profiler = profile(activities=[ProfilerActivity.CPU, *on_gpu], schedule=plan)
        self._profiler.start()

    def _write(self, run_dir: RunDir, rank: int) -> None:
        trace = run_dir.trace(rank)
        self._profiler.export_chrome_trace(str(trace))
        with gzip.open(trace, "rt", encoding="utf-8", errors="replace") as file:
            text = file.read(LARGEST_TRACE + 1)
        if len(text) > LARGEST_TRACE:
            raise ReportError(f"{trace} is larger than {LARGEST_TRACE >> 30} GiB, and only kept")
        events = json.loads(text)["traceEvents"]
        documents.write(run_dir.profile(rank), RankProfileFile(profile=reduced(events, self._device)))

    def _try(self, do: Callable[[], object]) -> None:
        """Use the profiler, whatever warnings mean in this process, unless it has failed before."""
        if self.notes:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                do()
        except Exception as error:
            self.notes.append(f"no profile: {type(error).__name__}: {error}")
