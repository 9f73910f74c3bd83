"""Test the launches of a session's reference. The launches are fake."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfsuite.case.case import Case
from perfsuite.case.hardware import Machine
from perfsuite.errors import AllocationOverError, CaseError
from perfsuite.launch.arm import Arm
from perfsuite.results.baseline import Baseline, from_runs
from perfsuite.results.rank_report import Failure, Observed
from perfsuite.results.run import Run
from perfsuite.results.store import SessionDir
from perfsuite.session.plan import Budget
from perfsuite.session.reference import NO_CANARY, UNKNOWN_SHIFT, ReferenceArm
from perfsuite.session.setup import Host
from perfsuite.verdict.noise import ClassNoise, class_noise
from tests.samples import DISTURBED, known, make_case, make_figures, make_run
from tests.session.making import make_setup

ARM = Arm(text="v1:uv.lock", commit="0123abcd" * 5)
SEEN = Observed(settings={}, environment={"torch": "2.13.0"}, code="0123456789ab")
CASES = [make_case(micro_batch=batch) for batch in (1, 2, 3, 4, 5, 6)]
SPEEDS = (1.0, 1.001, 0.999, 1.002, 0.998)


class Nights:
    """Makes references in one repository. Their launches are replaced."""

    def __init__(self, directory: Path) -> None:
        self.said: list[str] = []
        self.setup = make_setup(directory, self.said)
        self.session = SessionDir(directory / "store" / "runs" / "tonight")
        self.launched: list[tuple[Case, Path, Arm]] = []
        self.changes: dict[int, Any] = {}  # micro batch of a case -> changes of its run, or an error

    def _launch(self, case: Case, machine: Any, directory: Path, number: int, how: Any) -> tuple[Run, bool]:
        self.launched.append((case, directory, how.arm))
        changes = self.changes.get(case.micro_batch, {})
        if isinstance(changes, Exception):
            raise changes
        return self.run_of(case, **changes), False

    def run_of(self, case: Case, speed: float = 1.0, **changes: Any) -> Run:
        figures = make_figures(tokens_per_s=1000 * speed, tokens_per_s_mean=990 * speed)
        machine = self.setup.host.machine_for(case)
        return make_run(**{"case": case, "machine": machine, "figures": figures, "observed": SEEN, **changes})

    def baseline_of(self, case: Case) -> Baseline:
        return from_runs([self.run_of(case, speed) for speed in SPEEDS], sessions=["a"] * len(SPEEDS))

    def accept(self, *cases: Case) -> None:
        for case in cases:
            self.setup.baselines.write_reviewed(self.baseline_of(case))

    def reference(self, resolve: Callable[[], Arm] = lambda: ARM, wanted: Any = 5) -> ReferenceArm:
        """Return a reference that has been prepared for all cases."""
        made = ReferenceArm(self.setup, resolve, wanted, launch_watched=self._launch)
        made.prepare(CASES)
        return made

    def noise(self, hardware_class: str) -> ClassNoise:
        return class_noise([self.baseline_of(case) for case in CASES])


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def hardware_class(nights: Nights) -> str:
    return nights.setup.host.machine_for(CASES[0]).hardware_class


def unused(reference: ReferenceArm) -> dict[int, str]:
    """Return why canaries are not used. The keys are their micro batches."""
    return {
        canary.candidate.case.micro_batch: canary.unused
        for canary in reference.canaries
        if canary.unused is not None
    }


def test_every_canary_is_launched_before_the_first_case(nights: Nights) -> None:
    nights.accept(*CASES)
    reference = nights.reference()
    reference.keep_up(nights.session)
    assert [case.micro_batch for case, _, _ in nights.launched] == [1, 2, 3, 4, 5]
    assert all(arm == ARM for _, _, arm in nights.launched)
    _, directory, _ = nights.launched[0]
    assert directory == nights.session.path / "reference" / CASES[0].id / "launch-1"


def test_later_launches_keep_up_with_the_cases(nights: Nights) -> None:
    nights.accept(*CASES)
    reference = nights.reference()
    for launches in (0, 10, 23, 28):
        reference.launches_of_cases = launches
        reference.keep_up(nights.session)
    assert [case.micro_batch for case, _, _ in nights.launched] == [1, 2, 3, 4, 5, 1, 2]


def test_only_cases_with_a_baseline_are_canaries(nights: Nights) -> None:
    nights.accept(*CASES[2:4])
    assert [canary.candidate.case for canary in nights.reference().canaries] == CASES[2:4]
    assert nights.said == [
        f"perfsuite: cases launched with the reference v1:uv.lock: {CASES[2].id}, {CASES[3].id}"
    ]


def test_a_session_without_baselines_goes_on_without_a_reference(nights: Nights) -> None:
    reference = nights.reference()
    reference.keep_up(nights.session)
    assert nights.launched == []
    assert nights.said == [f"perfsuite: {NO_CANARY}"]
    assert reference.facts(nights.noise).problems == (NO_CANARY,)


def test_a_reference_that_no_longer_installs_is_reported(nights: Nights) -> None:
    def fails() -> Arm:
        raise CaseError("--perf-reference 'v1:uv.lock': torch==2.13.0 cannot be installed")

    nights.accept(*CASES)
    reference = nights.reference(fails)
    reference.keep_up(nights.session)
    [problem] = reference.facts(nights.noise).problems
    assert problem.startswith(
        "no case can be launched with the reference, so cases are judged without it: --perf-ref"
    )
    assert reference.tonight(hardware_class(nights)) is None
    assert nights.launched == []


def test_a_user_can_name_the_canaries(nights: Nights) -> None:
    nights.accept(*CASES)
    reference = nights.reference(wanted=(CASES[4].id, CASES[1].id))
    assert [canary.candidate.case for canary in reference.canaries] == [CASES[4], CASES[1]]


class TwoClasses(Host):
    """A host whose machine is of another hardware class for the first two cases."""

    def machine_for(self, case: Case) -> Machine:
        usual = super().machine_for(case)
        return usual.replace(hardware_class="cpu-test-2c-eth100") if case in CASES[:2] else usual


@pytest.fixture
def two_classes(nights: Nights) -> Nights:
    nights.setup.host = TwoClasses()
    nights.accept(*CASES)
    return nights


def test_names_hardware_classes_without_a_reference(two_classes: Nights) -> None:
    reference = two_classes.reference()
    assert {canary.candidate.case.micro_batch for canary in reference.canaries} == {3, 4, 5, 6}
    [problem] = reference.problems
    assert problem.endswith(
        "Cases on cpu-test-2c-eth100 are judged without it, unless --perf-canaries names some of them"
    )


def test_named_canaries_can_be_of_several_classes(two_classes: Nights) -> None:
    reference = two_classes.reference(wanted=(CASES[0].id, CASES[5].id))
    reference.keep_up(two_classes.session)
    for case in (CASES[0], CASES[5]):
        hardware = two_classes.setup.host.machine_for(case).hardware_class
        assert [*known(reference.tonight(hardware)).canaries] == [case.id]
    assert reference.problems == []


def test_a_name_that_is_given_twice_is_one_canary(nights: Nights) -> None:
    nights.accept(*CASES)
    assert len(nights.reference(wanted=(CASES[4].id, CASES[4].id)).canaries) == 1


def test_an_error_of_the_resolver_is_reported(nights: Nights) -> None:
    def fails() -> Arm:
        raise OSError("no space left on device")

    nights.accept(*CASES)
    assert "no space left on device" in nights.reference(fails).problems[0]


def test_a_name_that_is_not_a_canary_is_reported(nights: Nights) -> None:
    nights.accept(*CASES[:3])
    reference = nights.reference(wanted=(CASES[0].id, "llama"))
    assert [canary.candidate.case for canary in reference.canaries] == CASES[:1]
    assert reference.problems == [
        "--perf-canaries names llama, but a canary must be a selected case with a baseline on this machine: "
        "name such cases, or give the number of canaries"
    ]


def test_a_canary_that_crashes_is_left_out(nights: Nights) -> None:
    nights.accept(*CASES)
    nights.changes[2] = {"failure": Failure(kind="crash", message="exit code 1", rank=0)}
    reference = nights.reference()
    reference.keep_up(nights.session)
    assert unused(reference) == {2: "crash: exit code 1"}
    assert (
        f"perfsuite: the launches of {CASES[1].id} with the reference are not used: crash: exit code 1"
        in nights.said
    )
    tonight = reference.tonight(hardware_class(nights))
    assert tonight is not None
    assert len(tonight.canaries) == 4


def test_a_reference_that_always_crashes_is_not_repeated(nights: Nights) -> None:
    nights.accept(*CASES)
    nights.changes = {batch: {"failure": Failure(kind="crash", message="x")} for batch in range(7)}
    reference = nights.reference()
    for launches in (0, 100):
        reference.launches_of_cases = launches
        reference.keep_up(nights.session)
    assert len(nights.launched) == 5
    assert reference.tonight(hardware_class(nights)) is None


def test_an_error_does_not_end_the_session(nights: Nights) -> None:
    nights.accept(*CASES)
    nights.changes[1] = RuntimeError("a bug")
    reference = nights.reference()
    reference.keep_up(nights.session)
    assert unused(reference) == {1: "the case could not be launched: RuntimeError: a bug"}


def test_the_end_of_an_allocation_ends_the_session(nights: Nights) -> None:
    nights.accept(*CASES)
    nights.changes[1] = AllocationOverError("over")
    with pytest.raises(AllocationOverError):
        nights.reference().keep_up(nights.session)


def test_a_reference_newer_than_the_baseline_is_not_used(nights: Nights) -> None:
    nights.accept(*CASES)
    newer = {"observed": SEEN.replace(environment={"torch": "2.14.0"})}
    nights.changes = dict.fromkeys(range(7), newer)
    reference = nights.reference()
    reference.keep_up(nights.session)
    assert set(unused(reference).values()) == {
        "the reference differs from what the baseline measured (torch: 2.13.0 -> 2.14.0)"
    }
    assert reference.tonight(hardware_class(nights)) is None


def test_a_disturbed_launch_is_not_evidence(nights: Nights) -> None:
    nights.accept(*CASES)
    nights.changes[3] = {"health": DISTURBED}
    reference = nights.reference()
    reference.keep_up(nights.session)
    tonight = reference.tonight(hardware_class(nights))
    assert tonight is not None
    assert CASES[2].id not in tonight.canaries
    assert unused(reference) == {}


def test_records_how_the_machine_changed(nights: Nights) -> None:
    nights.accept(*CASES)
    nights.changes = {batch: {"speed": 0.9} for batch in range(7)}
    reference = nights.reference()
    reference.keep_up(nights.session)
    facts = reference.facts(nights.noise)
    speed = facts.changes[0]
    assert (speed.metric, len(speed.canaries)) == ("tokens_per_s", 5)
    assert speed.change == pytest.approx(-0.1, abs=0.002)
    assert (facts.arm.text, facts.problems) == ("v1:uv.lock", ())
    assert [len(canary.runs) for canary in facts.canaries] == [1] * 5


def test_one_canary_of_one_session_says_what_is_missing(nights: Nights) -> None:
    nights.accept(*CASES)
    reference = nights.reference(wanted=1)
    reference.keep_up(nights.session)
    facts = reference.facts(nights.noise)
    assert (facts.changes, facts.problems) == ((), (UNKNOWN_SHIFT,))


def test_a_budget_without_time_leaves_the_reference_out(nights: Nights) -> None:
    nights.accept(*CASES)
    nights.setup.budget = Budget(seconds=0.0, launch_s={case.id: 10.0 for case in CASES})
    nights.reference().keep_up(nights.session)
    assert nights.launched == []


def made_on(nights: Nights, batch: int) -> int:
    """Return how often the reference was launched on a case."""
    return sum(case.micro_batch == batch for case, _, _ in nights.launched)


def confirmed(nights: Nights, batch: int, *, launches: int = 3) -> ReferenceArm:
    """Return a reference with two canaries that was also launched on a case to confirm a change."""
    reference = nights.reference(wanted=2)
    reference.keep_up(nights.session)
    reference.confirm(CASES[batch - 1], launches, nights.session)
    return reference


def confirming(reference: ReferenceArm, nights: Nights) -> dict[str, int]:
    """Return the number of the confirming launches of each case."""
    tonight = known(reference.tonight(hardware_class(nights)))
    return {case_id: len(canary.runs) for case_id, canary in tonight.confirming.items()}


def test_confirms_with_as_many_launches_as_the_case(nights: Nights) -> None:
    nights.accept(*CASES)
    reference = confirmed(nights, 6, launches=4)
    assert confirming(reference, nights) == {CASES[5].id: 4}
    assert nights.launched[-1] == (CASES[5], nights.session.reference(CASES[5].id) / "launch-4", ARM)
    assert len(known(reference.tonight(hardware_class(nights))).canaries) == 2


def test_records_which_cases_only_looked_slower(nights: Nights) -> None:
    nights.accept(*CASES)
    canaries = confirmed(nights, 6).facts(nights.noise).canaries
    assert {canary.case_id for canary in canaries if canary.looked_slower} == {CASES[5].id}
    canaries = confirmed(nights, 1).facts(nights.noise).canaries
    assert [canary.looked_slower for canary in canaries] == [False, False]


def test_the_launches_of_a_canary_confirm_too(nights: Nights) -> None:
    nights.accept(*CASES)
    reference = confirmed(nights, 1)
    assert confirming(reference, nights) == {CASES[0].id: 3}
    assert made_on(nights, 1) == 3
    assert len(reference.facts(nights.noise).canaries) == 2


def test_confirming_launches_do_not_replace_those_of_canaries(nights: Nights) -> None:
    nights.accept(*CASES)
    reference = confirmed(nights, 6)
    reference.launches_of_cases = 12
    reference.keep_up(nights.session)
    assert [made_on(nights, batch) for batch in (1, 2, 6)] == [2, 1, 3]


def test_too_few_launches_confirm_nothing(nights: Nights) -> None:
    nights.accept(*CASES)
    assert confirming(confirmed(nights, 6, launches=2), nights) == {}
    assert made_on(nights, 6) == 0


def test_a_case_without_a_baseline_is_not_confirmed(nights: Nights) -> None:
    nights.accept(*CASES[:5])
    assert confirming(confirmed(nights, 6), nights) == {}
    assert made_on(nights, 6) == 0


def test_a_reference_that_crashes_confirms_nothing(nights: Nights) -> None:
    nights.accept(*CASES)
    nights.changes[6] = {"failure": Failure(kind="crash", message="exit code 1", rank=0)}
    reference = confirmed(nights, 6)
    assert confirming(reference, nights) == {}
    assert made_on(nights, 6) == 1
    assert reference.facts(nights.noise).canaries[-1].unused == "crash: exit code 1"


def test_a_budget_without_time_confirms_nothing(nights: Nights) -> None:
    nights.accept(*CASES)
    nights.setup.budget = Budget(seconds=100.0, launch_s={CASES[0].id: 1.0, CASES[1].id: 1.0})
    nights.setup.budget.launch_s[CASES[5].id] = 1000.0
    assert confirming(confirmed(nights, 6), nights) == {}
    assert made_on(nights, 6) == 0


def test_confirming_launches_are_recorded(nights: Nights) -> None:
    nights.accept(*CASES)
    facts = confirmed(nights, 6).facts(nights.noise)
    assert [len(canary.runs) for canary in facts.canaries] == [1, 1, 3]
