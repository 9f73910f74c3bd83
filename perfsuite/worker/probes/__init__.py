"""Measure a machine: its rates, its clocks, and the facts that `perfsuite doctor` needs."""
