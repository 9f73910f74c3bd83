"""Helpers: launch scripts that train a small network on samples instead of tokens."""

from pathlib import Path
from typing import Any

from perfsuite import Case, Model, Script, Topology
from perfsuite.measure import USUAL, Launching, launch_once
from perfsuite.node.machine import detect
from perfsuite.results.run import Run
from tests.frameworks import test_base as base

LIGHTNING_MODULE = """
class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch):
        return (self.layer(batch) - 1).square().mean()

    def validation_step(self, batch):
        self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""
"""Code of a script that imports torch and `LightningModule`."""


def launched(
    directory: Path,
    text: str,
    *,
    ranks: int = 1,
    env: dict[str, Any],
    how: Launching = USUAL,
    **options: Any,
) -> Run:
    """Launch a script with this text. `options` are passed to `Script`."""
    directory.mkdir(exist_ok=True)
    path = directory / "train.py"
    path.write_text(text)
    variables = {name: str(value) for name, value in env.items()}
    case: Case = base.SMALL.replace(
        model=Model.named("net"),
        framework=Script(path=path, env=variables, **options),
        sequence_length=None,
        micro_batch=4,
        topology=Topology(processes_per_node=ranks),
        max_warmup_steps=4,
        steps=10,
    )
    return launch_once(case, detect(), directory / "run", how)


def that_went_well(run: Run) -> Run:
    """Return a launch that did not fail. Its health is removed, because the machine might have been busy."""
    assert run.failure is None, run.failure
    return run.replace(health=None)
