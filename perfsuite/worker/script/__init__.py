"""Measure a training loop that is not ours, in a process of a user's script."""
