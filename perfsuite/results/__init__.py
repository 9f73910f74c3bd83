"""What was measured, as files, and how the files of one launch become one document."""

from perfsuite.results.metric import Metric, MetricRecorder
from perfsuite.results.run import Figures, Run

__all__ = ["Figures", "Metric", "MetricRecorder", "Run"]
