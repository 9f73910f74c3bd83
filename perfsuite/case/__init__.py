"""A case with its model, framework and hardware, as plain data."""
