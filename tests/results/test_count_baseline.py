from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perfsuite import documents
from perfsuite.case.case import LoRA
from perfsuite.errors import FileError
from perfsuite.frameworks.lightning import Lightning
from perfsuite.results.baseline import Acceptance
from perfsuite.results.count_baseline import CountBaseline, from_runs, target_of, unsteady, versions_of
from perfsuite.results.rank_report import Observed
from tests.samples import make_case, make_gpu_machine, make_machine
from tests.twin_counts import GATHERED, baseline_of, counts, launch

MORE = counts(host_reads={"forward": 2, "optimizer": 39})


def test_the_target_is_the_architecture_and_no_machine() -> None:
    assert target_of(make_machine(), dry=False) == "cpu"
    assert target_of(make_machine(hardware_class="cpu-other-64c"), dry=True) == "dry-cpu"
    assert target_of(make_gpu_machine(), dry=False) == "sm90"
    assert target_of(make_gpu_machine("NVIDIA A100-SXM4-80GB"), dry=True) == "dry-sm80"


def test_a_baseline_is_the_newest_launch_and_says_where_the_others_differ() -> None:
    accepted = Acceptance(by="Ada", date="2026-01-03", commit=None)
    made = from_runs([launch(MORE), launch(started_at="later")], accepted=accepted)
    assert (made.target, made.launches, made.recorded_at) == ("cpu", 2, "2026-01-02T03:04:05+00:00")
    assert made.counts == launch().counts
    assert made.unsteady == ("host reads in forward",)
    assert made.versions == {"torch": "2.13.0", "transformers": "5.23.0"}
    assert (made.method, made.accepted) == ("dispatch-1", accepted)
    assert from_runs([launch(dry=True)]).target == "dry-cpu"


def test_a_rank_that_differs_makes_its_field_unsteady() -> None:
    launches = [launch(counts(), each).counts for each in (counts(), MORE, counts())]
    assert unsteady(launches) == ("host reads in forward",)
    assert unsteady(launches[:1]) == ()
    alone = [entry for entry in launches[1] if 0 in entry.ranks]
    assert unsteady([launches[0], alone]) == ()


def versions(case: dict[str, Any], **environment: str) -> dict[str, str]:
    seen = Observed(settings={}, environment={"python": "3.11", "kernel": "6", **environment})
    return versions_of(launch(case=make_case(**case), observed=seen))


def test_versions_are_of_the_packages_whose_code_makes_a_step() -> None:
    installed = {"torch": "2.13.0", "transformers": "5", "peft": "1", "bitsandbytes": "2", "lightning": "3"}
    assert versions({}, **installed) == {"torch": "2.13.0", "transformers": "5"}
    lightning = {"framework": Lightning(strategy="ddp"), "model": "llama-tiny"}
    assert versions(lightning, **installed) == {"torch": "2.13.0", "transformers": "5", "lightning": "3"}
    tuned = {"model": "llama-tiny", "lora": LoRA(rank=4, alpha=8), "quantization": "4bit"}
    packages = ["torch", "transformers", "peft", "bitsandbytes"]
    assert list(versions({"framework": "ddp", **tuned}, **installed)) == packages
    assert versions_of(launch(observed=None)) == {}


@pytest.mark.parametrize(
    ("torch", "kept"),
    [
        ("2.13.0+cpu", "2.13.0"),
        ("2.13.0+cu130", "2.13.0"),
        ("2.13.0", "2.13.0"),
        ("2.14.0.dev20261101+cpu", "2.14.0.dev20261101"),
        ("2.14.0a0+git1234abc", "2.14.0a0+git1234abc"),
    ],
)
def test_what_a_build_of_torch_is_for_is_no_version(torch: str, kept: str) -> None:
    assert versions({}, torch=torch) == {"torch": kept}


def test_on_a_gpu_another_build_of_one_torch_is_another_version() -> None:
    gpu = make_gpu_machine()
    here = {"torch": "2.13.0+cu130", "cuda": "13.0", "cudnn": "91500", "nccl": "2.29.2", "triton": "3.7.0"}
    run = launch(machine=gpu, observed=Observed(settings={}, environment=here))
    libraries = {"cuda": "13.0", "cudnn": "91500", "triton": "3.7.0"}
    assert versions_of(run) == {"torch": "2.13.0", **libraries}
    assert versions_of(run.replace(dry=True)) == {"torch": "2.13.0"}
    assert versions({}, **here) == {"torch": "2.13.0"}


def test_its_file_has_a_line_for_each_collective_and_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    made = baseline_of(launch(counts(), MORE))
    documents.write(file, made)
    assert documents.read(file, CountBaseline) == made
    lines = [line.strip(" ,") for line in file.read_text().splitlines()]
    assert lines.count(json.dumps(documents.plain(GATHERED), sort_keys=True)) == 2
    assert '"ops": {"aten.add": 40, "aten.mm": 87}' in lines
    assert file.stat().st_size < 6000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "field schema_version: this perfsuite reads 1, got 2. Record it anew"),
        ({"counts": []}, "field counts: Tuple should have at least 1 item"),
        ({"counts": [{"ranks": [0], "counts": {"flops": {"sideways": 1}}}]}, "field counts.0.counts.flops."),
        ({"launches": 0}, "field launches: Input should be greater than or equal to 1"),
        ({"kernels": {}}, "field kernels: unknown field"),
    ],
)
def test_a_bad_file_is_an_error_that_names_the_field(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({**documents.plain(baseline_of()), **changes}))
    with pytest.raises(FileError, match=f"^{file}: {message}"):
        documents.read(file, CountBaseline)
