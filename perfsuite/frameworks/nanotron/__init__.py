"""nanotron: data, tensor and pipeline parallelism."""

from perfsuite.frameworks.nanotron.adapter import Nanotron

__all__ = ["Nanotron"]
