"""Writes a made-up history of a repository's nights. The result is always the same."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from perfsuite.case.case import Case
from perfsuite.features.history import store
from perfsuite.features.history.store import StoredReference, StoredResult, StoredSession
from tests.samples import make_gpu_machine
from tests.synthetic import BEGIN

TOKENS_PER_STEP = 8192


@dataclass(frozen=True, kw_only=True)
class Level:
    """The costs of a case on a night, relative to the first night."""

    step_s: float = 1.0
    memory: float = 1.0


Levels = Callable[[int, int], Level]
"""A function of the number of a case and the number of a night. It returns a level."""


def write_history(
    directory: Path,
    commits: Sequence[str],
    cases: Sequence[Case],
    levels: Levels = lambda case, night: Level(),
    *,
    gpus: Sequence[str] = ("NVIDIA H100 80GB HBM3",),
    noise: float = 0.005,
    launches: int = 3,
    first: int = 0,
    environment: Callable[[int], dict[str, str]] = lambda night: {"torch": "2.13.0"},
    reference: Callable[[int], StoredReference | None] = lambda night: None,
) -> None:
    """Write a session for each commit and each kind of GPU. `noise` is the relative noise of a launch."""
    stored = [store.stored_case(case) for case in cases]
    names = [name for name, _ in stored]
    for gpu in gpus:
        machine = make_gpu_machine(gpu)
        for night, commit in enumerate(commits, first):
            luck = random.Random(f"{gpu} {night}")
            results = []
            for number, name in enumerate(names):
                level = levels(number, night)
                step_s = tuple(
                    float(f"{(0.1 + number / 1000) * level.step_s * (1 + noise * luck.gauss(0, 1)):.6g}")
                    for _ in range(launches)
                )
                results.append(
                    StoredResult(
                        case=name,
                        outcome="passed",
                        step_s_p50=step_s,
                        step_s_mean=step_s,
                        probe_s_p50=(None,) * launches,
                        peak_memory_bytes=(round(2e10 * level.memory) + number * 2**20,) * launches,
                        tokens_per_step=TOKENS_PER_STEP,
                        settings=0,
                        environment=0,
                    )
                )
            session = StoredSession(
                perfsuite="0.1",
                hardware_class=machine.hardware_class,
                commit=commit,
                started_at=BEGIN + timedelta(days=night, hours=3),
                machine=machine,
                settings=({"wrapper": "FSDP"},),
                environments=(environment(night),),
                results=tuple(results),
                verdicts={},
                reference=reference(night),
            )
            store.keep(directory, session, dict(stored))
