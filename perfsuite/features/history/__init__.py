"""The results of many nightly runs: store them, show them on pages, and find trends."""
