"""Reads what others wrote: files, settings of pytest, and commits of git."""
