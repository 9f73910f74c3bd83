import pytest

from perfsuite.case.case import Case
from perfsuite.launch.local import LocalLauncher
from perfsuite.session.session import Session
from perfsuite.session.setup import Host
from perfsuite.session.unclaimed import unclaimed
from tests.samples import make_case, make_gpu_machine
from tests.session.making import Sessions

H100 = make_case(hardware="h100")


@pytest.fixture
def on_h100(sessions: Sessions) -> Session:
    """Return a session on an H100, with reviewed counts of a case that it does not select."""
    ours = sessions.make()
    ours.setup.host = Host(LocalLauncher())
    ours.setup.host.machine = make_gpu_machine()
    return ours


def named(session: Session, other: Case) -> list[str]:
    """Return what `-m h100` says about another case, which has reviewed counts of an H100."""
    folder = session.setup.baselines.counts.reviewed / "sm90"
    folder.mkdir(parents=True)
    (folder / f"{other.id}.json").write_text("{}")
    cases = {case.id: case for case in (H100, other)}
    return [why.partition(": ")[2] for _, why in unclaimed(session.mode, cases, {H100.id}, {"h100"})]


@pytest.mark.parametrize("hardware", ["h200", "gh200"])
def test_counts_of_like_gpus_belong_to_their_nights(on_h100: Session, hardware: str) -> None:
    assert named(on_h100, make_case(micro_batch=7, hardware=hardware)) == []


@pytest.mark.parametrize("hardware", ["a100", "cpu"])
def test_counts_of_other_hardware_are_unclaimed(on_h100: Session, hardware: str) -> None:
    other = make_case(micro_batch=7, hardware=hardware)
    assert named(on_h100, other) == [f"its case is now for {hardware}"]
