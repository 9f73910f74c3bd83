"""For this repository's own tests; perfsuite itself comes through its `pytest11` entry point."""

pytest_plugins = ["pytester"]
