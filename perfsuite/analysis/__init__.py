"""What judges or reduces the files of launches: figures, traces, health, why one failed."""
