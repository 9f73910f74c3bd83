"""Damages files that perfsuite reads, and looks for tracebacks, hangs and verdicts that improve by it."""
