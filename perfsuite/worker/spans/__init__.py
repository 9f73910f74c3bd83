"""Record spans of a run that are not steps: events that are recognised, and phases."""
