"""Features that can be deleted: each folder holds an engine and the commands that show it."""
