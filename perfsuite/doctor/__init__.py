"""Check a machine and the gate itself. Each module has the checks of one subject."""
