"""Launches on the nodes of a Slurm allocation, and sessions as its jobs."""

PREFIX = "perf_slurm_"  # prefix of the ini keys for Slurm
ENVIRONMENT = "PERFSUITE_SLURM_"  # prefix of the environment variables that override a setting
