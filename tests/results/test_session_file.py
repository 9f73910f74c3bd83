from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.documents import plain
from perfsuite.results.metric import GATED
from perfsuite.results.outcome import Verdict
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Figures, Run
from perfsuite.results.session_file import Measurement, SessionFile, Skipped
from perfsuite.verdict.judge import Policy, judge
from perfsuite.verdict.noise import ClassNoise
from perfsuite.verdict.sequential import Noise
from tests.samples import (
    BEFORE,
    DISTURBED,
    NOISE,
    make_image_result,
    make_result,
    make_run,
    make_session_file,
    make_shared,
    never_run,
    now,
)

# The figures of a result


def test_figures_are_the_medians_over_the_launches_that_have_them() -> None:
    runs = [now(tokens_per_s=speed, mfu=mfu) for speed, mfu in ((3, None), (1, 0.4), (2, 0.2))]
    figures = make_result(*runs, before=None).figures
    assert figures.tokens_per_s == 2
    assert figures.mfu == pytest.approx(0.3)
    assert (figures.step_jitter, figures.alloc_retries) == (1.1, None)


def test_measured_steps_are_those_in_the_windows_of_all_launches() -> None:
    first = make_run(step_s=(9.0, 0.1, 0.2), window=(1, 3))
    second = make_run(step_s=(8.0, 8.0, 0.3), window=(2, 3))
    assert make_result(first, second, before=None).measured_steps == [0.1, 0.2, 0.3]
    assert (never_run().measured_steps, never_run().figures) == ([], Figures())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"outcome": "passed"}, None),
        ({"outcome": "regressed", "unhealthy_launches": (1,)}, None),
        ({"outcome": "passed", "unhealthy_launches": (1, 2)}, "no launch on a healthy machine"),
        ({"outcome": "failed"}, "failed, which measures nothing"),
    ],
)
def test_figures_are_evidence_unless_there_is_a_reason(changes: dict[str, Any], reason: str | None) -> None:
    result = make_result(now(), now())
    assert result.replace(verdict=Verdict(launches=2, **changes)).no_evidence == reason
    assert make_result(now(), now().replace(inject="stall=10")).no_evidence == "a fault was injected"


def test_the_file_says_what_speeds_count() -> None:
    images = make_image_result()
    told = plain(images)
    assert told["unit"] == "samples"
    assert {check["unit"] for check in told["verdict"]["checks"]} == {"samples/s", "bytes"}
    assert Measurement.model_validate(told) == images
    assert plain(make_result(now()))["unit"] == plain(never_run())["unit"] == "tokens"


def test_figures_are_shared_where_all_launches_that_count_are() -> None:
    quiet, disturbed = now(), now().replace(health=DISTURBED)
    policy = Policy(max_unhealthy=1)

    def result(*runs: Run, **changes: Any) -> Measurement:
        return make_result(*runs, **{"verdict": judge(runs, None, NOISE, policy), **changes})

    assert result(disturbed).shared
    assert make_shared().shared
    assert not result(quiet, disturbed).shared, "the figures are those of the first"
    assert not result(quiet).shared
    crash = disturbed.replace(failure=Failure(kind="crash", message="x"))
    assert not result(crash).shared, "a crash is the code's"
    assert not never_run().shared
    none_counts = Verdict(outcome="unhealthy", launches=2, unhealthy_launches=(1, 2))
    for runs in ((quiet, disturbed), (disturbed, quiet)):
        assert result(*runs, verdict=none_counts).shared
        assert result(*runs, verdict=none_counts).healthy_runs == list(runs)
    assert strict([result(disturbed)])["results"][0]["shared"] is True


# The file


MESSY = now(tokens_per_s=math.nan, mfu=math.inf).replace(
    step_s=(math.nan, math.inf, 0.1), loss=(1.0, -math.inf), probe_s=(math.nan,)
)


def strict(results: Sequence[Measurement], *skipped: Skipped, status: Any = "complete") -> dict[str, Any]:
    """As read back by a parser that knows no NaN."""
    written = make_session_file(*results, status=status, commit=None, skipped=skipped)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "results.json"
        documents.write(file, written)
        assert [plain(r) for r in documents.read(file, SessionFile).results] == [plain(r) for r in results]
        back = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert isinstance(back, dict)
    return back


def test_json_is_strict_though_figures_are_no_numbers() -> None:
    [messy] = strict([make_result(MESSY, before=None)])["results"]
    assert messy["outcome"] == "failed"
    assert messy["figures"]["tokens_per_s"] == "NaN"
    assert messy["runs"][0]["step_s"] == ["NaN", "Infinity", 0.1]
    assert messy["verdict"]["checks"][0]["measured"] == "NaN"


def test_json_is_strict_though_next_to_nothing_is_known_of_the_noise() -> None:
    vague = dict.fromkeys(NOISE.by_metric, Noise(sigma=0.01, degrees_of_freedom=0.1))
    [told] = strict([make_result(BEFORE, noise=ClassNoise(by_metric=vague))])["results"]
    assert told["verdict"]["checks"][0]["interval"] == [-1.0, "Infinity"]
    assert Verdict.model_validate(told["verdict"]).checks[0].interval == (-1.0, math.inf)


def test_json_has_every_launch_and_verdict() -> None:
    written = strict([make_result(now(), now(tokens_per_s=98767), now())])
    assert (written["schema_version"], written["status"]) == (1, "complete")
    assert written["machine"]["hardware_class"] == "cpu-test-2c"
    [good] = written["results"]
    assert good["outcome"] == good["verdict"]["outcome"] == "passed"
    assert good["verdict"]["launches"] == len(good["runs"]) == 3
    assert Figures.model_validate(good["figures"]) == now().figures
    assert [each["metric"] for each in good["verdict"]["checks"]] == [metric.name for metric in GATED]


def test_json_of_a_case_that_was_never_launched() -> None:
    [told] = strict([never_run()])["results"]
    assert (told["outcome"], told["runs"]) == ("failed", [])
    assert (told["verdict"]["failure"], told["verdict"]["launches"]) == ("no_baseline", 0)
    assert [value for value in told["figures"].values() if value is not None] == [{}]
    assert (never_run().hardware_class, make_result(now()).hardware_class) == (None, "cpu-test-2c")


def test_json_keeps_the_order_and_tells_what_was_skipped() -> None:
    skipped = Skipped(nodeid="n", case_id="c", framework="f", reason="r")
    written = strict([never_run(), make_result(BEFORE)], skipped, status="interrupted")
    assert (written["status"], written["interrupted_launches"]) == ("interrupted", [])
    assert [told["outcome"] for told in written["results"]] == ["failed", "passed"]
    assert written["skipped"] == [
        {"nodeid": "n", "case_id": "c", "framework": "f", "reason": "r", "not_reached": False}
    ]
