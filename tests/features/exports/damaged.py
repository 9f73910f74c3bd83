"""Makes a session for `tests.benchmarks.damaged`, which damages the session's file and exports it."""

from pathlib import Path

from tests import samples
from tests.benchmarks.damaged.world import Target, bad_result


def targets(root: Path) -> list[Target]:
    """Make a session of a slow case."""
    results = "results/results.json"
    samples.write_session(root / "exported" / "results", bad_result())
    return [Target("exported", results, "sealed", [("export", results, "--format", "hud")])]
