"""Record the spans of a run other than steps: recognised events and phases."""
