from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.errors import CaseError
from perfsuite.ini import Ini
from perfsuite.launch.slurm.settings import Steps, steps, store_of


@pytest.mark.parametrize(
    ("arguments", "store"),
    [
        ("", "kept"),
        ("-k x --perf-store=other -m h100", "other"),
        ("bench_cases --perf-store other bench", "other"),
        ("--perf-store /shared/store", "/shared/store"),
        ("--perf-store", "kept"),
        ("--perf-store=", "kept"),
        ("--perf-storey=1 --perf-sto=2", "kept"),
    ],
)
def test_the_store_is_that_of_the_session(tmp_path: Path, arguments: str, store: str) -> None:
    assert store_of(Ini(tmp_path, {"perf_store": "kept"}), arguments.split()) == tmp_path / store


def test_the_usual_store(tmp_path: Path) -> None:
    assert store_of(Ini(tmp_path, {}), []) == tmp_path / ".perfsuite"


def test_how_steps_are_started_is_told_by_the_environment_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert steps(tmp_path) == Steps()
    lines = [
        "[pytest]",
        "perf_slurm_srun_options = --container-image='a b.sqsh' -v",
        "perf_slurm_python = /opt/python",
    ]
    (tmp_path / "pytest.ini").write_text("\n".join(lines))
    assert steps(tmp_path) == Steps(("--container-image=a b.sqsh", "-v"), "/opt/python")
    monkeypatch.setenv("PERFSUITE_SLURM_SRUN_OPTIONS", "")
    monkeypatch.setenv("PERFSUITE_SLURM_PYTHON", "python3")
    assert steps(tmp_path) == Steps((), "python3")
    monkeypatch.setenv("PERFSUITE_SLURM_SRUN_OPTIONS", "'x")
    with pytest.raises(CaseError, match=r"PERFSUITE_SLURM_SRUN_OPTIONS is \"'x\": No closing quotation"):
        steps(tmp_path)
