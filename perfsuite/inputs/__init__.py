"""Read other people's files, pytest's settings, and git's commits."""
