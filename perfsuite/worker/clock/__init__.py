"""Measure seconds and memory of a process, step by step."""
