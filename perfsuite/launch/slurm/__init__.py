"""Jobs of Slurm: what it tells about them, and how a session becomes one."""
