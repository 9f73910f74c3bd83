from typing import Any

import pytest

from perfsuite.frameworks.torchtitan import compat


@pytest.fixture(scope="session")
def titan() -> Any:
    """Return the module that imports torchtitan, patched for a CPU.

    Modules of torchtitan copy the device when they are imported. So the patches must come first, as in a
    rank.
    """
    compat.before_import("cpu")
    from torchtitan.components import metrics

    from perfsuite.frameworks.torchtitan import trainer

    assert metrics.device_type == "cpu", "an earlier test imported torchtitan: call `Framework.load` there"
    return trainer
