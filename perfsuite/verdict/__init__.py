"""Judge measurements against their baselines. Pure: no access to disk or clock."""
