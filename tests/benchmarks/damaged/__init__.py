"""Damages files that perfsuite reads, and looks for tracebacks, hangs and verdicts that got better by it."""
