from typing import Any

import pytest

from perfsuite.frameworks.torchtitan import compat


@pytest.fixture(scope="session")
def titan() -> Any:
    """Return the module that imports torchtitan, patched for a CPU."""
    compat.before_import("cpu")
    from perfsuite.frameworks.torchtitan import trainer

    return trainer
