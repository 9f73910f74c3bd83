"""Inject a fault on request (`--perf-inject`), to test whether perfsuite finds it.

docs/evidence/faults.md lists the faults.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perfsuite.case.fault import AT_STEP, Fault

if TYPE_CHECKING:
    from perfsuite.results.rank_report import RankReport
    from perfsuite.worker.clock.recorder import Recorder

# The index of the second step, in which perfsuite observes the settings of the training. A structural fault
# begins after this step.
STRUCTURAL_AFTER = 1
BREAKDOWNS = ("crash", "exit", "oom", "hang")
"""The faults with which the last rank fails in a step."""


class Injector:
    """Injects one fault into one rank.

    `training` returns the model and the optimizer. Either of them is None if it does not exist. In the last
    rank, `on_reached` is called before a fault ends the launch.
    """

    def __init__(
        self,
        fault: Fault,
        *,
        is_last_rank: bool,
        training: Callable[[], tuple[Any, Any]] = lambda: (None, None),
        on_reached: Callable[[], object] = lambda: None,
    ) -> None:
        self.fault = fault
        self.is_last_rank = is_last_rank
        self._training = training
        self._on_reached = on_reached
        self._held: Any = None

    def before_end(self, step: int, recorder: Recorder) -> None:
        """If the fault belongs to this step, inject it before the clock stamps the end of the step."""
        kind = self.fault.kind
        size = self.fault.size
        if kind == "slowdown":
            recorder.lengthen(size)
        elif kind == "stall" and step % int(size) == int(size) - 1:
            recorder.lengthen(2)
        elif kind == "leak" and step == AT_STEP:
            self._held = _hold(size, recorder)
        elif step == STRUCTURAL_AFTER and self.fault.structural is not None:
            from perfsuite.worker.faults import structural_faults

            structural_faults.begin(self.fault.structural, *self._training())
        elif self.is_last_rank and step == AT_STEP:
            self._break_down(recorder)

    def _break_down(self, recorder: Recorder) -> None:
        if self.fault.kind in BREAKDOWNS:
            self._on_reached()
        match self.fault.kind:
            case "crash":
                raise RuntimeError("injected crash")
            case "exit":
                os._exit(13)
            case "oom":
                _run_out_of_memory(recorder)
            case "hang":
                while True:
                    time.sleep(1)

    def report(self, report: RankReport) -> RankReport | None:
        """Return the report that the rank writes with this fault, or None if it writes no report."""
        memory = report.memory
        match self.fault.kind:
            case "nan":
                return report.replace(loss=(*report.loss[:-1], float("nan")))
            case "loss":
                return report.replace(loss=report.loss[:1] * len(report.loss))
            case "missing-metric":
                return report.replace(memory=None)
            case "leak" if memory is not None and memory.method == "simulated":
                return report.replace(memory=memory.replace(peak=round(memory.peak * (1 + self.fault.size))))
            case "missing-rank" if self.is_last_rank:
                self._on_reached()
                return None
        return report


def _run_out_of_memory(recorder: Recorder) -> None:
    device = getattr(recorder.memory, "device", None)
    if device is None:
        raise MemoryError("injected: out of memory")
    import torch

    _, size = torch.cuda.mem_get_info(device)
    torch.empty(2 * size, dtype=torch.uint8, device=device)


def _hold(share: float, recorder: Recorder) -> Any:
    if recorder.memory is None:
        return None  # the report of a simulated run is changed instead
    import torch

    size = int(recorder.memory.read().peak * share)
    return torch.ones(size, dtype=torch.uint8, device=getattr(recorder.memory, "device", "cpu"))
