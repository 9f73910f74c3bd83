"""Observe the training in a process: the model, the optimizers, and the settings that are in effect."""
