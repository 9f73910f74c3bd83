from __future__ import annotations

import json
import math
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from asv.benchmarks import Benchmarks
from asv.config import Config
from asv.results import Results, iter_results

from perfsuite import git
from perfsuite.case.model import Model
from perfsuite.errors import FileError
from perfsuite.frameworks.fsdp import FSDP
from perfsuite.history import store
from perfsuite.history.asv import export as asv_export
from perfsuite.history.asv.export import Exported, export
from perfsuite.history.asv.results import COLUMNS, METRICS
from tests.samples import IMAGES, make_case, make_machine
from tests.synthetic import BEGIN, TOKENS_PER_STEP, Level, make_repository, write_history

H100 = "h100-80gb-sxm"
CASES = [
    make_case(hardware="h100"),
    make_case(hardware="h100", micro_batch=4),
    make_case(hardware="h100", micro_batch=16, framework=FSDP(sharding_strategy="FULL_SHARD")),
    make_case(hardware="h100", model="llama-tiny", activation_checkpointing="full"),
]
GPT2 = "gpt2-tiny.1x2.fp32"


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return tmp_path / "repo"


@pytest.fixture
def commits(repo: Path) -> list[str]:
    return make_repository(repo, 4)


@pytest.fixture
def kept(tmp_path: Path, commits: list[str]) -> Path:
    directory = tmp_path / "history"
    write_history(directory, commits, CASES, gpus=("NVIDIA H100 80GB HBM3", "NVIDIA H200"))
    return directory


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def exported(kept: Path, out: Path, repo: Path) -> Exported:
    return export(kept, repo, out)


def configuration(out: Path) -> Config:
    conf = Config.load(str(out / "asv.conf.json"))
    conf.results_dir = str(out / "results")
    conf.html_dir = str(out / "html")
    return conf


def load(out: Path, commit: str, machine: str = H100) -> Results:
    [found] = [r for r in iter_results(str(out / "results" / machine)) if r.commit_hash == commit]
    assert isinstance(found, Results)
    return found


# asv reads it


def test_asv_reads_every_commit_of_every_hardware_class(
    kept: Path, out: Path, repo: Path, commits: list[str]
) -> None:
    exported = export(kept, repo, out, commit_url="https://example.org/commit/")
    assert exported == Exported(commits=frozenset(commits), unplaced={})
    results = list(iter_results(str(out / "results")))
    assert {(r.params["machine"], r.commit_hash) for r in results} == {
        (machine, commit) for machine in (H100, "h200-141gb-sxm") for commit in commits
    }
    assert all(r.params.keys() == {"machine"} for r in results)
    assert load(out, commits[1]).date - load(out, commits[0]).date == 86_400_000
    assert all(json.loads(file.read_text()) for file in out.rglob("*.json"))
    conf = configuration(out)
    assert sorted(conf.regressions_thresholds.values()) == [0.01, 0.03], "the gate's tolerances"
    assert list(conf.regressions_first_commits.values()) == [None]
    assert (conf.branches, conf.show_commit_url) == (["main"], "https://example.org/commit/")


@pytest.mark.usefixtures("exported")
def test_asv_reads_benchmarks_with_parameters(out: Path) -> None:
    benchmarks = Benchmarks.load(configuration(out))
    units = {metric: unit for metric, unit in METRICS.items() if metric != "seconds_per_sample"}
    groups = (GPT2, "llama-tiny.1x2.fp32")
    assert set(benchmarks) == {f"{group}.{metric}" for group in groups for metric in units}
    gpt2 = benchmarks[f"{GPT2}.seconds_per_step"]
    assert dict(zip(gpt2["param_names"], gpt2["params"], strict=True)) == {
        "framework": ["fake", "fsdp-full_shard"],
        "sequence_length": ["64"],
        "micro_batch": ["2", "4", "16"],
        "gradient_accumulation": ["1"],
        "options": ["max_warmup_steps5-steps20"],
    }
    assert {metric: benchmarks[f"{GPT2}.{metric}"]["unit"] for metric in units} == units


def test_a_case_that_counts_samples_has_seconds_per_sample(
    out: Path, repo: Path, commits: list[str], tmp_path: Path
) -> None:
    write_history(tmp_path / "images", commits, [IMAGES, CASES[0]])
    export(tmp_path / "images", repo, out)
    benchmarks = set(Benchmarks.load(configuration(out)))
    of_images = {name.rpartition(".")[2] for name in benchmarks if name.startswith("resnet.")}
    assert of_images == {"seconds_per_sample", "seconds_per_step", "peak_memory"}
    assert f"{GPT2}.seconds_per_token" in benchmarks


@pytest.mark.usefixtures("exported")
def test_values_are_medians_of_launches_and_combinations_that_nobody_ran_are_missing(
    kept: Path, out: Path, commits: list[str]
) -> None:
    benchmarks = Benchmarks.load(configuration(out))
    result = load(out, commits[0])
    night = store.places(kept, hardware_class=H100)[0].read(store.read_cases(kept))
    launches = [each.step_s_p50 for each in night.results]
    for metric, scale in (("seconds_per_step", 1), ("seconds_per_token", TOKENS_PER_STEP)):
        name = f"{GPT2}.{metric}"
        values = result.get_result_value(name, benchmarks[name]["params"])
        expected = [median(filter(None, launches[number])) / scale for number in (0, 1, 2)]
        assert values == [expected[0], expected[1], None, None, None, pytest.approx(expected[2])]
    memory = f"{GPT2}.peak_memory"
    values = result.get_result_value(memory, benchmarks[memory]["params"])
    assert values[:2] == [2e10 / 2**20, 2e10 / 2**20 + 1]


