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
    """Two arms of one script. A fix is read backwards: `good` is the release that has the fix."""

    name: str
    good: str
    """The words of an arm, for example `accelerate==1.11.0`."""
    bad: str
    script: str = ""
    """The name of a file in `scripts/` without its suffix, and its arguments."""
    thread: str = ""
    """`repository#number`, or `repository tag` for release notes. It is empty for an unchanged pair."""
    kind: Literal["step", "some steps", "growth", "data", "start-up", "event", "dtype", "scale"] = "step"
    """Where the regression shows. `some steps`: only some steps have the additional work.

    `scale`: only with many layers or ranks.
    """
    what: str = ""
    """The additional work of `bad`."""
    names: str = ""
    """A regular expression for what the first line must name. If it is empty, nothing may be found."""
    ranks: int = 1
    dry: bool = False
    """Whether only a GPU shows the regression. Then both arms have dry runs that pretend to have a GPU."""
    tokens: Literal["fixed", "vary", "none"] = "fixed"
    """With `none`, the script trains on 16 images per step instead of tokens."""
    case: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the case."""
    why_missed: str = ""
    """Why the gate does not find the regression, if it does not."""
    cannot: str = ""
    """Why the pair cannot run here. It is empty if it can."""

    @property
    def is_regression(self) -> bool:
        """Whether something must be found."""
        return bool(self.thread)

    @property
    def link(self) -> str:
        """The thread as a Markdown link. GitHub redirects from an issue's address to a pull request."""
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
        """Whether a line names what this pair is about."""
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
