"""Records anew what launches count whose dry runs `test_rank.py` compares: `python -m tests.dry.record`."""

import tempfile
from pathlib import Path

from perfsuite import documents
from perfsuite.measure import launch_once
from perfsuite.node.machine import detect_cpu
from perfsuite.results.count_baseline import CountBaseline, from_runs

if __name__ == "__main__":
    for file in Path(__file__).with_name("reviewed").iterdir():
        with tempfile.TemporaryDirectory() as directory:
            case = documents.read(file, CountBaseline).case
            run = launch_once(case, detect_cpu("a twin"), Path(directory, "launch"))
        assert run.failure is None, run.failure
        documents.write(file, from_runs([run]))
