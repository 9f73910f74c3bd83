"""Launch jobs on the nodes of a Slurm allocation."""
