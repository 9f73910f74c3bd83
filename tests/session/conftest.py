from pathlib import Path

import pytest

from tests.session.making import Sessions


@pytest.fixture
def sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sessions:
    return Sessions(tmp_path, monkeypatch)
