"""torchtitan, by its own trainer."""

from perfsuite.frameworks.torchtitan.adapter import TorchTitan

__all__ = ["TorchTitan"]
