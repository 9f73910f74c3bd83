"""Measure the training loop of a user's script, in a process of that script."""