def statistics(out: Path, commit: str, metric: str) -> dict[str, Any]:
    result = load(out, commit)
    stats = result.get_result_stats(f"{GPT2}.{metric}", result.get_result_params(f"{GPT2}.{metric}"))[0]
    assert isinstance(stats, dict)
    return stats


def test_error_bars_are_the_noise_between_launches_of_the_whole_night(
    tmp_path: Path, out: Path, repo: Path, commits: list[str]
) -> None:
    many = [make_case(hardware="h100", micro_batch=n) for n in range(1, 101)]
    write_history(tmp_path / "history", commits, many, noise=0.01, launches=3)
    export(tmp_path / "history", repo, out)
    stats = statistics(out, commits[0], "seconds_per_step")
    half = math.log(stats["ci_99_b"] / stats["ci_99_a"]) / 2
    assert half == pytest.approx(2.576 * 0.01 / math.sqrt(3), rel=0.15)
    assert stats["ci_99_a"] < stats["q_25"] < stats["q_75"] < stats["ci_99_b"]
    assert (stats["number"], stats["repeat"]) == (1, 3)
    memory = statistics(out, commits[0], "peak_memory")
    assert memory["ci_99_a"] == memory["ci_99_b"] == 2e10 / 2**20


def test_sessions_of_one_commit_are_pooled_and_began_with_the_newest(
    kept: Path, out: Path, repo: Path, commits: list[str]
) -> None:
    write_history(kept, commits[:1], CASES[:1], lambda case, night: Level(step_s=3), first=100, launches=4)
    export(kept, repo, out)
    result = load(out, commits[0])
    params = result.get_result_params(f"{GPT2}.seconds_per_step")
    [first, second, *_] = result.get_result_samples(f"{GPT2}.seconds_per_step", params)
    assert (len(first), len(second)) == (7, 3)
    assert result.get_result_value(f"{GPT2}.seconds_per_step", params)[0] == median(first)
    assert statistics(out, commits[0], "seconds_per_step")["repeat"] == 7
    [file] = (out / "results" / H100).glob(f"{commits[0]}-*.json")
    [began] = {row[COLUMNS.index("started_at")] for row in json.loads(file.read_text())["results"].values()}
    assert began == 1000 * (BEGIN + timedelta(days=100, hours=3)).timestamp()  # 03:00 UTC: write_history


@pytest.mark.usefixtures("exported")
def test_a_machine_is_described(out: Path) -> None:
    assert json.loads((out / "results" / H100 / "machine.json").read_text()) == {
        "version": 1,
        "machine": H100,
        "gpu": "NVIDIA H100 80GB HBM3",
        "num_gpu": "8",
        "ram": "80 GiB",
    }
    cpu = asv_export._machine(make_machine())
    assert (cpu["cpu"], cpu["num_cpu"], cpu["ram"]) == ("Test CPU", "2", "8 GiB")


# Again


@pytest.mark.usefixtures("exported")
def test_another_export_has_what_came_and_not_what_went(
    kept: Path, out: Path, repo: Path, commits: list[str]
) -> None:
    write_history(kept, commits[3:], [make_case(hardware="h100", micro_batch=32)], first=50)
    for file in kept.glob(f"*/{commits[0]}/*.json"):
        file.unlink()
    assert export(kept, repo, out).commits == set(commits[1:])
    assert {r.commit_hash for r in iter_results(str(out / "results"))} == set(commits[1:])
    benchmarks = Benchmarks.load(configuration(out))
    assert benchmarks[f"{GPT2}.peak_memory"]["params"][2] == ["2", "4", "16", "32"]
    assert "llama-tiny.1x2.fp32.peak_memory" in benchmarks


# What cannot be shown


def test_commits_that_are_not_on_the_branch_are_left_out_and_named(
    kept: Path, out: Path, repo: Path, commits: list[str]
) -> None:
    git.git("checkout", "-q", "--orphan", "side", cwd=repo)
    write_history(kept, ["f" * 40], CASES[:1], first=20)
    exported = export(kept, repo, out, branch="main")
    assert exported.unplaced == {"f" * 40: f"not in {repo}"}
    assert exported.commits == set(commits)
    assert {r.commit_hash for r in iter_results(str(out / "results"))} == set(commits)


def test_models_with_one_name_and_a_directory_of_other_things_are_errors(
    kept: Path, out: Path, repo: Path, commits: list[str], tmp_path: Path
) -> None:
    tiny = make_case().model
    assert isinstance(tiny, Model)
    both = [make_case(hardware="h100", model=tiny.replace(name=name)) for name in ("tiny.1", "tiny_1")]
    write_history(tmp_path / "twins", commits, both)
    with pytest.raises(FileError, match=r"models 'tiny.1' and 'tiny_1' are one name to asv: 'tiny_1'\. R"):
        export(tmp_path / "twins", repo, out)
    out.mkdir()
    (out / "thesis.tex").touch()
    with pytest.raises(FileError, match=r"out is not empty and holds no export\. Give a directory of its"):
        export(kept, repo, out)
