"""Observe what trains in a process, and what really runs there."""
