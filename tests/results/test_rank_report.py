from pathlib import Path

import pytest

from perfsuite import documents
from perfsuite.errors import CaseError, FileError
from perfsuite.results.rank_report import RankEvidence, RankReport, SpanTimes
from tests.samples import make_report, make_run


def test_report_knows_only_measurements(tmp_path: Path) -> None:
    report = RankReport(rank=0, world_size=1, host="n1", clock="perf_counter")
    documents.write(tmp_path / "rank-0.json", report)
    assert documents.read(tmp_path / "rank-0.json", RankReport) == report
    unknown = report.model_dump(exclude={"schema_version", "rank", "world_size", "host", "clock"})
    assert not any(unknown.values())
    assert not any(RankEvidence(data_parallel=1).model_dump(exclude={"data_parallel"}).values())
    assert not make_run().dry
    other = (tmp_path / "rank-0.json").read_text().replace('"schema_version": 1', '"schema_version": 2')
    (tmp_path / "rank-0.json").write_text(other)
    with pytest.raises(FileError, match="field schema_version: this perfsuite reads 1, got 2"):
        documents.read(tmp_path / "rank-0.json", RankReport)


@pytest.mark.parametrize("changes", [{"rank": -1}, {"world_size": 0}])
def test_refuses_negative_ranks_and_empty_jobs(changes: dict[str, int]) -> None:
    with pytest.raises(CaseError, match="greater than or equal to"):
        make_report(**changes)
    with pytest.raises(CaseError, match="greater than or equal to 1"):
        RankEvidence(data_parallel=0)


def test_waits_are_part_of_the_occurrences() -> None:
    times = SpanTimes(seconds=(1.0, 2.0, 6.0), steps=(5, 10, 12), waits=1)

    assert (times.occurrences, times.mean_s) == (2, 4.5)
    assert SpanTimes(seconds=(3.0,), steps=(5,), waits=1).mean_s == 3
