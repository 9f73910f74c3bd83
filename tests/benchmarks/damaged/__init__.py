"""Damages files that perfsuite reads, and looks for tracebacks, for hangs, and for improved verdicts."""
