"""Launches on the nodes of a Slurm allocation."""
