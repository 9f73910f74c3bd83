"""Record spans of a run that are not steps: recognised events, and phases."""
