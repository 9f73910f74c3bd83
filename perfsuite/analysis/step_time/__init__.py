"""Predict the time of a training step from the log of a dry run."""
