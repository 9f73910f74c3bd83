"""Test notes on the cores of ranks, on a machine with two sockets: cores 0-3 and 4-7."""

from typing import Any

import pytest

from perfsuite.analysis.cores import BIND, MORE_CORES, core_notes
from perfsuite.case.case import Topology
from perfsuite.results.rank_report import Observed
from perfsuite.results.run import DeviceHealth, Health, Node
from tests.collected import both, on_gpu
from tests.samples import make_case, make_gpu_machine, make_machine, make_report, make_run

FIRST = "0-3"
SECOND = "4-7"
ALL = "0-7"


def health_of(*near: str, cores: int = 8, of_machine: int | None = 8) -> Health:
    cards = tuple(DeviceHealth(index=index, near_cores=text) for index, text in enumerate(near))
    return Health(samples=9, seconds=5, steps=8, devices=cards, cores=cores, cores_of_machine=of_machine)


def notes(health: Health | None, *cores: str | None, **changes: Any) -> list[str]:
    """Return the notes on ranks that reported these cores; None: the rank did not report its cores."""
    case = make_case(topology=Topology(processes_per_node=len(cores)))
    run = make_run(**{"case": case, "machine": make_gpu_machine(), "health": health, **changes})
    seen = [Observed(settings={}, environment={} if text is None else {"cores": text}) for text in cores]
    return core_notes(run, [make_report(rank, observed=observed) for rank, observed in enumerate(seen)])


LATE = "ranks with fewer than 2 cores can start kernels late"
TORCHRUN = "On the other cores, steps that wait for the host are slower: " + BIND


@pytest.mark.parametrize(
    ("near", "cores", "expected"),
    [
        ((FIRST, SECOND), (FIRST, SECOND), []),
        ((FIRST, SECOND), ("1", "6-7"), []),
        ((ALL, ALL), (ALL, ALL), []),  # a machine with one socket
        (
            (FIRST, SECOND),
            (FIRST, ALL),
            [f"rank 1 may run on 8 cores (4 near the GPU). {TORCHRUN}"],
        ),
        (
            (FIRST, FIRST, SECOND, SECOND),
            (ALL,) * 4,
            [
                f"ranks 0-1 may run on 8 cores (4 near the GPU). {TORCHRUN}",
                f"ranks 2-3 may run on 8 cores (4 near the GPU). {TORCHRUN}",
            ],
        ),
        # The job may use the cores of the first socket only.
        (
            (FIRST, SECOND),
            (FIRST, FIRST),
            [
                "rank 1 may run on 4 cores (0 near the GPU). On the other cores, steps that wait "
                f"for the host are slower: for cores near every GPU, {MORE_CORES}"
            ],
        ),
        # One near core is not enough for the two ranks that share the near cores.
        (
            (FIRST, FIRST),
            ("3-6", "3-6"),
            [
                "ranks 0-1 may run on 4 cores (1 near the GPU). On the other cores, steps that wait "
                f"for the host are slower: for cores near every GPU, {MORE_CORES}"
            ],
        ),
    ],
)
def test_names_ranks_that_may_run_far_from_their_gpu(
    near: tuple[str, ...], cores: tuple[str, ...], expected: list[str]
) -> None:
    assert notes(health_of(*near), *cores) == expected


def test_ranks_that_share_cores_may_be_far_from_gpus() -> None:
    """NVML does not report the near cores."""
    unknown = health_of("", "")
    said = "ranks 0-1 may each run on all 8 cores, and NVML does not report which of them are near"
    (note,) = notes(unknown, ALL, ALL)
    assert note.startswith(said)
    assert note.endswith(f"If the machine has several sockets, {BIND}")
    assert notes(unknown, FIRST, SECOND) == [], "the ranks were bound"
    assert notes(unknown, ALL) == [], "one rank was perhaps bound"


def test_cores_that_were_not_reported_are_unknown() -> None:
    health = health_of(FIRST, SECOND)
    assert notes(health, None, None) == []
    assert len(notes(health, None, ALL)) == 1
    assert notes(None, ALL, ALL) == []
    assert notes(health, ALL, ALL, machine=make_machine()) == [], "there is no GPU"
    case = make_case()
    assert core_notes(make_run(case=case, machine=make_gpu_machine(), health=health), [make_report()]) == []


@pytest.mark.parametrize(
    ("cores", "of_machine", "said"),
    [
        (4, 8, None),
        (3, 8, f"the job may use 3 cores for 2 ranks (the machine has 8); {LATE}: {MORE_CORES}"),
        (
            3,
            3,
            f"the job may use 3 cores for 2 ranks (the machine has 3); {LATE}, but this machine has no other",
        ),
        (1, None, f"the job may use 1 core for 2 ranks; {LATE}: {MORE_CORES}"),
    ],
)
def test_few_cores_of_a_rank_are_noted(cores: int, of_machine: int | None, said: str | None) -> None:
    noted = notes(health_of(ALL, ALL, cores=cores, of_machine=of_machine), "0", "0")
    assert [note.startswith(str(said)) for note in noted] == [True] * (said is not None)


def test_a_note_names_its_node() -> None:
    case = make_case(topology=Topology(nodes=2, processes_per_node=1))
    nodes = (Node(name="n1", health=health_of(FIRST)), Node(name="n2", health=health_of(SECOND, cores=1)))
    run = make_run(case=case, machine=make_gpu_machine(), nodes=nodes, health=None)
    seen = Observed(settings={}, environment={"cores": FIRST})
    noted = core_notes(run, [make_report(rank, observed=seen) for rank in (0, 1)])
    assert [note.partition(" may")[0] for note in noted] == ["n2: the job", "n2: rank 1"]


def test_a_launch_has_the_notes(tmp_path: Any) -> None:
    seen = Observed(settings={}, environment={"cores": ALL})
    run = on_gpu(both(tmp_path, observed=seen, clock="cuda events"), health_of(FIRST, SECOND))
    assert [note for note in run.notes if "near the GPU" in note] == [
        f"rank {rank} may run on 8 cores (4 near the GPU). {TORCHRUN}" for rank in (0, 1)
    ]
