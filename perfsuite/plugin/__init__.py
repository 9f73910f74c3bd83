"""The pytest plugin: markers, the `bench` fixture, skips, statuses and reports, each a hook of a module."""

pytest_plugins = [
    f"{__name__}.{name}"
    for name in ("collection", "benchmark", "selection", "ending", "others", "options", "run")
]
