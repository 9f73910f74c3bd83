"""`perfsuite power`: a few hundred trials; what the engine achieves is in test_power.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from perfsuite.cli import power as power_cli
from perfsuite.cli.app import app
from perfsuite.results import baseline
from perfsuite.results.baseline import Baseline
from perfsuite.results.store import BaselineStore
from perfsuite.verdict.noise import against, class_noise
from perfsuite.verdict.sequential import SIGMA_FLOOR
from tests.samples import make_case, make_figures, make_machine, make_run

CPU = "cpu-test-2c"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default directories are relative; the machine is the sample's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(power_cli, "detect", make_machine)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["power", *arguments], env={"COLUMNS": "120"})


def told(*arguments: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    result = command("--json", "--trials", "50", *arguments)
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.stdout, parse_constant=refuse)
    return content


def refused(*arguments: str) -> str:
    result = command("--trials", "10", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    return result.stderr


def record(
    directory: Path, *, launches: int = 5, sigma: float = 0.02, name: str = CPU, batch: int = 2, seed: int = 0
) -> Baseline:
    """A baseline file whose launches scatter by `sigma`."""
    random = Random(seed)
    machine, case = make_machine(hardware_class=name), make_case(micro_batch=batch)
    runs = [
        make_run(
            machine=machine,
            case=case,
            figures=make_figures(tokens_per_s=1000 * math.exp(random.gauss(0, sigma))),
        )
        for _ in range(launches)
    ]
    made = baseline.from_runs(runs)
    BaselineStore(directory).write_reviewed(made)
    return made


def test_a_given_noise_is_simulated_and_shown() -> None:
    result = command("--sigma", "1%", "--trials", "300")
    assert result.exit_code == 0
    assert "1 % between launches, as given (normal)" in result.output
    assert "tolerance 3 %, 10 launches in the baseline, at most 15 today" in result.output
    assert "slowdown: more time per token" in result.output
    rows = [line.split() for line in result.output.splitlines() if line.split()[1:2] == ["%"]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "5"]
    assert "This gate finds slowdowns as large as its tolerance of 3 % (found in 9" in result.output
    assert "it could hold a tolerance down to 2.4" in result.output


def test_a_gate_that_is_blind_says_so() -> None:
    result = command("--sigma", "2%", "--trials", "100", "--drop", "3%")
    assert "This gate is BLIND to slowdowns as small as its tolerance of 3 %" in result.output
    assert "about 95 times in 100 it finds only slowdowns of 4." in result.output


def test_json_is_complete_and_equal_for_equal_seeds() -> None:
    first = told("--sigma", "0.01", "--seed", "3")
    assert first == told("--sigma", "1%", "--seed", "3")
    assert first != told("--sigma", "1%", "--seed", "4")
    asked = {name: first[name] for name in ("sigma", "tolerance", "baseline_launches", "max_launches")}
    assert asked == {"sigma": 0.01, "tolerance": 0.03, "baseline_launches": 10, "max_launches": 15}
    assert first["degrees"] == 30
    assert first["noise_model"] == "normal"
    assert first["trials"] == 50
    assert [row["drop"] for row in first["rows"]] == [0, 0.01, 0.02, 0.03, 0.05]
    for row in first["rows"]:
        assert sum(
            row[each] for each in ("passed", "improved", "regressed", "inconclusive")
        ) == pytest.approx(1)
        assert {"mean_launches", "fixed_5_percent", "fixed_tolerance"} <= set(row)
    assert first["false_alarm_rate"] == first["rows"][0]["regressed"]
    assert first["detection_rate_at_tolerance"] == first["rows"][3]["regressed"]
    assert first["blind"] is False
    assert first["minimum_detectable_drop"] < 0.03
    assert 0 <= first["blind_share"] < 0.5
    assert first["measured"] is None


def test_drops_are_sorted_once_each_and_may_be_speed_ups() -> None:
    drops = ("--drop", "5%", "--drop", "-3%", "--drop", "0.05", "--drop", "0")
    content = told("--sigma", "1%", *drops)
    assert [row["drop"] for row in content["rows"]] == [-0.03, 0, 0.05]
    assert content["detection_rate_at_tolerance"] is None
    assert content["rows"][0]["improved"] > 0.5


def test_the_tolerance_is_always_among_the_usual_drops() -> None:
    content = told("--sigma", "3%", "--tolerance", "8%")
    assert [row["drop"] for row in content["rows"]] == [0, 0.01, 0.02, 0.03, 0.05, 0.08]


def test_what_it_can_detect_does_not_depend_on_the_drops_asked_for() -> None:
    few, many = (told("--sigma", "1%", *drops) for drops in (("--drop", "0"), ()))
    assert few["minimum_detectable_drop"] == many["minimum_detectable_drop"]
    assert few["blind_share"] == many["blind_share"]


def test_a_rate_of_which_nothing_was_seen_is_not_called_zero() -> None:
    result = command("--sigma", "0.3%", "--trials", "100", "--drop", "0")
    assert "calls unchanged code regressed in under 3 % after" in result.output


def test_the_noise_may_be_known_from_the_baseline_alone() -> None:
    result = command("--sigma", "1%", "--trials", "30", "--degrees", "own", "--baseline-launches", "5")
    assert "the baseline's own launches" in result.output
    alone = told("--sigma", "1%", "--degrees", "own", "--baseline-launches", "5")
    assert alone["degrees"] is None


@pytest.mark.parametrize("model", ["student-t3", "contaminated"])
def test_noise_models(model: str) -> None:
    assert told("--sigma", "1%", "--noise-model", model)["noise_model"] == model


def test_a_class_tells_its_own_noise_as_the_plugin_pools_it() -> None:
    made = [
        record(Path("baselines"), batch=batch, seed=batch, launches=4 + batch, sigma=0.03)
        for batch in (1, 2, 3)
    ]
    content = told()
    pooled = class_noise(made).by_metric["tokens_per_s"]
    assert content["sigma"] == pytest.approx(pooled.sigma)
    assert content["measured"]["degrees_of_freedom"] == pytest.approx(pooled.degrees_of_freedom)
    assert content["measured"]["baselines"] == 3
    assert content["measured"]["launches"] == 18
    assert content["baseline_launches"] == 6  # the median
    assert content["degrees"] == round(pooled.degrees_of_freedom)
    assert content["tolerance"] == 0.15  # the plugin's, on a CPU
    result = command("--trials", "10")
    assert f"3 baselines (18 launches) of {CPU}" in result.output


def test_what_the_class_knows_of_sessions_is_simulated_and_said() -> None:
    held = record(Path("baselines"), launches=9)
    alike = told()
    assert (
        "sessions    taken to be alike: no baseline has launches of two" in command("--trials", "10").output
    )
    launches = [one.replace(session=str(number // 3)) for number, one in enumerate(held.launches)]
    named = held.replace(launches=tuple(launches))
    BaselineStore(Path("baselines")).write_reviewed(named)
    content = told()
    noise = class_noise([named]).by_metric["tokens_per_s"]
    expected = against(noise, [3, 3, 3]).session_sigma
    assert content["minimum_detectable_drop"] > 2 * alike["minimum_detectable_drop"]
    assert content["rows"][0]["fixed_5_percent"] > alike["rows"][0]["fixed_5_percent"]
    assert content["session_sigma"] == content["measured"]["session_sigma"] == pytest.approx(expected)
    result = command("--trials", "10")
    assert f"apart from the baseline by up to {100 * expected:.3g} % (standard deviation)" in result.output


def test_a_reviewed_baseline_comes_before_a_local_one() -> None:
    record(Path("baselines"), sigma=0.0, launches=6)
    record(Path(".perfsuite/baselines"), sigma=0.3)
    content = told("--hardware-class", CPU)
    assert content["sigma"] == SIGMA_FLOOR
    assert content["measured"]["launches"] == 6


def test_a_gpu_class_has_the_tolerance_of_gpus() -> None:
    record(Path("baselines"), sigma=0.01, name="h100-80gb-sxm")
    assert told("--hardware-class", "h100-80gb-sxm")["tolerance"] == 0.03
    assert told("--hardware-class", "h100-80gb-sxm", "--tolerance", "2%")["tolerance"] == 0.02


def test_a_baseline_that_cannot_be_read_is_named() -> None:
    record(Path("baselines"))
    bad = Path("baselines", CPU, "broken.json")
    bad.write_text("{")
    result = command("--trials", "10", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["measured"]["left_out"] == [str(bad)]
    assert f"{bad} cannot be read; its noise is left out" in result.stderr


def test_where_no_baseline_can_be_read_the_first_tells_why() -> None:
    made = record(Path("baselines"))
    file = BaselineStore(Path("baselines")).reviewed_file(CPU, made.case.id)
    file.write_text(file.read_text().replace('"launches"', '"starts"'))
    message = refused()
    assert f"none of the baselines of {CPU} can be read: {file}: field launches" in message
    assert "--sigma 1%" in message


def test_without_baselines_it_says_what_to_do() -> None:
    message = refused()
    assert "no baselines in baselines or .perfsuite/baselines: record some" in message
    assert "--sigma 1%" in message


def test_an_unknown_class_is_told_which_there_are() -> None:
    record(Path("baselines"), name="h100-80gb-sxm")
    record(Path("local/baselines"), name="a100-80gb-sxm")
    message = refused("--hardware-class", "h900", "--store", "local")
    assert "hardware class 'h900' has no baselines in baselines or local/baselines" in message
    assert "--hardware-class may be a100-80gb-sxm, h100-80gb-sxm" in message
    assert f"this machine's hardware class {CPU!r} has no baselines" in refused()


def test_too_few_launches_tell_no_noise() -> None:
    record(Path("baselines"), launches=1, batch=1)
    record(Path("baselines"), launches=2, batch=2)
    assert "have 1, 2 launches: too few to tell a noise" in refused()


def test_launches_without_a_sound_speed_tell_no_noise() -> None:
    made = record(Path("baselines"), launches=3)
    launches = tuple(
        each.replace(figures=each.figures.replace(tokens_per_s=math.inf)) for each in made.launches
    )
    BaselineStore(Path("baselines")).write_reviewed(made.replace(launches=launches))
    assert "too few to tell a noise" in refused()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sigma", "1"], "--sigma is '1', expected above 0% and up to 50%"),
        (["--sigma", "0"], "--sigma is '0', expected above 0%"),
        (["--sigma", "-1%"], "--sigma is '-1%', expected above 0%"),
        (["--sigma", "nan"], "--sigma is 'nan'"),
        (["--sigma", "1 percent"], "in percent or as a fraction: 1% or 0.01"),
        (["--sigma", "1%", "--tolerance", "3"], "--tolerance is '3'"),
        (["--sigma", "1%", "--drop", "200%"], "--drop is '200%', expected above -50% and up to 100%"),
        (
            ["--sigma", "1%", "--noise-model", "cauchy"],
            "'cauchy' is not one of 'normal', 'student-t3', 'contaminated'",
        ),
        (
            ["--sigma", "1%", "--degrees", "some"],
            "--degrees is 'some', expected a whole number from 2 to 1000",
        ),
        (["--sigma", "1%", "--degrees", "1"], "--degrees is '1'"),
        (["--sigma", "1%", "--degrees", "own", "--baseline-launches", "2"], "a baseline of 2 shows no noise"),
        (["--sigma", "1%", "--hardware-class", "h100"], "--sigma and --hardware-class both give a noise"),
        (["--sigma", "1%", "--baseline-launches", "1"], "--baseline-launches"),
        (["--sigma", "1%", "--max-launches", "2"], "--max-launches"),
        (["--sigma", "1%", "--trials", "0"], "--trials"),
        (["--sigma", "1%", "--seed", "-1"], "--seed"),
    ],
)
def test_bad_usage_names_value_and_what_is_allowed(arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


def test_a_paired_comparison_is_simulated_and_shown() -> None:
    result = command("--paired", "--sigma", "1%", "--trials", "100")
    assert result.exit_code == 0
    assert "1 % between launches, as given; 1 launch in 20 is 10 % slow" in result.output
    assert "1.5 % of the machine within 24 launches" in result.output
    assert "tolerance 3 %, at most 12 pairs of launches" in result.output
    rows = [line.split() for line in result.output.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "5"]
    assert "A change as large as the tolerance, 3 %, is found in" in result.output


def test_a_paired_comparison_as_json() -> None:
    content = told("--paired", "--sigma", "2%", "--drift", "0", "--max-pairs", "8", "--drop", "4%")
    asked = {name: content[name] for name in ("sigma", "drift", "tolerance", "max_pairs", "trials")}
    assert asked == {"sigma": 0.02, "drift": 0, "tolerance": 0.03, "max_pairs": 8, "trials": 50}
    assert [row["change"] for row in content["rows"]] == [0.04]
    assert content["blind"] is True
    assert content["measured"] is None


def test_a_paired_comparison_with_the_noise_of_the_class() -> None:
    record(Path("baselines"))
    content = told("--paired", "--drop", "0")
    assert content["measured"]["hardware_class"] == CPU
    assert content["tolerance"] == 0.15


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--drift", "2%"], "--drift without --paired has no meaning: add --paired, or leave it out"),
        (["--max-pairs", "5"], "--max-pairs without --paired has no meaning"),
        (["--paired", "--degrees", "20"], "--degrees with --paired has no meaning: leave one of them out"),
        (["--paired", "--max-launches", "9"], "--max-launches with --paired has no meaning"),
        (["--paired", "--noise-model", "student-t3"], "--noise-model with --paired has no meaning"),
        (["--paired", "--baseline-launches", "5"], "--baseline-launches with --paired has no meaning"),
        (["--paired", "--drift", "-1%"], "--drift is '-1%', expected above 0% and up to 20%"),
    ],
)
def test_options_that_have_no_meaning_together_are_refused(options: list[str], words: str) -> None:
    assert words in refused("--sigma", "1%", *options)
