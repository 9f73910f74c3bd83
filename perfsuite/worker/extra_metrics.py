"""Record metrics from other packages in one rank, between steps. This module itself imports no torch."""

from collections.abc import Callable, Sequence
from typing import Any

from perfsuite.errors import ExtensionError
from perfsuite.results.metric import MetricRecorder, find_metric


class ExtraMetrics:
    """The recorders of the metrics that a case file names. If one fails, `result` raises its error."""

    def __init__(self, names: Sequence[str], model: Callable[[], Any], rank: int, world_size: int) -> None:
        self._recorders: dict[str, MetricRecorder] = {}
        self._model = model
        self._rank = rank
        self._world_size = world_size
        self._error: ExtensionError | None = None
        for name in names:
            metric = find_metric(name)
            if metric is None:
                raise ExtensionError(
                    f"metric {name!r} is not installed in the environment of the ranks. Install the "
                    "package that provides the metric in that environment as well"
                )
            if metric.recorder is not None:
                self._recorders[name] = self._call(name, metric.recorder)

    def boundary(self, step: int) -> None:
        """Call `begin` of each recorder after the first step, and its `boundary` after each later step."""
        for name, recorder in self._recorders.items():
            if step == 1:
                self._call(name, recorder.begin, self._model(), self._rank, self._world_size)
            else:
                self._call(name, recorder.boundary, step)

    def result(self) -> dict[str, float]:
        """Return the value of each metric that has one. Raises `ExtensionError` if a recorder failed."""
        values = {name: self._call(name, recorder.result) for name, recorder in self._recorders.items()}
        numbers = {
            name: self._call(name, float, value) for name, value in values.items() if value is not None
        }
        if self._error is not None:
            raise self._error
        return numbers

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._error is not None:
            return None
        try:
            return function(*arguments)
        except Exception as error:
            self._error = ExtensionError(
                f"the recorder of metric {name!r} failed: {type(error).__name__}: {error}. Fix the package "
                "that provides it, or uninstall it"
            )
            self._error.__cause__ = error
            return None
