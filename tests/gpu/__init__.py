"""Tests for the first day on a GPU, of what only a GPU can show: `make gpu-day`."""
