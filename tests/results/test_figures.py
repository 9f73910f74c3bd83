from __future__ import annotations

import pytest

from perfsuite.results.figures import _energy_per_token_j, _gpu_utilisation
from perfsuite.results.run import DeviceHealth
from tests.results.test_health import make_health


def test_figures() -> None:
    devices = tuple(
        DeviceHealth(index=index, utilisation=90.0 + index, energy_j=3000.0 + index) for index in range(3)
    )
    told = make_health(devices=devices)
    assert _gpu_utilisation(told) == 91
    assert _energy_per_token_j(told, 100) == pytest.approx(9003 / 1900)
    silent = make_health(devices=(*devices, DeviceHealth(index=3)))
    assert _gpu_utilisation(silent) == 91
    assert _energy_per_token_j(silent, 100) is None
    for nothing in (None, make_health()):
        assert _gpu_utilisation(nothing) is None
        assert _energy_per_token_j(nothing, 100) is None
