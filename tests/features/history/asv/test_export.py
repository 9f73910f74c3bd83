import json
import math
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
from asv.benchmarks import Benchmarks
from asv.config import Config
from asv.results import Results, iter_results

from perfsuite.case.case import Case
from perfsuite.case.model import Model
from perfsuite.errors import FileError
from perfsuite.features.history import store
from perfsuite.features.history.asv import export as asv_export
from perfsuite.features.history.asv.export import Exported, export
from perfsuite.features.history.asv.results import COLUMNS, METRICS
from perfsuite.frameworks.fsdp import FSDP
from perfsuite.inputs import git
from tests.features.history.nights import TOKENS_PER_STEP, Level, write_history
from tests.samples import IMAGES, make_case, make_machine
from tests.synthetic import BEGIN, make_repository

H100 = "h100-80gb-sxm"
CASES = [
    make_case(hardware="h100"),
    make_case(hardware="h100", micro_batch=4),
    make_case(hardware="h100", micro_batch=16, framework=FSDP(sharding_strategy="FULL_SHARD")),
    make_case(hardware="h100", model="llama-tiny", activation_checkpointing="full"),
]
GPT2 = "gpt2-tiny.1x2.fp32"


class Kept(NamedTuple):
    """A history, a repository with its commits, and the directory of the export."""

    history: Path
    repo: Path
    out: Path
    commits: list[str]

    def write(self, cases: list[Case], name: str = "history", **how: Any) -> Path:
        directory = self.history.with_name(name)
        write_history(directory, **{"commits": self.commits, "cases": cases, **how})
        return directory

    def export(self, history: Path | None = None, **changes: str) -> Exported:
        return export(history or self.history, self.repo, self.out, **changes)

    def configuration(self) -> Config:
        conf = Config.load(str(self.out / "asv.conf.json"))
        conf.results_dir = str(self.out / "results")
        return conf

    def benchmarks(self) -> Any:
        return Benchmarks.load(self.configuration())

    def results(self) -> list[Results]:
        return list(iter_results(str(self.out / "results")))

    def result(self, commit: str) -> Results:
        of_h100 = iter_results(str(self.out / "results" / H100))
        [match] = [results for results in of_h100 if results.commit_hash == commit]
        return match

    def statistics(self, metric: str) -> dict[str, Any]:
        result = self.result(self.commits[0])
        name = f"{GPT2}.{metric}"
        stats: dict[str, Any] = result.get_result_stats(name, result.get_result_params(name))[0]
        return stats


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    commits = make_repository(tmp_path / "repo", 4)
    made = Kept(tmp_path / "history", tmp_path / "repo", tmp_path / "out", commits)
    made.write(CASES, gpus=("NVIDIA H100 80GB HBM3", "NVIDIA H200"))
    return made


def test_asv_reads_every_commit_and_class(kept: Kept) -> None:
    exported = kept.export(commit_url="https://example.org/commit/")
    assert exported == Exported(commits=frozenset(kept.commits), unplaced={})
    assert {(results.params["machine"], results.commit_hash) for results in kept.results()} == {
        (machine, commit) for machine in (H100, "h200-141gb-sxm") for commit in kept.commits
    }
    assert all(results.params.keys() == {"machine"} for results in kept.results())


def test_results_have_the_days_of_their_commits(kept: Kept) -> None:
    kept.export()
    first, second, *_ = map(kept.result, kept.commits)
    assert second.date - first.date == 86_400_000


def test_every_exported_file_is_json(kept: Kept) -> None:
    kept.export()
    assert all(json.loads(file.read_text()) for file in kept.out.rglob("*.json"))


def test_the_configuration_has_the_tolerances_of_the_gate(kept: Kept) -> None:
    kept.export(commit_url="https://example.org/commit/")
    conf = kept.configuration()
    assert sorted(conf.regressions_thresholds.values()) == [0.01, 0.03]
    assert list(conf.regressions_first_commits.values()) == [None]
    assert (conf.branches, conf.show_commit_url) == (["main"], "https://example.org/commit/")


def test_a_class_of_gpus_is_described(kept: Kept) -> None:
    kept.export()
    machine = json.loads((kept.out / "results" / H100 / "machine.json").read_text())
    facts = {"gpu": "NVIDIA H100 80GB HBM3", "num_gpu": "8", "ram": "80 GiB"}
    assert machine == {"version": 1, "machine": H100, **facts}


def test_a_class_of_cpus_is_described() -> None:
    cpu = asv_export._machine(make_machine())
    assert (cpu["cpu"], cpu["num_cpu"], cpu["ram"]) == ("Test CPU", "2", "8 GiB")


def test_asv_reads_parameters_and_image_units(kept: Kept) -> None:
    kept.export(kept.write([IMAGES, *CASES], "images"))
    benchmarks = kept.benchmarks()
    units = {metric: unit for metric, unit in METRICS.items() if metric != "seconds_per_sample"}
    of_images = {
        "resnet.1x2.fp32." + metric for metric in ("seconds_per_sample", "seconds_per_step", "peak_memory")
    }
    groups = (GPT2, "llama-tiny.1x2.fp32")
    assert set(benchmarks) == {f"{group}.{metric}" for group in groups for metric in units} | of_images
    gpt2 = benchmarks[f"{GPT2}.seconds_per_step"]
    assert dict(zip(gpt2["param_names"], gpt2["params"], strict=True)) == {
        "framework": ["fake", "fsdp-full_shard"],
        "sequence_length": ["64"],
        "micro_batch": ["2", "4", "16"],
        "gradient_accumulation": ["1"],
        "options": ["max_warmup_steps5-steps20"],
    }
    assert {metric: benchmarks[f"{GPT2}.{metric}"]["unit"] for metric in units} == units


