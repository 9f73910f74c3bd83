"""Inside a rank: measure a training loop from within its process."""
