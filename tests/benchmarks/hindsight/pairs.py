"""The pairs: two releases of a library, and what the gate must report about the second."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from perfsuite import Case, LoRA, Model, Script, Topology

SCRIPTS = Path(__file__).with_name("scripts")
DATA = tomllib.loads(Path(__file__).with_name("pairs.toml").read_text())
LORA = LoRA(rank=8, alpha=16)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two arms of one script. If a newer release fixed a regression, `good` is the release with the fix."""

    name: str
    good: str
    """The arm as it is written on the command line, for example `accelerate==1.11.0`."""
    bad: str
    script: str = ""
    """The name of a file in `scripts/` without its suffix, and its arguments."""
    thread: str = ""
    """`repository#number`, or `repository tag` for release notes. It is empty for an unchanged pair."""
    kind: Literal["step", "some steps", "growth", "data", "start-up", "event", "dtype", "scale"] = "step"
    """Where the regression appears. `some steps`: only some steps have the additional work.

    `scale`: it appears only with many layers or ranks.
    """
    what: str = ""
    """The additional work of `bad`."""
    names: str = ""
    """A regular expression that the first line must match. If it is empty, the gate must find nothing."""
    ranks: int = 1
    dry: bool = False
    """Whether the regression appears only on a GPU. If so, both arms have dry runs, which simulate a GPU."""
    tokens: Literal["fixed", "vary", "none"] = "fixed"
    """The tokens of a step. `none`: the script trains on 16 images per step instead."""
    case: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the case."""
    why_missed: str = ""
    """Why the gate does not find the regression. Empty if it does."""
    cannot: str = ""
    """Why the pair cannot run here. Empty if it can."""

    @property
    def is_regression(self) -> bool:
        """Whether the gate must find something."""
        return bool(self.thread)

    @property
    def link(self) -> str:
        """The thread as a Markdown link. GitHub redirects the address of an issue to a pull request."""
        name, mark, number = re.split("([# ])", self.thread)
        kind = "issues" if mark == "#" else "releases/tag"
        return f"[{self.thread}](https://github.com/{DATA['repositories'][name]}/{kind}/{number})"

    def measured(self) -> Case:
        """The case of the pair's script."""
        stem, *arguments = self.script.split()
        path = str(SCRIPTS / f"{stem}.py")
        tokens = "vary" if self.tokens == "vary" else "fixed"
        script = Script(path=path, arguments=tuple(arguments), label=self.name, tokens=tokens)
        length, batch = (None, 16) if self.tokens == "none" else (32, 2)
        fields = {"sequence_length": length, "micro_batch": batch, "max_warmup_steps": 4, "steps": 10}
        return Case(
            model=Model.named("tiny"),
            framework=script,
            topology=Topology(processes_per_node=self.ranks),
            hardware="h100" if self.dry else "cpu",
            **{**fields, **self.case},
        )

    def names_cause(self, sentence: str) -> bool:
        """Whether a sentence names the cause of this pair's regression."""
        return re.search(self.names, sentence) is not None


def _name(good: str, bad: str, script: str) -> str:
    """Return the name of an unchanged pair."""
    releases = f"{good.split()[0]}-{bad.split()[0].rpartition('==')[2]}"
    return f"{releases}-{script}".replace("==", "-").replace(" ", "-")


PAIRS = (
    *(Pair(**{"name": entry["thread"].replace("#", "-"), **entry}) for entry in DATA["regression"]),
    *(Pair(name=_name(entry["good"], entry["bad"], entry["script"]), **entry) for entry in DATA["unchanged"]),
)
"""All pairs, starting with the regressions."""
