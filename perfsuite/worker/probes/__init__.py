"""Measure a machine apart from any training: its rates, its clocks, what the doctor needs to know."""
