import os
import sys
import sysconfig
import time
from pathlib import Path
from types import ModuleType

import pytest

from perfsuite.worker.observation import code


def after_all_edits() -> float:
    """Return a time after all edits of the tests."""
    return time.time() + 60


def digest() -> str | None:
    """Return the digest for a process that started after all edits of the tests."""
    return code.digest(after_all_edits())


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return an imported module that stands for a user's code and has its own file."""
    module = ModuleType("of_a_user")
    module.__file__ = str(tmp_path / "of_a_user.py")
    (tmp_path / "of_a_user.py").write_text("x = 1\n")
    monkeypatch.setitem(sys.modules, "of_a_user", module)
    return module


def test_digest_follows_the_content_of_a_module(module: ModuleType) -> None:
    before = digest()
    assert before is not None
    assert len(before) == 12
    assert digest() == before
    Path(str(module.__file__)).write_text("x = 2\n")
    assert digest() != before


def test_digest_follows_which_modules_are_imported(module: ModuleType) -> None:
    before = digest()
    del sys.modules["of_a_user"]
    assert digest() != before


def test_digest_does_not_depend_on_the_directory(module: ModuleType, tmp_path: Path) -> None:
    before = digest()
    (tmp_path / "elsewhere").mkdir()
    module.__file__ = str(Path(str(module.__file__)).rename(tmp_path / "elsewhere/of_a_user.py"))
    assert digest() == before


def test_size_and_date_identify_a_compiled_module(module: ModuleType, tmp_path: Path) -> None:
    library = tmp_path / "of_a_user.so"
    module.__file__ = str(library)
    library.write_bytes(b"12")
    digests = {digest()}
    library.write_bytes(b"123")
    digests.add(digest())
    os.utime(library, (1, 1))
    digests.add(digest())
    assert len(digests - {None}) == 3


def test_loaded_libraries_are_part_of_the_digest(tmp_path: Path) -> None:
    libraries = {*code._libraries()}
    assert any(name.startswith("libtorch") for name, _ in libraries)
    files = {*code._modules(), *libraries}
    before = digest()
    assert code.digest_of(files, after_all_edits()) == before
    (tmp_path / "libnet.so").write_bytes(b"1")
    files.add(("libnet.so", str(tmp_path / "libnet.so")))
    assert code.digest_of(files, after_all_edits()) not in (before, None)


def test_code_edited_after_the_start_is_unknown(module: ModuleType) -> None:
    """Nothing shows whether the process imported the file before or after the edit."""
    assert digest() is not None
    later = time.time() + 120
    os.utime(str(module.__file__), (later, later))
    assert digest() is None


def test_code_is_unknown_if_the_start_is() -> None:
    assert digest() is not None
    assert code.digest(None) is None


@pytest.mark.parametrize("file", ["of_a_user.py", "packages.zip/of_a_user.py"])
def test_code_that_cannot_be_read_is_unknown(module: ModuleType, tmp_path: Path, file: str) -> None:
    os.remove(str(module.__file__))
    (tmp_path / "packages.zip").touch()
    module.__file__ = str(tmp_path / file)
    assert digest() is None


def test_ignores_what_compilers_generate(module: ModuleType, tmp_path: Path) -> None:
    generated = tmp_path / "compile-caches/inductor/of_a_user.py"
    generated.parent.mkdir(parents=True)
    module.__file__ = str(Path(str(module.__file__)).rename(generated))
    before = digest()
    generated.write_text("x = 2\n")
    assert digest() == before


def test_ignores_the_standard_library_alone(module: ModuleType) -> None:
    before = digest()
    del sys.modules["of_a_user"]
    without = digest()
    library = sysconfig.get_path("stdlib")
    sys.modules["of_a_user"] = module
    module.__file__ = f"{library}/antigravity.py"
    assert digest() == without
    module.__file__ = f"{library}/site-packages/antigravity.py"
    assert digest() not in (without, before)
