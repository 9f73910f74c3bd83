"""Test real launches over gloo, for every torch framework and option that works on a CPU."""

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from perfsuite import (
    DDP,
    FSDP,
    FSDP2,
    Accelerate,
    Case,
    Fake,
    Framework,
    Lightning,
    LoRA,
    Model,
    Script,
    Topology,
    Trainer,
)
from perfsuite.errors import PackageError
from perfsuite.frameworks.base import missing_package, optional_packages, require
from perfsuite.launch.requirements import unsupported
from perfsuite.measure import Launching, launch_once
from perfsuite.node.machine import detect
from perfsuite.results.rank_report import COLD, START_UP, Observed
from perfsuite.results.run import Run
from perfsuite.verdict.comparability import ASKED
from perfsuite.worker.counting import flops
from tests.frameworks.learnt import check_learnt, learnt
from tests.samples import known, make_case
from tests.verdict.judging import CHOSEN

SMALL = make_case(
    model="llama-tiny", framework=DDP(), sequence_length=32, max_warmup_steps=2, steps=10, timeout_s=240
)
"""The case has two processes, with micro-batches of two sequences."""
MIXED = SMALL.replace(precision="bf16-mixed")
COUNTED = SMALL.replace(max_warmup_steps=4)
"""The same case with a step that is counted before the measured steps."""
FOUR = Topology(processes_per_node=4)
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
FULL = FSDP(sharding_strategy="FULL_SHARD")
GRADIENTS_SHARDED = Accelerate(
    strategy="fsdp1", sharding_strategy="SHARD_GRAD_OP", backward_prefetch="BACKWARD_PRE"
)
ADAPTED = SMALL.replace(lora=LoRA(rank=4, alpha=8), learning_rate=1e-2)


def measured(case: Case, directory: Path, inject: str | None = None) -> Run:
    result = launch_once(case, detect(), directory, Launching(inject=inject))
    if inject is None:
        assert result.failure is None, f"{result.failure.message}\n{result.failure.traceback}"
    if result.observed is not None:
        assert result.observed.settings.keys() <= ASKED | CHOSEN
        parts = ["imports", *(["process group"] if case.topology.world_size > 1 else [])]
        named = {name.removeprefix(COLD) for name in result.spans}
        assert {START_UP, *(f"{START_UP}: {part}" for part in parts)} <= named
    kept = [entry.counts.kept for entry in result.counts if entry.counts.kept is not None]
    assert not any(objects.total or objects.graphs for objects in kept), kept
    return result


def observed(run: Run) -> Observed:
    return known(run.observed)


def llama_tiny(name: str, **changes: Any) -> Model:
    return Model.from_config({**SMALL.model.config, **changes}, name=name)


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return measured(COUNTED, tmp_path_factory.mktemp("ddp"))


@pytest.mark.smoke("ddp")
def test_a_run_is_complete(ddp: Run) -> None:
    assert len(ddp.step_s) == len(ddp.probe_s) == len(ddp.loss) == 14
    assert observed(ddp).settings["wrapper"] == "DistributedDataParallel"
    assert observed(ddp).environment["torch"].startswith("2.")


@pytest.mark.smoke
def test_speeds_follow_from_the_median_step(ddp: Run) -> None:
    figures = ddp.figures
    assert figures.tokens_per_s == pytest.approx(2 * 2 * 32 / float(figures.step_s_p50 or 0))
    assert figures.tokens_per_s_per_device == pytest.approx(float(figures.tokens_per_s or 0) / 2)
    assert figures.mfu is None


@pytest.mark.smoke
def test_peak_memory_holds_the_state_of_training(ddp: Run) -> None:
    peak_bytes = known(ddp.figures.peak_memory_bytes)
    assert peak_bytes > 4 * 918_656 * 4, "parameters, gradients and two moments in fp32"