def values_of(kept: Kept, metric: str) -> list[float | None]:
    """Return the exported values of a metric at the first commit."""
    name = f"{GPT2}.{metric}"
    values = kept.result(kept.commits[0]).get_result_value(name, kept.benchmarks()[name]["params"])
    return list(values)


@pytest.mark.parametrize(
    ("metric", "scale"), [("seconds_per_step", 1), ("seconds_per_token", TOKENS_PER_STEP)]
)
def test_values_are_medians_and_gaps_are_missing(kept: Kept, metric: str, scale: int) -> None:
    kept.export()
    night = store.places(kept.history, hardware_class=H100)[0].read(store.read_cases(kept.history))
    medians = [median(filter(None, stored.step_s_p50)) for stored in night.results]
    a, b, c, _ = (value / scale for value in medians)
    assert values_of(kept, metric) == [a, b, None, None, None, pytest.approx(c)]


def test_memory_is_in_mebibytes(kept: Kept) -> None:
    kept.export()
    assert values_of(kept, "peak_memory")[:2] == [2e10 / 2**20, 2e10 / 2**20 + 1]


def test_error_bars_show_noise_between_launches(kept: Kept) -> None:
    many = [make_case(hardware="h100", micro_batch=n) for n in range(1, 101)]
    kept.export(kept.write(many, "many", noise=0.01))
    stats = kept.statistics("seconds_per_step")
    half = math.log(stats["ci_99_b"] / stats["ci_99_a"]) / 2
    assert half == pytest.approx(2.576 * 0.01 / math.sqrt(3), rel=0.15)
    assert stats["ci_99_a"] < stats["q_25"] < stats["q_75"] < stats["ci_99_b"]
    assert (stats["number"], stats["repeat"]) == (1, 3)
    memory = kept.statistics("peak_memory")
    assert memory["ci_99_a"] == memory["ci_99_b"] == 2e10 / 2**20


def test_pools_sessions_of_one_commit(kept: Kept) -> None:
    commit = kept.commits[0]
    name = f"{GPT2}.seconds_per_step"
    slow: dict[str, Any] = {"levels": lambda case, night: Level(step_s=3), "first": 100, "launches": 4}
    kept.write(CASES[:1], commits=[commit], **slow)
    kept.export()
    result = kept.result(commit)
    params = result.get_result_params(name)
    [first, second, *_] = result.get_result_samples(name, params)
    assert (len(first), len(second)) == (7, 3)
    assert result.get_result_value(name, params)[0] == median(first)
    assert kept.statistics("seconds_per_step")["repeat"] == 7
    [file] = (kept.out / "results" / H100).glob(f"{commit}-*.json")
    [began] = {row[COLUMNS.index("started_at")] for row in json.loads(file.read_text())["results"].values()}
    # The nights of `write_history` are measured at 03:00 UTC.
    assert began == 1000 * (BEGIN + timedelta(days=100, hours=3)).timestamp()


def test_export_replaces_the_previous_one(kept: Kept) -> None:
    kept.export()
    first, *others = kept.commits
    kept.write([make_case(hardware="h100", micro_batch=32)], commits=others[2:], first=50)
    for file in kept.history.glob(f"*/{first}/*.json"):
        file.unlink()
    assert kept.export().commits == {results.commit_hash for results in kept.results()} == set(others)
    benchmarks = kept.benchmarks()
    assert benchmarks[f"{GPT2}.peak_memory"]["params"][2] == ["2", "4", "16", "32"]
    assert "llama-tiny.1x2.fp32.peak_memory" in benchmarks


def test_omits_and_names_commits_off_the_branch(kept: Kept) -> None:
    git.git("checkout", "-q", "--orphan", "side", cwd=kept.repo)
    kept.write(CASES[:1], commits=["f" * 40], first=20)
    exported = kept.export(branch="main")
    assert exported.unplaced == {"f" * 40: f"not in {kept.repo}"}
    assert exported.commits == {results.commit_hash for results in kept.results()} == set(kept.commits)


def test_models_with_the_same_name_in_asv_fail(kept: Kept) -> None:
    tiny = make_case().model
    assert isinstance(tiny, Model)
    both = [make_case(hardware="h100", model=tiny.replace(name=name)) for name in ("tiny.1", "tiny_1")]
    with pytest.raises(FileError, match=r"'tiny.1' and 'tiny_1' have the same name in asv: 'tiny_1'\. R"):
        kept.export(kept.write(both, "twins"))


@pytest.mark.parametrize(
    ("name", "content"),
    [("thesis.tex", ""), ("asv.conf.json", '{"version": 1}'), ("asv.conf.json", "// ours")],
    ids=["another file", "another configuration", "a comment"],
)
def test_never_exports_between_files_of_others(kept: Kept, name: str, content: str) -> None:
    kept.out.mkdir()
    (kept.out / name).write_text(content)
    with pytest.raises(FileError, match=r"out is not empty and does not contain an export\. G"):
        kept.export()
    assert (kept.out / name).read_text() == content
