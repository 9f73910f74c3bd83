import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from perfsuite.dry.values import NoValues, WholeNumbersAreReal, cast


def test_reads_are_answered_so_that_every_step_is_made() -> None:
    with FakeTensorMode(), NoValues():
        assert bool(torch.ones(3).all()) is True  # no token is masked
        assert torch.ones((), dtype=torch.int64).item() == 1
        assert torch.tensor(7.0).item() == 1.0  # the counter of an optimizer, by which it divides
        assert torch.equal(torch.ones(2), torch.zeros(2))


def test_a_gradient_scaler_finds_no_infinity() -> None:
    with FakeTensorMode(), NoValues():
        gradient, found = torch.ones(4), torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, torch.ones(()))
        assert found.item() == 0.0


def test_whole_numbers_that_nobody_filled_are_ones_whatever_was_in_their_memory() -> None:
    """Such as those that a collective of fake tensors is to fill, by which a script then decides."""
    with FakeTensorMode(allow_non_fake_inputs=True), WholeNumbersAreReal():
        for _ in range(3):
            used = torch.arange(1000)
            of_one_size = used.new_empty(1000), torch.empty_like(used), torch.empty(1000, dtype=torch.int64)
            assert [each.eq(1).sum().item() for each in of_one_size] == [1000] * 3
            used.fill_(0)
            del used, of_one_size


def test_a_cpu_has_no_number() -> None:
    with FakeTensorMode(), NoValues():
        assert (torch.ones(2, device="cpu:0") + torch.ones(2)).device == torch.device("cpu")


def test_a_module_is_cast_and_what_is_tied_stays_tied() -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        model[0].weight.requires_grad_(False)
        assert cast(model, "cpu") is model
        assert model[0].bias.dtype is torch.float32
        cast(model, torch.bfloat16)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        assert model[1].weight is model[0].weight
        assert [parameter.requires_grad for parameter in model.parameters()] == [False, True]
