"""Check a machine, and test the gate with injected faults. Each module has the checks of one subject."""