@pytest.mark.smoke
def test_a_run_learns_as_a_plain_loop(ddp: Run) -> None:
    assert float(ddp.figures.loss_last or 0) < float(ddp.figures.loss_first or 0)
    check_learnt(ddp, COUNTED)


@pytest.mark.launch
@pytest.mark.parametrize(
    "framework",
    [
        pytest.param(FULL, marks=pytest.mark.smoke("fsdp")),
        pytest.param(FSDP2(), marks=pytest.mark.smoke("fsdp2")),
        pytest.param(Accelerate(strategy="ddp"), marks=pytest.mark.nightly),
        pytest.param(GRADIENTS_SHARDED, marks=pytest.mark.nightly),
        pytest.param(
            Accelerate(strategy="fsdp2"), marks=[pytest.mark.smoke("accelerate"), pytest.mark.nightly]
        ),
        pytest.param(Trainer(), marks=pytest.mark.nightly),
        pytest.param(
            Trainer(fsdp="full_shard auto_wrap"), marks=[pytest.mark.smoke("trainer"), pytest.mark.nightly]
        ),
        pytest.param(
            Lightning(strategy="fsdp2"), marks=[pytest.mark.smoke("lightning"), pytest.mark.nightly]
        ),
    ],
    ids=Framework.slug,
)
def test_strategies_train_as_a_plain_loop(tmp_path: Path, framework: Framework) -> None:
    """Weights, data and seed are the same, and sharding must not change what is learnt."""
    check_learnt(measured(COUNTED.replace(framework=framework), tmp_path), COUNTED)


SHALLOW = COUNTED.replace(model=llama_tiny("llama-shallow", num_hidden_layers=2))
TIED = COUNTED.replace(model=llama_tiny("llama-tied", num_hidden_layers=2, tie_word_embeddings=True))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        SHALLOW.replace(framework=FSDP2(tensor_parallel=2)),
        TIED.replace(
            framework=Accelerate(strategy="fsdp2", dp_shard_size=2, tp_size=2),
            activation_checkpointing="full",
        ),
        SHALLOW.replace(framework=Trainer(fsdp="full_shard auto_wrap", dp_shard_size=2, tp_size=2)),
    ],
    ids=["fsdp2", "accelerate, a tied embedding", "trainer"],
)
def test_tensor_parallel_ranks_train_as_one(tmp_path: Path, case: Case) -> None:
    """Each of two pairs of ranks splits the layers.

    The global batch is that of two ranks that split nothing.
    """
    split = measured(case.replace(topology=FOUR), tmp_path)
    plain = learnt(COUNTED.replace(model=case.model))
    assert split.loss == pytest.approx(plain.loss, rel=1e-4)
    # The two ranks of a pair add up the gradients of the norms.
    assert split.figures.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-3)
    assert split.figures.tokens_per_s == pytest.approx(2 * 2 * 32 / float(split.figures.step_s_p50 or 0))


@pytest.mark.nightly
def test_float8_trains_alike_when_sharded(tmp_path: Path) -> None:
    whole = COUNTED.replace(framework=FSDP2(float8="rowwise"))
    sharded = measured(whole, tmp_path)
    check_learnt(sharded, whole)
    assert sharded.loss == pytest.approx(learnt(COUNTED).loss, rel=0.02)
    assert sharded.loss != pytest.approx(learnt(COUNTED).loss, rel=1e-4)
    assert observed(sharded).settings["low_precision_modules"] == "28 Float8Linear"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("framework", "gathers"),
    [
        (Accelerate(strategy="ddp", float8="rowwise"), False),
        (Trainer(fsdp="full_shard auto_wrap", float8="tensorwise"), True),
    ],
    ids=["accelerate", "trainer"],
)
def test_accelerate_float8_trains_nearly_alike(framework: Framework, gathers: bool, tmp_path: Path) -> None:
    """Differences due to rounding grow from step to step. On some CPUs, later losses differ by 5%."""
    run = measured(COUNTED.replace(framework=framework, precision="bf16-mixed"), tmp_path)
    assert run.loss[:10] == pytest.approx(learnt(COUNTED).loss[:10], rel=0.01)
    gathered = {call.dtype for call in run.counts[0].counts.collectives if call.kind == "all_gather"}
    assert ("uint8" in gathered) == gathers
    assert ("gathered in float8" in observed(run).settings["low_precision_modules"]) == gathers
    assert any(note.startswith("no MFU: matmuls ran in fewer than 16 bits") for note in run.notes)


