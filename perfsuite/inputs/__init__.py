"""Read files of others, settings of pytest, and commits of git."""
