"""Show baselines, and make runs the reviewed ones."""
