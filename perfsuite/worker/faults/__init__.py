"""Inject faults on request, to test the gate."""
