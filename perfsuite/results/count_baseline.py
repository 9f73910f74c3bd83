"""Baselines of counts: the accepted or recorded counts of a case's step, valid on any machine of a target."""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field

from perfsuite.case.hardware import Machine
from perfsuite.documents import lines, plain
from perfsuite.results import baseline as baselines
from perfsuite.results.baseline import Acceptance, BaselineDocument, BaselineLaunch
from perfsuite.results.counts import RankCounts, of_rank
from perfsuite.results.quantities import differing
from perfsuite.results.rank_report import Dtypes
from perfsuite.results.run import Figures, Run

DRY = "dry-"  # prefix of the target of a dry run
COMPUTED = ("gradient_norm", "unclipped_norm", "tokens_given")  # figures that show what was computed
OF_A_GPU = ["cuda", "cudnn", "triton"]  # packages that also determine which kernels a step calls on a GPU
_BUILD = re.compile(r"\+(cpu|cu\d+)$")


class CountBaseline(BaselineDocument):
    """`counts/<target>/<case id>.json`: the counts of a case's step."""

    FOLDER = "target"
    schema_version: Literal[1] = 1
    target: str  # see `target_of`
    counts: tuple[RankCounts, ...] = Field(min_length=1)  # counts of the newest launch
    unsteady: tuple[str, ...] = ()  # fields that differ between launches: shown, never judged
    # The largest value of each unsteady field in any launch. Empty in older baselines.
    largest: dict[str, int] = Field(default_factory=dict)
    # Values that each launch computed: loss, gradient norms, tokens. Empty in older baselines.
    computed: tuple[BaselineLaunch, ...] = ()
    dtypes: Dtypes = Field(default_factory=dict)  # dtypes in the newest launch's model
    settings: dict[str, str] = Field(default_factory=dict)  # observed by the ranks of the newest launch
    # The highest `Run.other_threads` of the launches; None in older baselines.
    other_threads: int | None = None
    versions: dict[str, str]  # versions of torch and of the packages that a step uses
    launches: int = Field(ge=1)
    recorded_at: str
    accepted: Acceptance | None = None

    def as_json(self) -> str:
        """Return the JSON. Each collective, and each mapping from names to counts, is on its own line."""
        content = plain(self)
        for launch in content["computed"]:
            figures = launch["figures"].items()
            launch["figures"] = {
                name: value for name, value in figures if name in COMPUTED and value is not None
            }
        return lines(content) + "\n"

    @property
    def method(self) -> str:
        """The method with which the steps were counted."""
        # pragma: no mutate [0] to [-1]: all ranks are counted with one method
        return self.counts[0].counts.method


def target_of(machine: Machine, *, dry: bool) -> str:
    """Return the target on which the counts depend: `cpu`, `sm90`, or `dry-sm90` for a dry run."""
    return f"{DRY if dry else ''}{machine.architecture}"


def from_runs(runs: Sequence[Run], *, accepted: Acceptance | None = None) -> CountBaseline:
    """Make a baseline from counted runs of one case for one target. The oldest run comes first."""
    newest = runs[-1]
    largest = unsteady(run.counts for run in runs)
    return CountBaseline(
        target=target_of(newest.machine, dry=newest.dry),
        case=newest.case,
        counts=newest.counts,
        unsteady=tuple(largest),
        largest=largest,
        computed=tuple(_computed(run) for run in runs),
        dtypes=newest.dtypes,
        settings={} if newest.observed is None else newest.observed.settings,
        other_threads=max(run.other_threads for run in runs),
        versions=versions_of(newest),
        launches=len(runs),
        recorded_at=runs[0].started_at,
        accepted=accepted,
    )


def _computed(run: Run) -> BaselineLaunch:
    """Return the values that a launch computed, except those that depend on the machine."""
    kept = baselines.from_runs([run]).launches[0]
    values = {name: kept.figures.get(name) for name in COMPUTED}
    observed = {name: value for name, value in values.items() if value is not None}
    return BaselineLaunch(figures=Figures.of(observed), loss=kept.loss)


def unsteady(launches: Iterable[Sequence[RankCounts]]) -> dict[str, int]:
    """Return the fields that differ between launches on at least one rank, sorted.

    Each field is mapped to its largest value in all launches and ranks.
    """
    all_launches = list(launches)
    largest = dict[str, int]()
    for rank in [rank for entry in all_launches[0] for rank in entry.ranks]:
        of_launches = filter(None, (of_rank(launch, rank) for launch in all_launches))
        for field, value in differing(of_launches).items():
            largest[field] = max(largest.get(field, 0), value)
    return dict(sorted(largest.items()))


def versions_of(run: Run) -> dict[str, str]:
    """Return the observed versions of torch, of packages that a step uses and, on a GPU, of `OF_A_GPU`."""
    case = run.case
    seen = run.observed.environment if run.observed is not None else {}
    packages = ["torch", "transformers", *case.framework.packages]
    packages += ["peft"] if case.lora is not None else []
    packages += ["bitsandbytes"] if case.quantization != "none" else []
    packages += OF_A_GPU if run.machine.device == "cuda" and not run.dry else []
    return {package: _BUILD.sub("", seen[package]) for package in packages if package in seen}
