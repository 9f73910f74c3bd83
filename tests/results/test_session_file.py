import json
import math
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.documents import plain
from perfsuite.errors import FileError
from perfsuite.results.metric import GATED
from perfsuite.results.outcome import BY_THE_MACHINE, CountCheck, Outcome, Verdict
from perfsuite.results.rank_report import Failure
from perfsuite.results.run import Figures, Run
from perfsuite.results.session_file import CaseChange, Measurement, SessionFile, Skipped
from perfsuite.verdict.judge import judge
from perfsuite.verdict.noise import ClassNoise
from perfsuite.verdict.policy import Policy
from perfsuite.verdict.sequential import Noise
from tests import samples
from tests.samples import BEFORE, NOISE, make_result, make_run, metric_check, never_run, now


def test_figures_are_medians_over_launches() -> None:
    runs = [now(tokens_per_s=speed, mfu=mfu) for speed, mfu in ((3, None), (1, 0.4), (2, 0.2))]
    figures = make_result(*runs, before=None).figures
    assert [figures.tokens_per_s, figures.mfu] == pytest.approx([2, 0.3])
    assert (figures.step_jitter, figures.alloc_retries) == (1.1, None)
    first = make_run(step_s=(9.0, 0.1, 0.2), window=(1, 3))
    second = make_run(step_s=(8.0, 8.0, 0.3), window=(2, 3))
    assert make_result(first, second, before=None).measured_steps == [0.1, 0.2, 0.3]
    assert (never_run().measured_steps, never_run().figures) == ([], Figures())


COUNTED = CountCheck(outcome="passed")
BY_COUNTS = Verdict(outcome="passed", launches=1, counts=COUNTED)
TIMED = make_result(now()).verdict


@pytest.mark.parametrize(
    ("verdict", "before", "expected"),
    [
        (BY_COUNTS, (now(),), True),
        (BY_COUNTS, (), False),
        (BY_COUNTS.replace(counts=None), (now(),), False),
        (TIMED.replace(counts=COUNTED), (now(),), False),
        (TIMED, (now(),), False),
    ],
    ids=["counted arms", "one arm", "uncounted", "timed and counted", "timed"],
)
def test_compares_arms_by_counts_without_times(
    verdict: Verdict, before: tuple[Run, ...], expected: bool
) -> None:
    assert make_result(now()).replace(verdict=verdict, before=before).by_counts is expected


def test_reads_a_case_change_with_the_earlier_name() -> None:
    values = {"case_id": "a", "nodeid": "test.py::test[a]", "kind": "changed", "told": "micro_batch 2 -> 1"}
    assert CaseChange.model_validate(values).difference == "micro_batch 2 -> 1"


def test_figures_are_evidence_without_a_reason() -> None:
    def why_none(*unhealthy: int, outcome: Outcome = "passed") -> str | None:
        verdict = Verdict(outcome=outcome, launches=2, unhealthy_launches=unhealthy)
        return make_result(now(), now()).replace(verdict=verdict).no_evidence

    assert why_none() is why_none(1, outcome="regressed") is None
    assert why_none(1, 2) == "no launch on a healthy machine"
    assert why_none(outcome="failed") == "failed, which measures nothing"
    assert make_result(now(), now().replace(inject="stall=10")).no_evidence == "a fault was injected"


def test_a_slower_unchanged_session_is_evidence() -> None:
    slower = metric_check(outcome="inconclusive", note=BY_THE_MACHINE)
    verdict = Verdict(outcome="unhealthy", launches=2, checks=(slower,))
    assert make_result(now(), now()).replace(verdict=verdict).no_evidence is None
    no_launch_is_healthy = verdict.replace(unhealthy_launches=(1, 2))
    result = make_result(now(), now()).replace(verdict=no_launch_is_healthy)
    assert result.no_evidence == "no launch on a healthy machine"


QUIET = now()
DISTURBED = now().replace(health=samples.DISTURBED)
CRASH = DISTURBED.replace(failure=Failure(kind="crash", message="x"))


def result_of(*runs: Run) -> Measurement:
    return make_result(*runs, verdict=judge(runs, None, NOISE, Policy(max_unhealthy=1)))


@pytest.mark.parametrize(
    ("result", "is_shared"),
    [
        (result_of(DISTURBED), True),
        (samples.make_shared(), True),
        (result_of(QUIET, DISTURBED), False),  # the figures are those of the first launch
        (result_of(QUIET), False),
        (result_of(CRASH), False),  # a crash is the code's fault
        (never_run(), False),
    ],
    ids=["disturbed", "sample", "quiet and disturbed", "quiet", "crash", "never run"],
)
def test_figures_are_shared_if_all_launches_are(result: Measurement, is_shared: bool) -> None:
    assert result.shared is is_shared


@pytest.mark.parametrize(
    "runs", [(QUIET, DISTURBED), (DISTURBED, QUIET)], ids=["quiet first", "disturbed first"]
)
def test_figures_are_shared_if_no_launch_counts(runs: tuple[Run, ...]) -> None:
    none_counts = Verdict(outcome="unhealthy", launches=2, unhealthy_launches=(1, 2))
    result = make_result(*runs, verdict=none_counts)
    assert result.shared
    assert result.healthy_runs == list(runs)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "results.json"


