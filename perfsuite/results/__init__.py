"""Classes for measurements, and for the files in which measurements are stored."""

from perfsuite.results.metric import Metric, MetricRecorder
from perfsuite.results.run import Figures, Run
from perfsuite.results.session_file import SessionFile

__all__ = ["Figures", "Metric", "MetricRecorder", "Run", "SessionFile"]
