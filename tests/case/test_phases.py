import pytest

from perfsuite import Script
from perfsuite.case.phases import DATA_WAIT, MEASURED_STEPS, phase_name
from perfsuite.errors import CaseError


@pytest.mark.parametrize("name", ["rollout", "reward model", "ppo/score-2", "save checkpoint"])
def test_a_phase_has_words_for_a_name(name: str) -> None:
    assert phase_name(name) == name


@pytest.mark.parametrize("name", ["", "2nd", "a\nb", "x" * 41, 7])
def test_an_invalid_phase_name_is_refused(name: object) -> None:
    with pytest.raises(CaseError) as error:
        phase_name(name)
    assert str(error.value).startswith(f"{name!r} is not a valid phase name: begin with a letter")


def test_a_phase_cannot_be_called_as_a_step_is() -> None:
    with pytest.raises(CaseError, match=r"^'step 10' is used in reports"):
        phase_name("step 10")


@pytest.mark.parametrize("function", ["generate", "train.generate", "a b:c"])
def test_a_phase_of_a_case_is_module_and_name(function: str) -> None:
    with pytest.raises(CaseError, match=f"'{function}'}} is not of the form module:name"):
        Script(path="train.py", phases={"rollout": function})


def test_case_refuses_a_taken_phase_name() -> None:
    with pytest.raises(CaseError, match=r"^Script: phases: 'step 1' is used"):
        Script(path="train.py", phases={"step 1": "train:generate"})


def test_a_case_that_names_phases_keeps_its_id() -> None:
    """The training is the same, so the case's baselines remain valid."""
    named = Script(path="train.py", phases={"rollout": "train:generate"})
    assert named.slug() == Script(path="train.py").slug()


@pytest.mark.parametrize(
    "name",
    [
        MEASURED_STEPS,
        DATA_WAIT,
        "steps 4-6",
        "from step 6 on",
        "every 5th step",
    ],
)
def test_phase_refuses_names_of_rows_of_the_spans(name: str) -> None:
    with pytest.raises(CaseError, match="is used in reports for steps, the start-up or the wait for data: "):
        phase_name(name)


@pytest.mark.parametrize("name", ["data waiting", "measured steps of mine", "every step", "step by step"])
def test_phase_can_have_a_similar_name(name: str) -> None:
    assert phase_name(name) == name


def test_the_name_of_a_file_is_refused() -> None:
    with pytest.raises(CaseError) as error:
        Script(path="train.py", phases={"x": "a.py:f"})
    assert str(error.value) == (
        "Script: phases: {'x': 'a.py:f'} names a file, not a module. Leave out '.py': 'a:f'"
    )


@pytest.mark.parametrize("phases", [{"x": ""}, {"x": "", "y": "train:f"}, {"step 1": "train:f"}])
def test_a_message_shows_phases_only_once(phases: dict[str, str]) -> None:
    with pytest.raises(CaseError) as error:
        Script(path="train.py", phases=phases)
    assert ", got" not in str(error.value)


@pytest.mark.parametrize("name", ["cold evaluation", "start-up", "start-up build"])
def test_phase_refuses_names_of_start_up_parts(name: str) -> None:
    with pytest.raises(CaseError, match="is used in reports"):
        phase_name(name)
