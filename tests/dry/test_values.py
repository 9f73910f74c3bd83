from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from perfsuite.dry import values
from perfsuite.dry.values import NoValues, WholeNumbersAreReal, cast
from perfsuite.errors import DryRunError

aten = torch.ops.aten


def test_reads_get_answers_that_let_steps_run() -> None:
    with FakeTensorMode(), NoValues():
        assert bool(torch.ones(3).all()) is True  # no token is masked
        assert torch.ones((), dtype=torch.int64).item() == 1
        assert torch.tensor(7.0).item() == 1.0  # an optimizer divides by its counter
        assert torch.equal(torch.ones(2), torch.zeros(2))


def test_a_gradient_scaler_finds_no_infinity() -> None:
    with FakeTensorMode(), NoValues():
        gradient = torch.ones(4)
        infinities = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_([gradient], infinities, torch.ones(()))
        assert infinities.item() == 0.0


TESTS_FOR_NANS: dict[str, Callable[[torch.Tensor], Any]] = {
    "isnan": torch.isnan,
    "any isnan": lambda x: torch.isnan(x).any(),
    "isinf": lambda x: torch.any(torch.isinf(x)),
    "isposinf": torch.isposinf,
    "isneginf": torch.isneginf,
    "not isfinite": lambda x: not torch.isfinite(x),
    "~isfinite": lambda x: ~torch.isfinite(x),
    "any ~isfinite": lambda x: (~torch.isfinite(x)).any(),
    "logical_not": lambda x: torch.isfinite(x).logical_not(),
    "isfinite is False": lambda x: torch.isfinite(x).all() == False,  # noqa: E712  scripts write this
    "sum": lambda x: torch.isnan(x).sum() > 0,
    "sum of floats": lambda x: torch.isnan(x).float().sum().item() > 0,
    "max of integers": lambda x: torch.isnan(x).int().max().item(),
    "isnan or isinf": lambda x: torch.isnan(x) | torch.isinf(x),
    "in place": lambda x: torch.isnan(x).logical_or_(torch.isinf(x)),
    "on the CPU": lambda x: x.isnan().to("cpu"),
    "stacked": lambda x: torch.stack([x.isnan(), x.isinf()]).any(),
    "not equal to itself": lambda x: x != x,
    "not all equal": lambda x: not (x == x).all(),
    "infinite": lambda x: x.abs() == float("inf"),
}


@pytest.mark.parametrize("form", TESTS_FOR_NANS)
def test_there_are_no_nans_and_no_infinities(form: str) -> None:
    with FakeTensorMode(), NoValues():
        assert not bool(TESTS_FOR_NANS[form](torch.ones(()) * 2))


def test_many_numbers_have_no_nans() -> None:
    with FakeTensorMode(), NoValues():
        assert not torch.isfinite(torch.ones(1000, 1000)).all().logical_not()


def test_changed_answer_is_forgotten() -> None:
    with FakeTensorMode(), NoValues():
        flag = torch.isnan(torch.ones(()))
        flag.fill_(value=True)
        assert flag


def test_unfilled_integers_are_ones() -> None:
    """A collective on fake tensors writes no values to its output, but a script can branch on this output."""
    with FakeTensorMode(allow_non_fake_inputs=True), WholeNumbersAreReal():
        for _ in range(3):
            used = torch.arange(1000)
            of_one_size = used.new_empty(1000), torch.empty_like(used), torch.empty(1000, dtype=torch.int64)
            assert [tensor.eq(1).sum().item() for tensor in of_one_size] == [1000] * 3
            used.fill_(0)
            del used, of_one_size


def test_compiled_code_may_save_the_random_state() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), NoValues():
        query = torch.ones(4, 4)
        state, product = torch.ops.higher_order.run_and_save_rng_state(aten.mm.default, query, query)
        again = torch.ops.higher_order.run_with_rng_state(state, aten.mm.default, query, query)
        assert (product.shape, again.shape) == ((4, 4), (4, 4))


def test_a_cpu_has_no_number() -> None:
    with FakeTensorMode(), NoValues():
        assert (torch.ones(2, device="cpu:0") + torch.ones(2)).device == torch.device("cpu")


def test_cast_module_keeps_its_tied_weights() -> None:
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


def test_cast_module_casts_its_float_buffers() -> None:
    with FakeTensorMode():
        model = nn.BatchNorm1d(4)
        cast(model, torch.bfloat16)
        assert {name: buffer.dtype for name, buffer in model.named_buffers()} == {
            "running_mean": torch.bfloat16,
            "running_var": torch.bfloat16,
            "num_batches_tracked": torch.int64,
        }


def test_moved_module_keeps_its_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron marks the parameters of experts before it moves the model."""
    monkeypatch.setattr(torch.utils, "swap_tensors", values._swap)
    with FakeTensorMode():
        model = nn.Linear(4, 4)
        vars(model.weight)["allreduce"] = False
        before = model.weight
        model.to(torch.bfloat16)
    assert (model.weight is before, model.weight.dtype) == (True, torch.bfloat16)
    assert vars(model.weight)["allreduce"] is False


@pytest.fixture
def with_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", True)
    monkeypatch.setattr(torch.Tensor, "data", property(values._DATA.__get__, values._set_data))


@pytest.mark.usefixtures("with_data")
@pytest.mark.parametrize("whole", [False, True])
def test_data_of_another_device_move_a_tensor(whole: bool) -> None:
    """FSDP2 moves parameters like this, and also buffers of whole numbers, which have real values."""
    with FakeTensorMode(allow_non_fake_inputs=True), WholeNumbersAreReal():
        made = torch.arange(3) if whole else nn.Parameter(torch.ones(3))
        assert isinstance(made, FakeTensor) is not whole
        made.data = made.detach().to("cuda:0")  # autograd would query a GPU, and none is simulated here
        assert made.device == made.data.device == torch.device("cuda", 0)
        assert made.requires_grad is not whole
        assert made.is_leaf


def test_type_of_a_fake_parameter_makes_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The type of a real parameter also makes parameters. accelerate loads weights with it."""
    monkeypatch.setattr(FakeTensor, "__new__", values._parameter_of_its_class(FakeTensor.__new__))
    with FakeTensorMode():
        parameter = nn.Parameter(torch.ones(3))
        kind: Any = type(parameter)
        frozen = kind(torch.ones(2), requires_grad=False)
        again = kind(torch.ones(2), **{**parameter.__dict__, "requires_grad": True})
    assert isinstance(frozen, nn.Parameter)
    assert isinstance(again, nn.Parameter)
    assert (frozen.requires_grad, again.requires_grad) == (False, True)


@pytest.mark.parametrize("version", ["4.50.3", "4.57.3"])
def test_transformers_4_skips_masks_by_itself(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.delattr("transformers.utils.import_utils.is_fake_tensor")
    values.let_masks_be_skipped(SimpleNamespace(__version__=version))


def test_transformers_5_has_what_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("transformers.utils.import_utils.is_fake_tensor")
    with pytest.raises(DryRunError, match=r"transformers has no transformers\.utils\.import_utils\.is_fake"):
        values.let_masks_be_skipped(SimpleNamespace(__version__="5.23.0"))