@pytest.mark.nightly
def test_sharded_experts_train_the_same(tmp_path: Path) -> None:
    experts = COUNTED.replace(model=llama_tiny("mixtral-tiny", **EXPERTS), attention="eager")
    sharded = measured(experts.replace(framework=FSDP2()), tmp_path)
    check_learnt(sharded, experts)
    tokens = experts.micro_batch * experts.sample_length
    assert sum(sharded.counts[0].counts.flops.values()) == known(sharded.flops).per_token * tokens


BUCKETS = DDP(static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=1)
ONCE = FULL.replace(sync_each_micro_batch=False)
KEPT = FSDP2(reshard_after_forward=False, sync_each_micro_batch=False)
IN_GROUPS = FSDP(sharding_strategy="HYBRID_SHARD", shard_group=2, backward_prefetch="none")
BY_TRAINER = Trainer(fsdp="full_shard auto_wrap", dp_replicate_size=2, dp_shard_size=2)


@pytest.mark.launch
@pytest.mark.parametrize(
    "case",
    [
        MIXED.replace(framework=BUCKETS, activation_checkpointing="every-2"),
        *(
            pytest.param(case, marks=pytest.mark.nightly)
            for case in (
                MIXED.replace(framework=ONCE, gradient_accumulation=2, activation_checkpointing="full"),
                MIXED.replace(
                    framework=KEPT, gradient_accumulation=2, activation_checkpointing="selective-op"
                ),
                SMALL.replace(framework=IN_GROUPS, attention="eager", precision="fp16-mixed", topology=FOUR),
                SMALL.replace(
                    framework=FSDP2(shard_group=2), precision="bf16", model="gpt2-tiny", topology=FOUR
                ),
                MIXED.replace(framework=BY_TRAINER, topology=FOUR),
            )
        ),
    ],
    ids=lambda case: case.id,
)
def test_options_take_effect(tmp_path: Path, case: Case) -> None:
    """The worker refuses settings that differ from the case. This test checks that it observes them."""
    settings = observed(measured(case, tmp_path)).settings
    blocks = {"llama-tiny": 4, "gpt2-tiny": 2}[case.model.name]
    recomputing = {"none": 0, "every-2": 2, "full": 4, "selective-op": 4}[case.activation_checkpointing]
    assert settings["recomputing_blocks"] == f"{recomputing} of {blocks}"
    compute = {"fp32": "float32", "fp16-mixed": "float16"}.get(case.precision, "bfloat16")
    assert settings["compute_dtype"] == compute
    assert settings["parameter_dtype"] == ("bfloat16" if case.precision == "bf16" else "float32")


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_blocks_train_the_same(tmp_path: Path, ranks: int) -> None:
    """With two ranks, a step is also counted."""
    flat = llama_tiny("llama-flat", num_hidden_layers=1)
    topology = Topology(processes_per_node=ranks)
    case = (SMALL if ranks == 1 else COUNTED).replace(model=flat, topology=topology, timeout_s=600)
    compiled = measured(case.replace(framework=FSDP2(), compile=True), tmp_path)
    assert compiled.loss == pytest.approx(learnt(case, data_ranks=ranks).loss, rel=1e-3)
    assert observed(compiled).settings["recomputing_blocks"] == "not observed (compiled)"
    assert observed(compiled).settings["attention_kernel"] == "not observed (compiled)"
    assert observed(compiled).settings["compiled"] == "yes"
    assert len(compiled.memory) == ranks


