"""`perfsuite baseline list | show | diff | accept`: shows baselines, and alone writes reviewed ones."""
