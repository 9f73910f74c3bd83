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


def test_target_is_the_architecture_not_a_machine() -> None:
    a100 = make_gpu_machine("NVIDIA A100-SXM4-80GB")
    assert [target_of(machine, dry=False) for machine in (make_machine(), make_gpu_machine())] == [
        "cpu",
        "sm90",
    ]
    other = make_machine(hardware_class="cpu-other-64c")
    assert [target_of(machine, dry=True) for machine in (other, a100)] == ["dry-cpu", "dry-sm80"]
    assert from_runs([launch(dry=True)]).target == "dry-cpu"


def test_newest_launch_is_the_count_baseline() -> None:
    accepted = Acceptance(by="Ada", date="2026-01-03", commit=None)
    made = from_runs([launch(MORE), launch(started_at="later")], accepted=accepted)
    assert (made.target, made.launches, made.recorded_at) == ("cpu", 2, "2026-01-02T03:04:05+00:00")
    assert (made.counts, made.unsteady) == (launch().counts, ("host reads in forward",))
    assert made.versions == {"torch": "2.13.0", "transformers": "5.23.0"}
    assert (made.method, made.accepted) == ("dispatch-2", accepted)
    launches = [launch(counts(), rank_counts).counts for rank_counts in (counts(), MORE, counts())]
    assert unsteady(launches) == {"host reads in forward": 2}
    alone = [entry for entry in launches[1] if 0 in entry.ranks]
    assert unsteady(launches[:1]) == unsteady([launches[0], alone]) == {}


def versions(case: dict[str, Any], environment: dict[str, str], **changes: Any) -> dict[str, str]:
    seen = Observed(settings={}, environment={"python": "3.11", "kernel": "6", **environment})
    return versions_of(launch(case=make_case(**case), observed=seen, **changes))


def test_versions_cover_a_steps_packages() -> None:
    installed = {"torch": "2.13.0", "transformers": "5", "peft": "1", "bitsandbytes": "2", "lightning": "3"}
    assert versions({}, installed) == {"torch": "2.13.0", "transformers": "5"}
    lightning = {"framework": Lightning(strategy="ddp"), "model": "llama-tiny"}
    assert versions(lightning, installed) == {"torch": "2.13.0", "transformers": "5", "lightning": "3"}
    tuned = {"framework": "ddp", "model": "llama-tiny", "lora": LoRA(rank=4, alpha=8), "quantization": "4bit"}
    assert list(versions(tuned, installed)) == ["torch", "transformers", "peft", "bitsandbytes"]
    assert versions_of(launch(observed=None)) == {}


def test_torch_build_tag_is_not_a_version() -> None:
    for version in ("2.13.0", "2.14.0.dev20261101", "2.14.0a0+git1234abc"):
        for build in ("", "+cpu", "+cu130"):
            assert versions({}, {"torch": version + build}) == {"torch": version}
    libraries = {"cuda": "13.0", "cudnn": "91500", "triton": "3.7.0"}
    here = {"torch": "2.13.0+cu130", "nccl": "2.29.2", **libraries}
    assert versions({}, here, machine=make_gpu_machine()) == {"torch": "2.13.0", **libraries}
    assert versions({}, here) == {"torch": "2.13.0"}
    assert versions({}, here, machine=make_gpu_machine(), dry=True) == {"torch": "2.13.0"}


def test_file_has_a_line_for_each_collective(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    made = baseline_of(launch(counts(), MORE))
    documents.write(file, made)
    assert documents.read(file, CountBaseline) == made
    lines = [line.strip(" ,") for line in file.read_text().splitlines()]
    assert lines.count(json.dumps(documents.plain(GATHERED), sort_keys=True)) == 2
    assert '"ops": {"aten.add": 40, "aten.mm": 87}' in lines
    assert file.stat().st_size < 6000


def test_a_bad_file_is_named_with_its_field(tmp_path: Path) -> None:
    for changes, said in (
        ({"schema_version": 2}, "field schema_version: this perfsuite reads 1, got 2. Record it again"),
        ({"counts": []}, "field counts: Tuple should have at least 1 item"),
        ({"counts": [{"ranks": [0], "counts": {"flops": {"sideways": 1}}}]}, "field counts.0.counts.flops."),
        ({"launches": 0}, "field launches: Input should be greater than or equal to 1"),
        ({"kernels": {}}, "field kernels: unknown field"),
    ):
        file = tmp_path / "x.json"
        file.write_text(json.dumps({**documents.plain(baseline_of()), **changes}))
        with pytest.raises(FileError, match=f"^{file}: {said}"):
            documents.read(file, CountBaseline)
