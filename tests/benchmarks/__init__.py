"""Timings of perfsuite itself, run by hand: `make figures`. Not tests: nothing here passes or fails."""
