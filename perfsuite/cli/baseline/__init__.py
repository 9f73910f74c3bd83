"""`perfsuite baseline list | show | diff | accept`: show baselines, and write reviewed ones."""
