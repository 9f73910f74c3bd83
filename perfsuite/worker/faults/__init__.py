"""Carry out faults on request, to test the gate."""
