from pathlib import Path

import pytest

from tests.session.making import Sessions


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    return Sessions(tmp_path)
