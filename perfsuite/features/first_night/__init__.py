"""Examine a new GPU machine in one command: `perfsuite first-night`."""
