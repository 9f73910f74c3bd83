"""Read files that perfsuite did not write, pytest's settings, and git's commits."""
