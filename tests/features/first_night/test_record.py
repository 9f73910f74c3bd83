"""Tests of the record of a first night."""

from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.doctor.rows import passed
from perfsuite.errors import CaseError
from perfsuite.features.first_night.record import FILE, resumed
from tests.features.first_night.nights import make_record, make_result
from tests.samples import make_gpu_machine

OUT = Path("night")
DONE = make_result("machine", passed("clock", "well"))


def test_continues_the_record_in_its_directory() -> None:
    record = make_record(DONE)
    documents.write(OUT / FILE, record)
    assert resumed(OUT, make_record(started_at="later")) == record
    assert resumed(Path("elsewhere"), make_record()) == make_record()


def test_a_repeated_step_replaces_its_result() -> None:
    other = make_result("spread")
    again = make_result("machine", is_complete=False)
    record = make_record(DONE, other).with_result(again)
    assert record.results == (other, again)
    assert (record.of("machine"), record.of("cases")) == (again, None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"machine": make_gpu_machine(count=7)}, "another hardware (cpu-test-2c, now 7 x h100-80gb-sxm)"),
        ({"size": "simulated"}, "another size (tiny, now simulated)"),
        ({"perfsuite": "0.2"}, "another version of perfsuite (0.1.0, now 0.2)"),
    ],
)
def test_another_machine_needs_a_new_directory(changes: dict[str, Any], said: str) -> None:
    documents.write(OUT / FILE, make_record(DONE))
    with pytest.raises(CaseError) as refused:
        resumed(OUT, make_record(**changes))
    assert said in str(refused.value)
    assert str(refused.value).endswith("Give a new directory")


def test_never_writes_between_files_of_others() -> None:
    OUT.mkdir()
    (OUT / "thesis.tex").touch()
    with pytest.raises(CaseError, match=r"--out night: it exists but contains no first night"):
        resumed(OUT, make_record())
