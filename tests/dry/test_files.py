import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfsuite.dry.files import KEPT, Kept


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """Return a file that exists before the dry run."""
    file = tmp_path / "checkpoint" / "model.pt"
    file.parent.mkdir()
    file.write_text("real")
    return file


@pytest.fixture
def kept(real: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    kept = Kept(tmp_path_factory.mktemp("scratch"))
    with kept.replaced():
        yield kept


def as_before(file: Path) -> bool:
    return os.path.exists(file) and os.stat(file).st_size == len("real")


@pytest.mark.usefixtures("kept")
class TestKept:
    def test_a_file_is_not_overwritten(self, real: Path) -> None:
        with open(real, "wb") as file:
            file.write(b"other")
        assert as_before(real)

    def test_a_file_is_not_overwritten_by_pathlib(self, real: Path) -> None:
        real.write_text("other")
        assert as_before(real)

    def test_a_file_is_not_truncated_by_os_open(self, real: Path) -> None:
        os.close(os.open(real, os.O_WRONLY | os.O_TRUNC))
        assert as_before(real)

    def test_a_file_is_not_truncated_by_its_name(self, real: Path) -> None:
        os.truncate(real, 0)
        assert as_before(real)

    def test_a_script_reads_what_it_wrote(self, real: Path) -> None:
        real.write_text("other")
        assert real.read_text() == "other"

    def test_a_log_can_be_appended_to(self, real: Path) -> None:
        with real.open("a") as file:
            file.write(" line")
        assert real.read_text() == "real line"

    def test_an_empty_lock_is_opened_itself(self, real: Path) -> None:
        lock = real.with_name("empty.lock")
        lock.touch()
        with lock.open("w") as file:
            assert file.name == str(lock)

    def test_an_empty_file_that_existed_stays(self, tmp_path: Path) -> None:
        (tmp_path / "mine").touch()
        kept = Kept(tmp_path / "scratch")
        with kept.replaced(), (tmp_path / "mine").open("wb"):
            pass
        kept.remove_empty()
        assert (tmp_path / "mine").exists()

    def test_a_file_is_not_renamed_over(self, real: Path) -> None:
        new = real.with_suffix(".tmp")
        new.write_text("other")
        new.replace(real)
        assert real.read_text() == "real"
        assert not new.exists()

    def test_a_file_is_not_moved_over(self, real: Path) -> None:
        """fsspec moves a temporary file like this."""
        handle, name = tempfile.mkstemp()
        os.close(handle)
        shutil.move(name, real)
        assert as_before(real)
        assert not Path(name).exists()

    def test_a_file_is_not_renamed(self, real: Path) -> None:
        os.rename(real, real.with_suffix(".old"))
        assert as_before(real)

    def test_a_file_is_not_removed(self, real: Path) -> None:
        real.unlink()
        assert as_before(real)

    def test_a_directory_is_not_removed(self, real: Path) -> None:
        shutil.rmtree(real.parent)
        assert as_before(real)

    def test_files_in_an_open_directory_are_kept(self, real: Path) -> None:
        """`shutil.rmtree` removes files like this."""
        directory = os.open(real.parent, os.O_RDONLY)
        os.unlink(real.name, dir_fd=directory)
        os.close(directory)
        assert as_before(real)

    def test_a_removed_directory_can_be_made_again(self, real: Path) -> None:
        shutil.rmtree(real.parent)
        os.makedirs(real.parent)
        assert as_before(real)

    def test_a_removed_link_can_be_made_again(self, real: Path, kept: Kept) -> None:
        """Lightning links the last checkpoint like this."""
        link = real.with_name("last.pt")
        link.symlink_to(real)
        kept._made.clear()
        link.unlink()
        link.symlink_to("elsewhere")
        assert link.resolve() == real

    def test_a_script_changes_its_own_files(self, real: Path) -> None:
        own = real.with_name("own.txt")
        own.write_text("first")
        own.write_text("second")
        own.rename(real.with_name("renamed.txt"))
        real.with_name("renamed.txt").unlink()
        assert [file.name for file in real.parent.iterdir()] == [real.name]

    def test_a_script_removes_its_own_directory(self, real: Path) -> None:
        own = real.parent / "own"
        (own / "deeper").mkdir(parents=True)
        (own / "deeper" / "file").touch()
        shutil.rmtree(own)
        assert not own.exists()

    def test_a_device_can_be_written_to(self) -> None:
        with open(os.devnull, "w") as file:
            assert file.name == os.devnull


def test_a_kept_file_is_named(real: Path, kept: Kept) -> None:
    real.unlink()
    assert kept.notes() == [f"{KEPT}: {real}"]


def test_nothing_is_named_without_a_kept_file(real: Path, kept: Kept) -> None:
    real.read_text()
    assert kept.notes() == []


def test_a_note_counts_files_beyond_the_first(real: Path, kept: Kept) -> None:
    kept.paths = dict.fromkeys("abcde")
    assert kept.notes() == [f"{KEPT}: a, b, c and 2 more"]


@pytest.mark.parametrize("name", ["HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"])
def test_files_of_a_cache_may_change(
    real: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, str(real.parent))
    with Kept(tmp_path).replaced():
        real.unlink()
    assert not real.exists()


def test_files_of_the_launch_may_change(real: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    with Kept(scratch, free=(real.parent,)).replaced():
        real.write_text("other")
    assert real.read_text() == "other"


def test_functions_are_given_back(real: Path, tmp_path: Path) -> None:
    with Kept(tmp_path / "scratch").replaced():
        pass
    real.unlink()
    assert not real.exists()


def test_an_empty_checkpoint_is_removed(real: Path, kept: Kept) -> None:
    temporary = real.with_suffix(".tmp")
    temporary.open("wb").close()
    temporary.rename(real.with_name("new.pt"))
    kept.remove_empty()
    assert [file.name for file in real.parent.iterdir()] == [real.name]


def test_an_empty_text_is_not_removed(real: Path, kept: Kept) -> None:
    text = real.with_name("log.txt")
    text.open("w").close()
    kept.remove_empty()
    assert text.exists()
