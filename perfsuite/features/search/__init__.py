"""Search commits and releases for the change that made a case slower or changed the work of its training."""
