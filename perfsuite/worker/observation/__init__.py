"""Observe the training in a process: its model, optimizers, and the settings that are really in effect."""
