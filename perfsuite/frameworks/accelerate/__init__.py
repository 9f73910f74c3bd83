"""Hugging Face accelerate, by a strategy or by the user's own config file."""

from perfsuite.frameworks.accelerate.adapter import Accelerate

__all__ = ["Accelerate"]
