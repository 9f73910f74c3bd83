"""Features that the rest of perfsuite does not need. A folder has an engine and the commands that use it."""
