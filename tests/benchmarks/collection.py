"""Measures how long collecting 5,000 cases takes compared with collecting 5,000 empty parametrized tests.

The cases and the empty tests are collected alternately, and the median times are compared.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

CASES = """
import pytest
from perfsuite import DDP, Case, Topology

BASE = Case(model="llama-3.1-8b", framework=DDP(), sequence_length=4096, micro_batch=1,
            topology=Topology(processes_per_node=8), hardware=("h100", "a100"))

@pytest.mark.parametrize("case", [BASE.replace(micro_batch=n + 1) for n in range(5000)])
def test_it(bench, case):
    bench(case)

def test_torch_was_not_imported():
    import sys
    assert "torch" not in sys.modules
"""
EMPTY = """
import pytest

@pytest.mark.parametrize("number", range(5000))
def test_it(number):
    pass
"""


def seconds(directory: Path, *plugins: str) -> float:
    """Return how many seconds `pytest --collect-only` takes in a directory."""
    began = time.perf_counter()
    run_pytest(directory, "--collect-only", "-qq", *plugins)
    return time.perf_counter() - began


def run_pytest(directory: Path, *words: str) -> None:
    """Run pytest quietly in a directory."""
    command = [sys.executable, "-m", "pytest", *words]
    subprocess.run(command, cwd=directory, stdout=subprocess.DEVNULL, check=True)


def main(rounds: int = 7) -> None:
    """Print the median times of the empty tests and of the cases, and the longest time allowed for cases."""
    with tempfile.TemporaryDirectory() as root:
        cases = Path(root, "cases")
        empty = Path(root, "empty")
        for directory, content in ((cases, CASES), (empty, EMPTY)):
            directory.mkdir()
            (directory / "test_it.py").write_text(content)
        ours = []
        theirs = []
        for _ in range(rounds):
            theirs.append(seconds(empty, "-p", "no:perfsuite"))
            ours.append(seconds(cases))
        run_pytest(cases, "-q", "-k", "torch_was_not")
    bound = 1.5 * median(theirs) + 0.5
    print(f"5,000 empty tests {median(theirs):.2f} s, 5,000 cases {median(ours):.2f} s (bound {bound:.2f} s)")
    print("torch was not imported")


if __name__ == "__main__":
    main()
