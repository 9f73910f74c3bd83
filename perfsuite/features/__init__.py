"""Features that the rest of perfsuite does not need. Each has an engine and the commands that use it."""
