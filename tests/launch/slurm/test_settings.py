from __future__ import annotations

from pathlib import Path

import pytest

from perfsuite.errors import CaseError
from perfsuite.ini import Ini
from perfsuite.launch.slurm.settings import Steps, option, steps, store_of


def test_the_store_is_that_of_the_session(tmp_path: Path) -> None:
    ini = Ini(tmp_path, {"perf_store": "kept"})
    assert store_of(ini, []) == tmp_path / "kept"
    assert store_of(Ini(tmp_path, {}), []) == tmp_path / ".perfsuite"
    assert store_of(ini, ["-k", "x", "--perf-store=other"]) == tmp_path / "other"
    assert store_of(ini, ["--perf-store", "other"]) == tmp_path / "other"
    assert store_of(ini, ["--perf-store", "/shared/store"]) == Path("/shared/store")


def test_the_value_of_an_option() -> None:
    assert option([], "--x") is None
    assert option(["--x"], "--x") is None
    assert option(["--xy=1"], "--x") is None
    assert option(["--x="], "--x") == ""
    assert option(["a", "--x", "b", "c"], "--x") == "b"


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
