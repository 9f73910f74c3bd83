"""Search commits and releases for the change that made a case slower or changed its step."""
