"""Export the history as asv's result files and pages."""
