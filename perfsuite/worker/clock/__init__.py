"""Measure the time and memory of a process, step by step."""
