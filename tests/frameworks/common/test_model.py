from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from perfsuite.frameworks.base import Ranks
from perfsuite.frameworks.common.model import DISTINCT_BATCHES, has_attention, synthetic_batches
from perfsuite.frameworks.ddp import DDP
from tests.processes import python
from tests.samples import make_case

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, world_size=1, device=CPU, directory=Path())
TINY = make_case(
    model="llama-tiny", framework=DDP(), sequence_length=8, micro_batch=1, topology={"processes_per_node": 1}
)


@pytest.mark.launch
def test_rank_without_a_model_imports_no_extras() -> None:
    code = (
        "import perfsuite.frameworks.common.loop, perfsuite.frameworks.common.model, sys\n"
        "print({'transformers', 'accelerate', 'peft', 'bitsandbytes'} & set(sys.modules))"
    )
    assert python(code) == "set()\n"


def test_each_data_rank_has_its_own_tokens() -> None:
    case = TINY.replace(micro_batch=2)
    first = synthetic_batches(case, 0, CPU)
    second = synthetic_batches(case, 1, CPU)
    assert [batch.shape for batch in first] == [(2, 8)] * DISTINCT_BATCHES
    assert first[0].dtype == torch.int64
    assert not torch.equal(first[0], second[0])
    larger = synthetic_batches(case.replace(micro_batch=4), 0, CPU)
    assert torch.equal(larger[0][:2], first[0])


def test_sees_attention_in_older_configurations() -> None:
    """A script can use transformers before 4.45, whose configurations have no `get_text_config`."""
    assert has_attention(SimpleNamespace(num_attention_heads=4))
    assert not has_attention(SimpleNamespace(state_size=16))