def strict(
    file: Path, *results: Measurement, skipped: tuple[Skipped, ...] = (), status: Any = "complete"
) -> Any:
    """Write results, and return what a parser reads that does not know NaN."""
    written = samples.make_session_file(*results, status=status, commit=None, skipped=skipped)
    documents.write(file, written)
    assert [plain(r) for r in documents.read(file, SessionFile).results] == [plain(r) for r in results]
    return json.loads(file.read_text(), parse_constant=pytest.fail)


def test_json_is_strict_despite_nan(file: Path) -> None:
    messy = now(tokens_per_s=math.nan, mfu=math.inf)
    messy = messy.replace(
        step_s=(math.nan, math.inf, 0.1), loss=(1.0, -math.inf), probe_s=(math.nan,), window=(0, 3)
    )
    unknown = dict.fromkeys(NOISE.by_metric, Noise(sigma=0.01, degrees_of_freedom=0.1))
    results = make_result(messy, before=None), make_result(BEFORE, noise=ClassNoise(by_metric=unknown))
    stated, vague = strict(file, *results)["results"]
    assert (stated["outcome"], stated["figures"]["tokens_per_s"]) == ("failed", "NaN")
    assert stated["runs"][0]["step_s"] == ["NaN", "Infinity", 0.1]
    assert stated["verdict"]["checks"][0]["measured"] == "NaN"
    assert vague["verdict"]["checks"][0]["interval"] == [-1.0, "Infinity"]
    assert Verdict.model_validate(vague["verdict"]).checks[0].interval == (-1.0, math.inf)


def test_json_has_every_launch_and_skip_in_order(file: Path) -> None:
    skipped = {
        "nodeid": "n",
        "case_id": "c",
        "framework": "f",
        "reason": "r",
        "not_reached": False,
        "by_test": False,
    }
    good = make_result(now(), now(tokens_per_s=98767), now())
    results = (never_run(), good, samples.make_shared())
    left_out = (Skipped.model_validate(skipped),)
    written = strict(file, *results, skipped=left_out, status="interrupted")
    assert (written["schema_version"], written["status"]) == (1, "interrupted")
    assert (written["machine"]["hardware_class"], written["interrupted_launches"]) == ("cpu-test-2c", [])
    assert written["skipped"] == [skipped]
    never, stated, shared = written["results"]
    assert (never["outcome"], never["runs"], shared["shared"]) == ("failed", [], True)
    assert (never["verdict"]["failure"], never["verdict"]["launches"]) == ("no_baseline", 0)
    assert [value for value in never["figures"].values() if value is not None] == [{}, {}], "of dictionaries"
    assert stated["outcome"] == stated["verdict"]["outcome"] == "passed"
    assert stated["verdict"]["launches"] == len(stated["runs"]) == 3
    assert Figures.model_validate(stated["figures"]) == now().figures
    assert [check["metric"] for check in stated["verdict"]["checks"]] == [metric.name for metric in GATED]
    assert (never_run().hardware_class, good.hardware_class) == (None, "cpu-test-2c")


def test_the_file_says_what_speeds_count() -> None:
    images = samples.make_image_result()
    content = plain(images)
    assert content["unit"] == "samples"
    assert {check["unit"] for check in content["verdict"]["checks"]} == {"samples/s", "bytes"}
    assert Measurement.model_validate(content) == images
    assert plain(make_result(now()))["unit"] == plain(never_run())["unit"] == "tokens"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("results",), []),
        (("parts", 0, "status"), "interrupted"),
        (("status",), "interrupted"),
        (("results", 0, "outcome"), "passed"),
        (("results", 0, "verdict", "outcome"), "passed"),
        (("results", 0, "shadow"), True),
        (("results", 0, "excused"), "waived"),
        (("results", 0, "runs"), []),
        (("digest",), "0" * 16),
    ],
)
def test_an_edited_file_is_not_believed(file: Path, path: tuple[Any, ...], value: Any) -> None:
    content = strict(file, samples.judged(make_result(now()), outcome="regressed"))
    assert content["results"][0]["outcome"] == "regressed"
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    file.write_text(json.dumps(content))
    with pytest.raises(FileError, match=r"its digest is .* it was edited or damaged"):
        documents.read(file, SessionFile)


def test_a_file_without_a_digest_is_not_read(file: Path) -> None:
    content = strict(file, make_result(now()))
    del content["digest"]
    file.write_text(json.dumps(content))
    with pytest.raises(FileError, match=r"its digest is None, .* or an older perfsuite wrote it"):
        documents.read(file, SessionFile)


def test_digest_ignores_the_files_layout(file: Path) -> None:
    content = strict(file, make_result(now(tokens_per_s=math.nan)))
    file.write_text(json.dumps(dict(reversed(content.items()))))
    assert documents.read(file, SessionFile).status == "complete"
