"""`perfsuite doctor`: check this machine. Each module has the checks of one subject."""
