"""Record the events and phases of a training run. Its steps are timed by `worker.clock`."""
