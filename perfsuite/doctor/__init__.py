"""Check a machine, and the gate itself: each module has the checks of one subject."""
