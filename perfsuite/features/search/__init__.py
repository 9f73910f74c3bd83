"""Search commits and releases for what made a case slower, or changed its step."""