@pytest.mark.nightly
def test_sharded_mamba_trains_the_same(tmp_path: Path) -> None:
    mamba = SMALL.replace(model="mamba-tiny")
    sharded = mamba.replace(framework=FSDP2(), activation_checkpointing="full")
    check_learnt(measured(sharded, tmp_path), mamba)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "framework", [Accelerate(strategy="fsdp2"), Trainer(), Lightning(strategy="fsdp2")], ids=Framework.slug
)
def test_adapters_train_the_same_by_every_library(framework: Framework, tmp_path: Path) -> None:
    launch = measured(ADAPTED.replace(framework=framework), tmp_path)
    assert unsupported(launch.case, launch.machine) is None
    check_learnt(launch, ADAPTED)
    assert launch.loss[-1] < launch.loss[0] - 0.1


@pytest.mark.nightly
@pytest.mark.parametrize("framework", [FULL, FSDP2()], ids=Framework.slug)
def test_adapters_train_the_same_sharded_or_not(framework: Framework, tmp_path: Path) -> None:
    """The weights have four bits. A CPU can train with them, but slowly, so `unsupported` requires a GPU."""
    packed = ADAPTED.replace(quantization="4bit")
    sharded = measured(packed.replace(framework=framework), tmp_path)
    check_learnt(sharded, packed)
    assert observed(sharded).settings["adapters"] == "28"
    assert observed(sharded).settings["quantised_layers"] == "28 4bit"


# --- what has to be installed -----------------------------------------------------------------------------


def remove(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make these packages look as if they were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in packages else find(name))


@pytest.mark.parametrize(
    ("framework", "package", "purpose"),
    [
        (DDP(), "transformers", "for the model llama-tiny "),
        (Fake(), "transformers", None),
        (Script(path=__file__), "transformers", None),
        (Lightning(strategy="ddp"), "lightning", ""),
    ],
    ids=lambda value: value.name if isinstance(value, Framework) else "",
)
def test_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, framework: Framework, package: str, purpose: str | None
) -> None:
    remove(monkeypatch, package)
    message = (
        f"{purpose}it needs the package {package}, which is not installed: pip install 'perfsuite[{package}]'"
    )
    assert unsupported(SMALL.replace(framework=framework), detect()) == (None if purpose is None else message)


def test_names_a_version_its_extra_excludes(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"transformers": "4.57.1", "nanotron": "0.4", "peft": "0.18.0.dev0"}
    monkeypatch.setattr(importlib.metadata, "version", installed.__getitem__)
    assert missing_package("nanotron", "peft") is None
    assert missing_package("transformers") == (
        "it needs transformers<6,>=5, and 4.57.1 is installed: pip install 'perfsuite[transformers]'"
    )
    installed["nanotron"] = "0.5"
    message = "it needs nanotron==0.4, and 0.5 is installed: pip install 'perfsuite[nanotron]'"
    assert missing_package("nanotron") == message


def test_asks_for_a_package_without_extra() -> None:
    with pytest.raises(PackageError, match=r"^to fly: it needs the package nosuch, .*: pip install nosuch$"):
        require("nosuch", purpose="to fly")


def test_every_optional_package_has_its_extra() -> None:
    metadata = importlib.metadata.metadata("perfsuite")
    extras = {extra for extra, _ in optional_packages().values()}
    assert set(metadata.get_all("Provides-Extra") or ()) == {*extras, "all", "dev"}
    assert optional_packages()["numpy"][0] == "history"


def test_script_has_no_flops_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SMALL.replace(framework=Script(path=__file__))
    assert flops.notes(case) == ()
    remove(monkeypatch, "transformers")
    assert flops.count_known(case) is None
    assert flops.notes(case) == (
        "MFU is unknown: perfsuite cannot count the FLOPs of llama-tiny, because it needs the package "
        "transformers, which is not installed: pip install 'perfsuite[transformers]'",
    )
    assert flops.notes(case.replace(model=Model.named("net"))) == ()
