"""Numbers that ranks decide with keep their values on the device."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from perfsuite.dry.values import WholeNumbersAreReal

pytestmark = pytest.mark.filterwarnings("ignore:.torch.distributed:FutureWarning")  # renamed in torch 2.13

RANKS = 4
DEVICE = "meta"  # any device other than the CPU: nothing here is specific to CUDA


@pytest.fixture
def dry() -> Iterator[None]:
    """The modes in which scripts run dry."""
    with FakeTensorMode(allow_non_fake_inputs=True), WholeNumbersAreReal():
        yield


@pytest.fixture
def ranks(dry: None) -> Iterator[None]:
    """A process group of four ranks, of which only this process exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def on_device(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers).to(DEVICE)


@pytest.mark.usefixtures("dry")
def test_number_keeps_its_value_on_the_device() -> None:
    assert [on_device(0).item(), on_device(7).item()] == [0, 7]


@pytest.mark.usefixtures("dry")
def test_number_returns_from_the_device() -> None:
    assert on_device(3, 5).cpu().tolist() == [3, 5]


@pytest.mark.usefixtures("dry")
def test_numbers_are_compared_on_the_device() -> None:
    stop = on_device(0)
    assert (bool(stop == 0), bool(stop == 1), bool((stop + 1).any())) == (True, False, True)


@pytest.mark.usefixtures("dry")
def test_number_changed_in_place_is_unknown() -> None:
    """Without a value, a number reads 1."""
    steps = on_device(5)
    steps.add_(1)
    assert steps.item() == 1


@pytest.mark.usefixtures("dry")
def test_number_changed_through_a_view_is_unknown() -> None:
    steps = on_device(5, 6)
    view = steps[:1]
    steps.zero_()
    assert view.item() == 1


@pytest.mark.usefixtures("dry")
def test_change_of_the_real_tensor_does_not_reach_the_device() -> None:
    real = torch.tensor([4])
    moved = real.to(DEVICE)
    real.fill_(9)
    assert moved.item() == 4


@pytest.mark.usefixtures("dry")
def test_results_of_the_model_stay_unknown() -> None:
    loss = torch.zeros(1, device=DEVICE)
    assert [loss.item(), (loss + on_device(3)).item()] == [1.0, 1.0]


@pytest.mark.usefixtures("dry")
def test_a_batch_is_not_followed() -> None:
    tokens = torch.zeros(4, 8, dtype=torch.int64).to(DEVICE)
    assert tokens.sum().item() == 1


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("to", ["cpu", DEVICE])
def test_broadcast_keeps_the_number(to: str) -> None:
    flag = torch.tensor([0]).to(to)
    dist.broadcast(flag, src=0)
    assert flag.item() == 0


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("to", ["cpu", DEVICE])
@pytest.mark.parametrize(
    ("operation", "result"),
    [(dist.ReduceOp.SUM, 3 * RANKS), (dist.ReduceOp.PRODUCT, 3**RANKS), (dist.ReduceOp.MAX, 3)],
)
def test_ranks_reduce_the_same_number(to: str, operation: dist.ReduceOp, result: int) -> None:
    number = torch.tensor([3]).to(to)
    dist.all_reduce(number, op=operation)
    assert number.item() == result


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("to", ["cpu", DEVICE])
def test_ranks_gather_the_same_number(to: str) -> None:
    number = torch.tensor([3]).to(to)
    gathered = [torch.empty_like(number) for _ in range(RANKS)]
    dist.all_gather(gathered, number)
    assert [tensor.item() for tensor in gathered] == [3] * RANKS


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("to", ["cpu", DEVICE])
def test_ranks_gather_the_same_numbers_into_a_tensor(to: str) -> None:
    numbers = torch.tensor([3, 5]).to(to)
    gathered = torch.empty(2 * RANKS, dtype=numbers.dtype, device=to)
    dist.all_gather_into_tensor(gathered, numbers)
    assert gathered.cpu().tolist() == [3, 5] * RANKS


@pytest.mark.usefixtures("ranks")
def test_output_of_another_collective_is_unknown() -> None:
    received = on_device(0)
    dist.reduce_scatter_tensor(received, on_device(0, 0, 0, 0))
    assert received.item() == 1


@pytest.mark.usefixtures("ranks")
def test_all_agree_as_lightning_asks() -> None:
    """`reduce_boolean_decision` of Lightning's strategies."""
    decisions = []
    for decision in (False, True):
        votes = torch.tensor(int(decision)).to(DEVICE)
        dist.all_reduce(votes)
        decisions.append((bool(votes == RANKS), bool(votes)))
    assert decisions == [(False, False), (True, True)]


@pytest.mark.usefixtures("ranks")
def test_a_flag_stays_a_flag() -> None:
    flag = torch.tensor([True]).to(DEVICE)
    dist.all_reduce(flag)
    assert flag.cpu().dtype is torch.bool
