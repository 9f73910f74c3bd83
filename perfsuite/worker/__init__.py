"""Measure a training loop from inside its own process (a rank)."""
