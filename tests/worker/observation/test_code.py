import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from perfsuite.worker.observation import code


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return an imported module of a user's own, in a file of its own."""
    module = ModuleType("of_a_user")
    module.__file__ = str(tmp_path / "of_a_user.py")
    (tmp_path / "of_a_user.py").write_text("x = 1\n")
    monkeypatch.setitem(sys.modules, "of_a_user", module)
    return module


def test_digest_follows_the_content_of_a_module(module: ModuleType) -> None:
    before = code.digest()
    assert len(before) == 12
    assert code.digest() == before
    Path(str(module.__file__)).write_text("x = 2\n")
    assert code.digest() != before


def test_digest_follows_which_modules_are_imported(module: ModuleType) -> None:
    before = code.digest()
    del sys.modules["of_a_user"]
    assert code.digest() != before


def test_digest_does_not_depend_on_the_directory(module: ModuleType, tmp_path: Path) -> None:
    before = code.digest()
    (tmp_path / "elsewhere").mkdir()
    module.__file__ = str(Path(str(module.__file__)).rename(tmp_path / "elsewhere/of_a_user.py"))
    assert code.digest() == before


def test_size_identifies_a_compiled_module(module: ModuleType, tmp_path: Path) -> None:
    library = tmp_path / "of_a_user.so"
    module.__file__ = str(library)
    library.write_bytes(b"12")
    before = code.digest()
    library.write_bytes(b"123")
    assert code.digest() != before


def test_deleted_file_is_not_the_same(module: ModuleType) -> None:
    before = code.digest()
    os.remove(str(module.__file__))
    assert code.digest() != before


def test_ignores_what_compilers_generate(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    before = code.digest()
    Path(str(module.__file__)).write_text("x = 2\n")
    assert code.digest() == before


def test_ignores_the_standard_library_alone(module: ModuleType) -> None:
    before = code.digest()
    del sys.modules["of_a_user"]
    without = code.digest()
    library = sysconfig.get_path("stdlib")
    sys.modules["of_a_user"] = module
    module.__file__ = f"{library}/antigravity.py"
    assert code.digest() == without
    module.__file__ = f"{library}/site-packages/antigravity.py"
    assert code.digest() not in (without, before)
