"""Read files of unknown origin, pytest's settings, and commits from git."""
