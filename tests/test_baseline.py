from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from perfsuite import baseline, data
from perfsuite.baseline import Baseline
from perfsuite.errors import CaseError, FileError
from perfsuite.result import Flops, Observed
from tests.samples import make_case, make_figures, make_machine, make_run

CLASS = "cpu-test-2c"
CASE = make_case()


def accepted(tokens_per_s: float = 1000) -> Baseline:
    return baseline.from_runs([make_run(figures=make_figures(tokens_per_s=tokens_per_s))])


def stored(directory: Path, tokens_per_s: float = 1000) -> Path:
    path = baseline.path(directory, CLASS, CASE)
    data.write(path, accepted(tokens_per_s))
    return path


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (123456789.0, 123457000.0),
        (0.000123456789, 0.000123457),
        (1.0000004, 1.0),
        (-7.6543219, -7.65432),
        (999999.9, 1000000.0),
        (0.0, 0.0),
        (None, None),
        (math.inf, math.inf),
    ],
)
def test_figures_are_kept_to_six_digits(value: float | None, kept: float | None) -> None:
    run = make_run(figures=make_figures(tokens_per_s=value))
    assert baseline.from_runs([run]).launches[0].tokens_per_s == kept


def test_a_figure_that_is_no_number_is_kept() -> None:
    run = make_run(figures=make_figures(tokens_per_s=math.nan))
    kept = baseline.from_runs([run]).launches[0].tokens_per_s
    assert kept is not None
    assert math.isnan(kept)


def test_from_runs_keeps_every_launch_and_what_the_first_one_was() -> None:
    flops = Flops(formula="palm-1", per_token=1.5, parameters=2, matmul_parameters=3)
    seen = Observed(settings={"a": "b"}, environment={"c": "d"})
    runs = [
        make_run(figures=make_figures(tokens_per_s=speed), flops=flops, observed=seen) for speed in (1, 2, 4)
    ]
    made = baseline.from_runs(runs)
    assert [launch.tokens_per_s for launch in made.launches] == [1, 2, 4]
    assert (made.case, made.hardware_class) == (CASE, CLASS)
    assert (made.flops, made.observed, made.recorded_at) == (flops, seen, "2026-01-02T03:04:05+00:00")


def test_median_over_the_launches_that_have_the_figure() -> None:
    figures = [make_figures(mfu=mfu) for mfu in (0.5, None, 0.3, 0.4, None)]
    made = baseline.from_runs([make_run(figures=each) for each in figures])
    assert made.median("mfu") == 0.4
    assert made.median("alloc_retries") is None


def test_a_baseline_without_launches_cannot_be() -> None:
    with pytest.raises(CaseError, match=r"Baseline: launches: .*at least 1 item"):
        accepted().replace(launches=())


def test_path_is_class_and_id(tmp_path: Path) -> None:
    machine = make_machine(hardware_class="h100-80gb-sxm")
    assert (
        baseline.path(tmp_path, machine.hardware_class, CASE)
        == tmp_path / "h100-80gb-sxm" / f"{CASE.id}.json"
    )


def test_find_takes_the_first_directory_that_has_one(tmp_path: Path) -> None:
    reviewed, local, nowhere = tmp_path / "reviewed", tmp_path / "local", tmp_path / "nowhere"
    stored(local, 2)
    assert baseline.find([nowhere, local], CLASS, CASE) == (accepted(2), baseline.path(local, CLASS, CASE))
    stored(reviewed, 1)
    assert baseline.find([reviewed, local], CLASS, CASE) == (
        accepted(1),
        baseline.path(reviewed, CLASS, CASE),
    )
    assert baseline.find([local, reviewed], CLASS, CASE) == (accepted(2), baseline.path(local, CLASS, CASE))


def test_find_nothing(tmp_path: Path) -> None:
    stored(tmp_path)
    assert baseline.find([], CLASS, CASE) is None
    assert baseline.find([tmp_path], "h100-80gb-sxm", CASE) is None
    assert baseline.find([tmp_path], CLASS, make_case(micro_batch=3)) is None


def test_a_file_in_the_wrong_place_is_an_error_that_says_what_it_holds(tmp_path: Path) -> None:
    other = make_case(micro_batch=3)
    wrong = baseline.path(tmp_path, CLASS, other)
    stored(tmp_path).rename(wrong)
    with pytest.raises(FileError) as caught:
        baseline.find([tmp_path], CLASS, other)
    message = str(caught.value)
    assert message.startswith(f"{wrong}: it holds the baseline of {CASE.id} on {CLASS}.")
    assert "move it or delete it" in message


def test_a_file_of_another_class_is_an_error(tmp_path: Path) -> None:
    wrong = baseline.path(tmp_path, "h100-80gb-sxm", CASE)
    wrong.parent.mkdir()
    stored(tmp_path).rename(wrong)
    with pytest.raises(FileError, match=f"it holds the baseline of {CASE.id} on {CLASS}"):
        baseline.find([tmp_path], "h100-80gb-sxm", CASE)


def test_a_bad_first_file_is_an_error_though_another_directory_has_a_good_one(tmp_path: Path) -> None:
    bad = stored(tmp_path / "reviewed")
    stored(tmp_path / "local")
    bad.write_text(bad.read_text()[:100])
    with pytest.raises(FileError, match="not JSON") as caught:
        baseline.find([tmp_path / "reviewed", tmp_path / "local"], CLASS, CASE)
    assert str(bad) in str(caught.value)


def test_a_bad_field_is_named(tmp_path: Path) -> None:
    path = stored(tmp_path)
    content = json.loads(path.read_text())
    content["launches"][0]["tokens_per_s"] = "fast"
    path.write_text(json.dumps(content))
    with pytest.raises(FileError, match=r"field launches\.0\.tokens_per_s: .*got 'fast'"):
        baseline.find([tmp_path], CLASS, CASE)


def test_a_directory_in_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    baseline.path(tmp_path, CLASS, CASE).mkdir(parents=True)
    with pytest.raises(FileError, match=r"cannot read .*Is a directory"):
        baseline.find([tmp_path], CLASS, CASE)
