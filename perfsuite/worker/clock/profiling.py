"""Use torch's profiler to record some steps after the warm-up, in a separate launch."""

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

WARM_STEPS = 1  # number of steps in which the profiler runs without recording, because its start takes time
# Maximum size of a trace, in characters. Summarising a larger trace would take minutes, and would need many
# times the trace's size in memory.
LARGEST_TRACE = 1 << 30


class ProfileTaken(BaseException):
    """Ends a training loop when all steps of the profile have been recorded.

    It derives from `BaseException`, so that no framework handles it as an error.
    """


class Profiling:
    """Records some steps after the first `warmup` steps. An error of the profiler becomes a note."""

    def __init__(
        self, *, warmup: int, device: Literal["cpu", "cuda"], largest_trace: int = LARGEST_TRACE
    ) -> None:
        self.notes: list[str] = []  # reasons why there is no profile
        self.is_over = False  # whether all steps to be recorded have ended
        self._warmup = warmup
        self._device = device
        self._largest_trace = largest_trace
        self._profiler: Any = None

    def boundary(self, steps: int) -> None:
        """Advance the profiler after `steps` steps. After the last recorded step, raises `ProfileTaken`."""
        if self.is_over or steps < self._warmup:
            return
        self._try(self._start if steps == self._warmup else lambda: self._profiler.step())
        # Record one step more than requested. Its beginning marks the end of the last requested step.
        if steps == self._warmup + WARM_STEPS + PROFILED_STEPS + 1:
            self._try(lambda: self._profiler.stop())
            self.is_over = True
            raise ProfileTaken

    def write(self, run_dir: RunDir, rank: int) -> None:
        """Write the trace and its summary, after the last step."""
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
            text = file.read(self._largest_trace + 1)
        if len(text) > self._largest_trace:
            limit = f"{self._largest_trace >> 30} GiB"
            raise ReportError(f"{trace} is kept, but too large to summarise (over {limit})")
        events = json.loads(text)["traceEvents"]
        documents.write(run_dir.profile(rank), RankProfileFile(profile=reduced(events, self._device)))

    def _try(self, do: Callable[[], object]) -> None:
        """Call the profiler with warnings silenced, unless an earlier call has failed."""
        if self.notes:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                do()
        except Exception as error:
            self.notes.append(f"no profile: {type(error).__name__}: {error}")
