"""The results of many nightly runs: store them, show them as asv pages, search them for trends."""
