"""Judge step times that perfsuite did not measure."""
