"""Show baselines, and turn runs into reviewed baselines."""
