"""Judge measurements against their baselines. Pure: uses neither disk nor clock."""
