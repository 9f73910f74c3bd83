"""Baselines: the accepted or recorded results of a case. `perfsuite.results.store` manages their files."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from perfsuite.case.case import Case
from perfsuite.documents import Data, Document, unsealed
from perfsuite.results.dry_facts import Expected
from perfsuite.results.rank_report import Dtypes, Flops, Observed
from perfsuite.results.run import Figures, Run

MIN_ACCEPTED = 5  # minimum number of healthy launches of a reviewed baseline


class BaselineLaunch(Data):
    """One launch of a baseline."""

    figures: Figures  # rounded to 6 significant digits
    loss: tuple[float, ...] = ()  # the loss curve (see `loss_curve`)
    device_probe: dict[str, float] = Field(default_factory=dict)  # rates of the device before the workload
    # For each of these rates, the rate of the slowest rank as a share of the fastest rank's rate.
    slowest_share: dict[str, float] = Field(default_factory=dict)
    session: str | None = None  # name of its session; None: all launches without a name form one session
    nodes: tuple[str, ...] = ()  # names of the nodes that it ran on; empty on a single machine


class Acceptance(Data):
    """Who accepted a baseline, when and why. A baseline that was only recorded has no acceptance."""

    by: str
    date: str
    commit: str | None  # the commit of the baseline's repository when the baseline was accepted
    reason: str | None = None
    # The commit whose code the newest launches ran. None if it is unknown, or if there were uncommitted
    # changes. It is often older than `commit`.
    measured: str | None = None


class BaselineDocument(Document):
    """Results with which later launches of a case are compared, in the file `<folder>/<case id>.json`.

    A file that perfsuite recorded has a digest, like a `Sealed` document. A reviewed file has none, because
    people may edit it and git shows the changes.
    """

    FOLDER: ClassVar = "hardware_class"
    case: Case

    @model_validator(mode="before")
    @classmethod
    def _is_whole(cls, values: Any) -> Any:
        if isinstance(values, dict) and "digest" in values:
            return unsealed(
                values, "Restore it or record it again; if the edit is intended, remove the digest"
            )
        return values

    @property
    def folder(self) -> str:
        """The value of the field that `FOLDER` names, such as the hardware class."""
        return str(getattr(self, self.FOLDER))


class Baseline(BaselineDocument):
    """`<hardware class>/<case id>.json`: the accepted or recorded results of a case."""

    schema_version: Literal[1] = 1
    hardware_class: str
    launches: tuple[BaselineLaunch, ...] = Field(min_length=1)
    flops: Flops | None = None
    observed: Observed | None = None
    dtypes: Dtypes = Field(default_factory=dict)  # dtypes in the newest launch's model; empty: not recorded
    recorded_at: str
    accepted: Acceptance | None = None
    expected: Expected | None = None  # the predicted time of a step; None: it was not predicted

    def values(self, figure: str) -> list[float]:
        """Return the values of a figure in launch order, without launches that lack the figure."""
        return values_of(self.launches, figure)

    def by_session(self) -> Iterator[tuple[str | None, BaselineLaunch]]:
        """Yield pairs of a session's name and a launch of this session.

        If the launches of a session ran on different nodes, the name includes the launch's nodes.
        """
        for launch in self.launches:
            others = [other for other in self.launches if other.session == launch.session]
            is_one = all(other.nodes == launch.nodes for other in others)
            yield launch.session if is_one else f"{launch.session} on {', '.join(launch.nodes)}", launch

    def session_sizes(self, figure: str) -> list[int]:
        """Return the number of launches that have a figure, for each session."""
        having = [name for name, launch in self.by_session() if launch.figures.get(figure) is not None]
        return list(Counter(having).values())

    def median(self, figure: str) -> float | None:
        """Return the median of a figure over the launches; None if no launch has it."""
        values = self.values(figure)
        return median(values) if values else None

    def device_probe(self) -> dict[str, float]:
        """Return the median of each rate of the device probe, by name, over the launches with this rate."""
        return _medians([launch.device_probe for launch in self.launches])

    def slowest_share(self) -> dict[str, float]:
        """Return the median of `slowest_share` for each rate, by name, over the launches with this rate."""
        return _medians([launch.slowest_share for launch in self.launches])


def _medians(launches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for rates in launches for name in rates})
    return {name: median(rates[name] for rates in launches if name in rates) for name in names}


def values_of(launches: Iterable[BaselineLaunch], figure: str) -> list[float]:
    """Return the values of a figure in launch order, without launches that lack the figure."""
    values = (launch.figures.get(figure) for launch in launches)
    return [value for value in values if value is not None]


def from_runs(
    runs: Sequence[Run], *, sessions: Sequence[str] | None = None, accepted: Acceptance | None = None
) -> Baseline:
    """Make a baseline from runs of one case on one hardware class. The oldest run comes first.

    Case, machine and settings are taken from the newest run. `sessions` names the session of each run;
    without it, all runs count as launches of one unnamed session.
    """
    named: Sequence[str | None] = sessions or [None] * len(runs)
    first = runs[0]
    newest = runs[-1]
    return Baseline(
        hardware_class=newest.machine.hardware_class,
        case=newest.case,
        launches=tuple(
            BaselineLaunch(
                figures=Figures.of({name: _cut(value) for name, value in run.figures.by_name().items()}),
                loss=tuple(_cut(loss) for loss in loss_curve(run.loss)),
                device_probe={name: _cut(rate) for name, rate in run.device_probe.items()},
                slowest_share={name: _cut(share) for name, share in run.slowest_shares().items()},
                session=session,
                nodes=tuple(node.name for node in run.nodes),
            )
            for run, session in zip(runs, named, strict=True)
        ),
        flops=newest.flops,
        observed=_observed(runs),
        dtypes=newest.dtypes,
        recorded_at=first.started_at,
        accepted=accepted,
    )


def _observed(runs: Sequence[Run]) -> Observed | None:
    """Return what the newest run observed. If the runs had different code, `code` is None."""
    newest = runs[-1].observed
    codes = {None if run.observed is None else run.observed.code for run in runs}
    return newest if newest is None or len(codes) == 1 else newest.replace(code=None)


def loss_curve(loss: Sequence[float]) -> tuple[float, ...]:
    """Reduce a loss series to ten means, each over a tenth of the steps. Shorter series are not changed."""
    tenth = len(loss) / 10
    if tenth < 1:  # pragma: no mutate <: each tenth of ten steps is one step
        return tuple(loss)
    return tuple(fmean(loss[round(part * tenth) : round((part + 1) * tenth)]) for part in range(10))


def _cut(value: float) -> float:
    """Round to six significant digits, because more would only show noise in a diff."""
    return float(f"{value:.6g}")
