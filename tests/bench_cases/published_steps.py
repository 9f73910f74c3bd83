"""Helpers: the published steps that are predicted from stored logs of dry runs.

For each step: its case, its machine and its logs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import perfsuite
from bench_cases.predicted import published_tokens_per_s
from bench_cases.published import Row
from perfsuite import Case, Topology
from perfsuite.analysis.step_time.expected import speeds
from perfsuite.analysis.step_time.prediction import StepTime, step_time
from perfsuite.analysis.step_time.streams import MachineSpeeds, reported_step
from perfsuite.case.catalog import llama
from perfsuite.dry.machine import pretended_gpu
from perfsuite.results import device_log_file
from tests.analysis.step_time.steps import of_layers
from tests.bench_cases.test_published import CASES, PUBLISHED
from tests.frameworks.removable import skip_module_without

skip_module_without("nanotron", "torchtitan")
LOGS = Path(__file__).with_name("step_logs")
FEW = 2  # a step is extrapolated from two logs, with FEW and MORE layers
MORE = 4
A100 = "NVIDIA A100-SXM4-80GB"
H100 = "NVIDIA H100 80GB HBM3"


@dataclass(frozen=True, kw_only=True)
class PublishedStep:
    """A row of a published table. The dry runs of `case` have fewer layers."""

    cluster: str
    name: str  # how its log files are named
    row: Row
    case: Case
    product: str
    interconnect: str

    @property
    def layers(self) -> int:
        """The number of layers of the whole model."""
        layers = self.case.model.config["num_hidden_layers"]
        assert isinstance(layers, int)
        return layers

    def log(self, layers: int) -> Path:
        """Return the file of the log that was made with this number of layers."""
        return LOGS / f"{self.name}-{layers}.json.gz"

    def with_layers(self, layers: int) -> Case:
        """Return the case with this number of layers."""
        config = {**self.case.model.config, "num_hidden_layers": layers}
        return self.case.replace(model=self.case.model.replace(config=config))

    @property
    def machine(self) -> MachineSpeeds:
        """The speeds of the machine on which the step is predicted."""
        machine = pretended_gpu(self.product, self.case.topology).replace(interconnect=self.interconnect)
        return speeds(machine, self.case)

    @cached_property
    def predicted(self) -> StepTime:
        """The predicted parts of a step."""
        return self.predicted_on(self.machine)

    def predicted_on(self, its: MachineSpeeds) -> StepTime:
        """Return the parts of a step on a machine with other speeds."""
        few, more = (
            step_time(reported_step(device_log_file.read(self.log(layers))), its) for layers in (FEW, MORE)
        )
        return of_layers(few, more, FEW, MORE, self.layers)

    @property
    def ratio(self) -> float:
        """The predicted time of a step as a multiple of the published time."""
        speed = published_tokens_per_s(self.row)
        assert speed is not None
        return self.gpu_seconds_per_token * speed / self.row.devices

    @property
    def gpu_seconds_per_token(self) -> float:
        """The seconds that one GPU is predicted to take for a token."""
        return self.predicted.total_s * self.row.devices / self._tokens

    @property
    def _tokens(self) -> int:
        case = self.case
        ranks = case.topology.world_size // getattr(case.framework, "tensor_parallel", 1)
        ranks //= getattr(case.framework, "tp", 1)
        assert case.sequence_length is not None
        return case.sequence_length * case.micro_batch * case.gradient_accumulation * ranks


def _rows(comparison: str, prefix: str) -> list[Row]:
    (its,) = (candidate for candidate in PUBLISHED if candidate.name == comparison)
    return [row for row in its.rows if row.case.startswith(prefix)]


# torchtitan's own configurations have no `layers`, so these cases give the same sizes as options.
_TITAN_8B = Case(
    model="llama-3.1-8b",
    framework=perfsuite.TorchTitan(),
    sequence_length=8192,
    micro_batch=2,
    precision="bf16-mixed",
    activation_checkpointing="selective-op",
    topology=Topology(processes_per_node=8),
    hardware="h100",
)
_405B = llama(
    "llama-3.1-405b", layers=126, heads=128, kv_heads=8, hidden=16384, mlp=53248, vocab=128256,
    positions=131072, rope={"rope_type": "default", "rope_theta": 500000.0},
)  # fmt: skip
_TITAN_405B = _TITAN_8B.replace(
    model=_405B,
    framework=perfsuite.TorchTitan(tensor_parallel=8),
    activation_checkpointing="full",
    topology=Topology(nodes=16, processes_per_node=8),
)


def _steps() -> list[PublishedStep]:
    a100 = [
        PublishedStep(
            cluster="torchtitan on 64 A100",
            name=f"a100-{number}",
            row=row,
            case=CASES[row.case],
            product=A100,
            interconnect="8xib200",
        )
        for number, row in enumerate(_rows("torchtitan-llama", "torchtitan"))
    ]
    nanotron = [
        PublishedStep(
            cluster=f"{'nanotron' if row.case.startswith('nanotron') else 'LLaMA Factory'} on H100",
            name=f"blog-{number}",
            row=row,
            case=CASES[row.case],
            product=H100,
            interconnect="4xib400",
        )
        for number, row in enumerate(_rows("fsdp-vs-3d-parallelism", ""))
        if "-pp2-" not in row.case
    ]
    uncompiled = [
        *((row, _TITAN_8B) for row in _rows("torchtitan-h100", "torchtitan") if "compile" not in row.case),
        *((row, _TITAN_405B) for row in _rows("torchtitan-405b", "torchtitan")),
    ]
    h100 = [
        PublishedStep(
            cluster="torchtitan on H100 of 500 W",
            name=f"titan-{number}",
            row=row,
            case=case.replace(topology=CASES[row.case].topology),
            product=H100,
            interconnect="8xib400",
        )
        for number, (row, case) in enumerate(uncompiled)
    ]
    return [*a100, *nanotron, *h100]


STEPS = _steps()
