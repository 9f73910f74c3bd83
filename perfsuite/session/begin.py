"""The three sessions that pytest and the commands begin. Imports neither torch nor pytest."""

from __future__ import annotations

from perfsuite.dry.machine import Device
from perfsuite.launch.arm import resolve
from perfsuite.launch.base import Launcher, Listener
from perfsuite.session.against_arm import AgainstArm
from perfsuite.session.against_baseline import AgainstBaseline
from perfsuite.session.dry import Dry
from perfsuite.session.host import DryHost, Host
from perfsuite.session.options import Options
from perfsuite.session.session import Session
from perfsuite.session.setup import Setup
from perfsuite.verdict.paired_test import MAX_PAIRS


def against_baseline(options: Options, listener: Listener, launcher: Launcher) -> Session:
    """A session that judges cases by their baselines."""
    setup = Setup(options, listener, Host(launcher, options.store))
    return Session(setup, AgainstBaseline(setup))


def against_arm(
    options: Options,
    listener: Listener,
    launcher: Launcher,
    arms: tuple[tuple[str, str], tuple[str, str]],
    max_pairs: int | None = None,
    tolerance: float | None = None,
) -> Session:
    """A session that compares two arms, each given as the option that names it and its value.

    Raises `CaseError` and `GitError` for an arm that there is not.
    """
    setup = Setup(options, listener, Host(launcher, options.store))
    a, b = (resolve(option, text, root=options.root, store=options.store) for option, text in arms)
    way = AgainstArm(setup, (a, b), max_pairs=max_pairs or MAX_PAIRS, tolerance=tolerance)
    return Session(setup, way)


def dry(
    options: Options,
    listener: Listener,
    device: Device | None = None,
    ranks: tuple[int, ...] | None = None,
) -> Session:
    """A session that runs cases dry, on the machines that they are meant for or on another `device`."""
    setup = Setup(options, listener, DryHost(device))
    return Session(setup, Dry(setup, device, ranks))
