"""Export the results of a session in the formats of other programs."""
