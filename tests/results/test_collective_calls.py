from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.errors import FileError
from perfsuite.results.collective_calls import CollectiveCall, CollectiveCallsFile, GroupCalls

CALL = CollectiveCall(number=57, name="all_reduce", sizes=((4, 4), ()), dtypes=("Float",), is_done=False)
FILE = CollectiveCallsFile(
    rank=1, world_size=2, groups=(GroupCalls(backend="gloo", name="0", ranks=(0, 1), calls=(CALL,)),)
)


def test_calls_survive_their_file(tmp_path: Path) -> None:
    file = tmp_path / "collectives-0-7.json"
    documents.write(file, FILE)
    assert documents.read(file, CollectiveCallsFile) == FILE


def test_an_edited_file_is_not_trusted(tmp_path: Path) -> None:
    file = tmp_path / "collectives-0-7.json"
    file.write_text(FILE.as_json().replace("57", "58"))
    with pytest.raises(FileError, match="digest"):
        documents.read(file, CollectiveCallsFile)
