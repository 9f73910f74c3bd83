"""Launches on the nodes of a Slurm allocation, and sessions as its jobs."""

PREFIX = "perf_slurm_"  # how the names of the ini keys for Slurm begin
ENVIRONMENT = "PERFSUITE_SLURM_"  # how the names of the environment variables begin that win over a setting
