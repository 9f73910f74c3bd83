"""What to run: a case, its model, the hardware that it is meant for. Plain data."""
