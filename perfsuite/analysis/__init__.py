"""Reduce and judge the files of launches: figures, traces, health, causes of failures."""
