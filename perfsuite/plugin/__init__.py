"""The pytest plugin: markers, the `bench` fixture, skips, statuses and reports. Its modules contain hooks."""

pytest_plugins = [
    f"{__name__}.{name}"
    for name in ("collection", "benchmark", "selection", "ending", "terminal", "others", "options", "run")
]
