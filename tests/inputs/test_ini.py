from pathlib import Path

import pytest

from perfsuite.errors import FileError
from perfsuite.inputs.ini import read_ini

TOML = """
perf_launcher = "local"
perf_store = "kept"
"""
INI = """
perf_launcher = local
perf_store = kept
"""


@pytest.mark.parametrize(
    ("name", "table"),
    [
        *(("pyproject.toml", "tool.pytest.ini_options"), ("pyproject.toml", "tool.pytest")),
        *(
            (name, "pytest")
            for name in ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "tox.ini")
        ),
        ("setup.cfg", "tool:pytest"),
    ],
)
def test_reads_settings_from_each_kind_of_file(tmp_path: Path, name: str, table: str) -> None:
    (tmp_path / name).write_text(f"[{table}]{TOML if name.endswith('toml') else INI}")
    ini = read_ini(tmp_path)
    assert ini.values["perf_launcher"] == "local"
    assert ini.directories() == {"store": str(tmp_path / "kept")}


def test_nearest_file_about_pytest_wins(tmp_path: Path) -> None:
    below = tmp_path / "cases" / "night"
    below.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest]{TOML}")
    (tmp_path / "cases" / "tox.ini").write_text("[tox]\n")
    (tmp_path / "cases" / "pyproject.toml").write_text("[tool.ruff]\n")
    assert read_ini(below).root == tmp_path
    (tmp_path / "cases" / "pytest.ini").write_text("")
    assert read_ini(below).root == tmp_path / "cases"
    assert "perf_launcher" not in read_ini(below).values


def test_directories_are_relative_to_their_file(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nperf_store = ../shared\nperf_baselines = /figures\n")
    below = tmp_path / "cases"
    below.mkdir()
    directories = read_ini(below).directories()
    assert directories == {"store": f"{tmp_path}/../shared", "baselines": "/figures"}


def test_without_a_file_nothing_is_set(tmp_path: Path) -> None:
    assert read_ini(tmp_path).root == tmp_path
    assert read_ini(tmp_path).values == {}
    below = tmp_path / "below"
    below.mkdir()
    assert read_ini(below).root == below
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\n")
    assert (read_ini(below).root, read_ini(below).values) == (tmp_path, {})


@pytest.mark.parametrize(
    ("name", "text"), [("pyproject.toml", "[tool"), ("pytest.ini", "x = 1"), ("tox.ini", b"\xff")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str | bytes) -> None:
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(FileError, match=f"{name} cannot be read: "):
        read_ini(tmp_path)


def test_a_number_with_too_many_digits_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest]\nperf_max_launches = {'9' * 5000}")
    with pytest.raises(FileError, match=r"pyproject\.toml cannot be read: Exceeds the limit \(4300 digits\)"):
        read_ini(tmp_path)
