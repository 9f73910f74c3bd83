"""Load a plugin for this repository's own tests. perfsuite itself is loaded by its `pytest11` entry point."""

pytest_plugins = ["pytester"]
