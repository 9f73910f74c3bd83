import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.generation import stopping_criteria
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from perfsuite.dry import generation
from perfsuite.dry.values import WholeNumbersAreReal


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    call = StoppingCriteriaList.__call__
    monkeypatch.setattr(StoppingCriteriaList, "__call__", call)  # restored after the test
    generation.pretend(stopping_criteria)


def made(criteria: StoppingCriteriaList, batch: int = 32) -> int:
    """Return the number of tokens that `generate` makes after a prompt of two tokens."""
    with FakeTensorMode(allow_non_fake_inputs=True), WholeNumbersAreReal():
        tokens = torch.rand(batch, 2, 8).argmax(-1)
        unfinished = torch.ones(batch, dtype=torch.int64)
        for number in range(1, 100):
            tokens = torch.cat([tokens, torch.rand(batch, 1, 8).argmax(-1)], dim=-1)
            unfinished = unfinished & ~criteria(tokens, ())
            if unfinished.max() == 0:
                return number
    raise AssertionError("the sequences never ended")


def ends_at(length: int) -> StoppingCriteriaList:
    return StoppingCriteriaList([MaxLengthCriteria(length), EosTokenCriteria(7)])


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("length", [3, 7])
def test_sequences_get_their_maximum_length(batch: int, length: int) -> None:
    assert made(ends_at(length), batch) == length - 2


def test_without_a_maximum_one_token_is_made() -> None:
    assert made(StoppingCriteriaList([EosTokenCriteria(7)])) == 1


def test_other_operators_do_not_pass_on_the_answer() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), WholeNumbersAreReal():
        ended = ends_at(9)(torch.rand(32, 2, 8).argmax(-1), ())
        assert generation.go_on(ended)
        assert not generation.go_on(ended.any())
