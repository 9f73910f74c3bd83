"""Measure a training loop from within its own process, a rank."""
