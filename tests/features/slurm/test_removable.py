"""The folders of Slurm, `perfsuite/features/slurm` and `tests/features/slurm`, can be deleted."""

from tests.doc_pages import ROOT

OURS = (ROOT / "perfsuite" / "features" / "slurm", ROOT / "tests" / "features" / "slurm")
CODE = ("perfsuite", "tests", "bench_cases", "docs")


def test_no_other_code_imports_them() -> None:
    files = [ROOT / "conftest.py", *(file for name in CODE for file in (ROOT / name).rglob("*.py"))]
    others = [file for file in files if not any(map(file.is_relative_to, OURS))]
    assert len(others) > 500
    assert [file for file in others if "features.slurm" in file.read_text()] == []
